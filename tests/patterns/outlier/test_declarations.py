"""Outlier declarations that cannot work are refused by name; what set-up makes."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo.errors import OperationFailure

from tests.members import Plain, Unique, UniqueRows, overflow_of
from treadle import DeclarationError, Document, Outlier, Store


def declared(annotation: Any, **fields: Any) -> Any:
    body = {"__annotations__": {"items": annotation, **fields}, "__module__": __name__}
    return type(Document)("Thing", (Document,), body, collection="things")


@pytest.mark.parametrize(
    ("annotation", "code"),
    [
        (Annotated[list[int], Outlier(limit=0, overflow="o")], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=True, overflow="o")], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", page_size=0)], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", layout="rows")], "pattern-keyword"),
        (Annotated[int, Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[set[int], Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[list[int] | None, Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[list[list[int]], Outlier(limit=5, overflow="o")], "array-of-arrays"),
        (Annotated[list[int], Outlier(limit=5, overflow="things")], "collection-shared"),
        (Annotated[list[int], Outlier(limit=5, overflow="treadle.x")], "collection-name-invalid"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", count="nothing")], "source-field-missing"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", flag="items")], "maintained-type"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", owner="page")], "stored-name-clash"),
        (
            Annotated[list[int], Outlier(limit=5, overflow="o", layout="documents", item="position")],
            "stored-name-clash",
        ),
    ],
)
def test_wrong_declarations_are_refused(annotation, code, database):
    with pytest.raises(DeclarationError) as refused:
        Store(database, [declared(annotation)])
    assert code == refused.value.code


class Row(BaseModel):
    tags: Annotated[list[int], Outlier(limit=5, overflow="o")] = []


def test_an_array_inside_an_array_is_refused(database):
    with pytest.raises(DeclarationError) as refused:
        Store(database, [declared(list[Row])])
    assert "maintained-in-array" == refused.value.code


def test_setup_makes_the_overflow_with_its_unique_indexes(run, database, model):
    store = run.store([model])
    told = [str(action) for action in store.setup()]
    assert f"create collection {overflow_of(model)}" in told
    keys = [list(index["key"]) for index in database[overflow_of(model)].index_information().values()]
    assert [] == store.setup()
    unique = [
        list(index["key"]) for index in database[overflow_of(model)].list_indexes() if index.get("unique")
    ]
    assert len(unique) == (2 if model in (Unique, UniqueRows) else 1)
    assert len(keys) == len(unique) + 1


def test_the_validator_of_the_overflow_refuses_other_things(run, database):
    store = run.store([Plain])
    store.setup()
    with pytest.raises(OperationFailure):
        database["plain_overflow"].insert_one({"plain_id": 1, "page": 2, "members": ["x"], "count": 1})
