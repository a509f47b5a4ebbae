"""Maps stored as arrays of pairs, `[{"k": "color", "v": "red"}]`, so that one index serves all names."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from typing import Any

from treadle.errors import UsageError
from treadle.model.bson_types import Altered, Raw, to_bson
from treadle.model.shape import Shape


class Pairs:
    """Marks a map that is stored as an array of pairs."""


@dataclass(frozen=True)
class Measured:
    """A value with its unit: `Measured(15, "inch")`; stored as `{"k": …, "v": 15, "u": "inch"}`."""

    value: int | float | decimal.Decimal
    unit: str


def is_paired(shape: Shape) -> bool:
    """Whether values of this shape are stored as pairs."""
    return shape.kind == "map" and any(isinstance(mark, Pairs) for mark in shape.metadata)


def is_measured(shape: Shape) -> bool:
    """Whether values of this shape may have a unit."""
    return shape.python is Measured or any(map(is_measured, shape.items))


def pair(name: str, value: object, stored: Any, altered: Altered) -> Raw:
    """Return one pair; `stored` is the value as it would be stored by itself."""
    if not name:
        raise UsageError(
            "an attribute has an empty name, so no filter could find it; give it a name",
            code="attribute-unnamed",
        )
    if isinstance(value, Measured):
        return {"k": name, "v": to_bson(value.value, altered), "u": value.unit}
    return {"k": name, "v": stored}


def from_pairs(value: Any) -> Any:
    """Return the map of stored pairs; a repeated name counts once, the last. Other values are left alone."""
    if type(value) is not list or not all(type(each) is dict and "k" in each for each in value):
        return value
    return {
        each["k"]: {"value": each.get("v"), "unit": each["u"]} if "u" in each else each.get("v")
        for each in value
    }
