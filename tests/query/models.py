"""Models of the tests of this folder."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    RootModel,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from treadle import Attributes, Document, Id, Measured
from treadle.model.bson_types import CODEC_OPTIONS as CODEC_OPTIONS
from treadle.model.codec import codec_of as codec_of
from treadle.query.field_paths import FieldPaths


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


Even = Annotated[int, AfterValidator(even)]


class Address(BaseModel):
    city: str = ""
    zip_code: str = Field("", alias="zip")
    owner_id: Id | None = None


class Line(BaseModel):
    product_id: Id
    quantity: Even = 0


class Root(RootModel[dict[str, int]]):
    pass


class Size(Enum):
    SMALL = 1
    LARGE = 2


# BSON's form of a timedelta is seconds, which the validator would read as days.
Days = Annotated[
    timedelta,
    PlainValidator(lambda value: value if isinstance(value, timedelta) else timedelta(days=value)),
    PlainSerializer(lambda value: value.days),
]


class Task(Document, collection="tasks"):
    takes: Days = timedelta()
    steps: list[Days] = []
    named: dict[str, Days] = {}
    size: Size = Size.SMALL

    @field_serializer("size")
    def _size_name(self, value: Size) -> str:
        return value.name

    @field_validator("size", mode="before")
    @classmethod
    def _size_by_name(cls, value: Any) -> Any:
        return Size[value] if isinstance(value, str) else value


class Order(Document, collection="orders", naming="camel"):
    customer_id: Id
    status: str = "open"
    total: int = 0
    bounded: Annotated[int, Field(le=10)] = 0
    price: Decimal = Decimal(0)
    weight: float = 0.0
    paid_at: datetime | None = None
    address: Address | None = None
    needed: Address = Address()
    lines: list[Line] = []
    tags: list[Id] = []
    pair: tuple[int, str] = (0, "")
    scores: dict[str, int] = {}
    either: Id | str | None = None
    place: Address | int | None = None
    anything: Any = None
    root: Root = Root({})
    specs: Annotated[dict[str, str | int | Measured], Attributes()] = {}
    letters: str = "x"
    later: int = 0

    @field_validator("letters")
    @classmethod
    def _letters(cls, value: str) -> str:
        if not value.isalpha():
            raise ValueError("letters only")
        return value

    @field_validator("later")
    @classmethod
    def _later(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data["total"]:
            raise ValueError("too early")
        return value


class Ordered(Document, collection="ordered"):
    low: int = 0
    high: int = 0

    @model_validator(mode="after")
    def _in_order(self) -> Ordered:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Loose(Document, collection="loose"):
    model_config = ConfigDict(extra="allow")
    name: str = ""
    own_name: str = Field("", alias="stored")


class Maintained(NamedTuple):
    """What stands for an owned path."""

    refilled: bool = False
    advice: str = "; write its source"


def paths_of(
    model: type[BaseModel], maintained: dict[str, Maintained] | None = None, followed: Any = ()
) -> FieldPaths:
    return FieldPaths(codec_of(model), maintained or {}, followed)
