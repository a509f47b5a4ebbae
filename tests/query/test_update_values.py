"""The short way of checking an update gives what the long one gives, or leaves it to that."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from itertools import product
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel, Field, field_validator, model_validator

from treadle import Document, Id
from treadle.errors import UsageError
from treadle.model.codec import codec_of
from treadle.query.safety import clean_update
from treadle.query.update_values import check_values, plainly_checked


class Colour(Enum):
    RED = "red"


class Part(BaseModel):
    size: int


class Plain(Document, collection="plain"):
    whole: int = 0
    part: float = 0.0
    text: str = ""
    flag: bool = False
    maybe: int | None = None
    owner: Id | None = None
    price: Decimal = Decimal(0)
    colour: Colour = Colour.RED
    day: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    bounded: Annotated[int, Field(ge=0, le=9)] = 0
    short: Annotated[str, Field(max_length=3)] = ""
    tags: list[str] = []
    inner: Part = Part(size=1)
    renamed: Annotated[int, Field(alias="otherName")] = 0
    judged: int = 0

    @field_validator("judged")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value * 10


class Whole(Document, collection="whole"):
    whole: int = 0

    @model_validator(mode="after")
    def _judge(self) -> Whole:
        return self


VALUES: list[Any] = [
    0, 1, -3, 2**63 - 1, 2**63, -(2**63) - 1, 1.0, 1.5, float("nan"), float("inf"), True, None, "", "ab",
    "text", "ä", "\ud800", "f" * 24, ObjectId(), Decimal("1.5"), Colour.RED, b"x", [1], {"size": 2},
    {"$where": "1"}, datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), Part(size=1), {1, 2}, object(),
]  # fmt: skip
PATHS = [
    *(
        "whole",
        "part",
        "text",
        "flag",
        "maybe",
        "owner",
        "price",
        "colour",
        "day",
        "bounded",
        "short",
        "tags",
    ),
    *(
        "inner",
        "inner.size",
        "renamed",
        "otherName",
        "judged",
        "_id",
        "_treadle",
        "nothing",
        "tags.0",
        "",
        "$x",
    ),
]
OPERATORS = ["$set", "$inc", "$mul", "$unset", "$push", "$min", "$rename", "$where", "set"]


def _at_length(model: type[Document], update: Any) -> tuple[Any, bool] | None:
    codec = codec_of(model)
    try:
        return check_values(codec, clean_update(codec, update), lambda _: False)
    except UsageError:
        return None


@pytest.mark.parametrize("model", [Plain, Whole])
def test_in_short_an_update_comes_to_the_same_as_at_length(model: type[Document]) -> None:
    taken = set()
    for operator, path, value in product(OPERATORS, PATHS, VALUES):
        update = {operator: {path: value}}
        short = plainly_checked(codec_of(model), update)
        if short is not None:
            taken.add((operator, path))
            # As text, which tells 1 from 1.0 and from True.
            assert repr((short, True)) == repr(tuple(_at_length(model, update) or ())), update
    simple = {("$set", "text"), ("$set", "maybe"), ("$inc", "whole"), ("$inc", "part"), ("$set", "otherName")}
    assert (simple if model is Plain else set()) <= taken
    # What a result may not fit, or what no field has, is looked at.
    assert not taken & {("$inc", "bounded"), ("$inc", "judged"), ("$set", "renamed"), ("$set", "nothing")}
    if model is Whole:
        assert set() == taken


@pytest.mark.parametrize(
    "update", [{}, [], None, "text", {"$set": None}, {"$set": [1]}, [{"$set": {"whole": 1}}]]
)
def test_what_is_no_simple_update_is_left_to_the_long_way(update: Any) -> None:
    assert plainly_checked(codec_of(Plain), update) is None


def test_an_update_that_is_checked_is_not_the_callers_own() -> None:
    """The caller may go on to change it while it waits in a queue."""
    update = {"$inc": {"whole": 1}}
    checked = plainly_checked(codec_of(Plain), update)
    update["$inc"]["whole"] = 7
    assert {"$inc": {"whole": 1}} == checked
