"""Approximation: a number that changes too often to be written each time.

What it keeps right: nothing is counted twice, and nothing that was
acknowledged as durable is lost. In memory (`buffer="memory"`) events are
collected and added up; a crash loses at most what is in the buffer. Durable
ones (`buffer="durable"`) go to a collection first and are moved from there.
Sampled ones (`buffer="sampled"`) are written one in `every`, worth `every`.
The number belongs to `store.counter(…)`; how it is written is in `counters.py`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bson.decimal128 import create_decimal128_context
from pydantic import TypeAdapter, ValidationError
from pymongo import IndexModel

from treadle.errors import DeclarationError, UsageError
from treadle.graph.pattern import Pattern, Place, Rule, check_choice, sibling
from treadle.model.bson_types import RESERVED, to_bson
from treadle.model.codec import codec_of
from treadle.model.shape import field_shape
from treadle.plan import Raw
from treadle.query.paths import resolve

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph

Buffering = Literal["memory", "durable", "sampled"]

EVERY_MAX = 10_000_000
KEYS_MAX = 10_000_000
# Ids of these types are taken as they are; others are validated first.
EXACT = frozenset({str, int, bytes})


@dataclass(frozen=True)
class Approximate(Pattern):
    """A number that `store.counter(…)` adds to, written every so many events or so much time."""

    pattern: ClassVar[str] = "approximation"

    every: int = 100
    within: dt.timedelta | None = dt.timedelta(seconds=5)
    buffer: Buffering = "memory"
    collection: str | None = None
    by: str = "id"
    upsert: bool = False
    flushed_at: str | None = None
    keys_max: int = 100_000

    def bind(self, place: Place, graph: Graph) -> Rule:
        check_choice(place, "buffer", self.buffer, ("memory", "durable", "sampled"))
        for name, value, most in (("every", self.every, EVERY_MAX), ("keys_max", self.keys_max, KEYS_MAX)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise DeclarationError(
                    f"{place.label} has {name}={value!r}; it takes a whole number from 1 to {most:,}",
                    code="pattern-keyword",
                )
        if self.within is not None and not (
            isinstance(self.within, dt.timedelta) and self.within > dt.timedelta(0)
        ):
            raise DeclarationError(
                f"{place.label} has within={self.within!r}; it takes a timedelta above zero, or None",
                code="pattern-keyword",
            )
        if self.collection is not None and self.buffer != "durable":
            raise DeclarationError(
                f'{place.label} has collection=, which is for buffer="durable"; remove one of them',
                code="pattern-keyword",
            )
        return ApproximateRule(place, graph, self)


class ApproximateRule(Rule):
    """A counter at its place."""

    pattern = "approximation"

    def __init__(self, place: Place, graph: Graph, declared: Approximate) -> None:
        super().__init__(place)
        self.declared = declared
        self.python_path = ".".join([*(step.name for step in place.steps), place.field.name])
        shape = place.field.shape
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a counter belongs to the document itself or to a "
                "nested model",
                code="maintained-in-array",
            )
        if shape.kind != "scalar" or shape.optional or shape.python not in (int, float, decimal.Decimal):
            raise DeclarationError(
                f"{place.label} must be an int, a float or a Decimal, and not None, to be a counter",
                code="maintained-type",
            )
        self.number = shape.python
        # Python's own sums of decimals would be cut to 28 digits; the server keeps 34.
        self.plus: Callable[[Any, Any], Any] = (
            create_decimal128_context().add if self.number is decimal.Decimal else operator.add
        )
        self.flushed_path = (
            None if declared.flushed_at is None else sibling(place, declared.flushed_at, "flushed_at")
        )
        self._resolve_key(place, declared.by)
        self.buffer_collection = (
            declared.collection or f"treadle.buffer.{place.entry.collection}.{self.path}"
            if declared.buffer == "durable"
            else None
        )
        if declared.collection is not None:
            graph.add_side(_buffer_model(place, declared.collection), place.label)

    def _resolve_key(self, place: Place, by: str) -> None:
        """How a document is found from what a caller gives."""
        entry = place.entry
        path = resolve(entry.codec, by, place.label, "reference-field-missing")
        if path.in_array or path.shape.kind not in ("scalar", "enum", "literal") or path.shape.optional:
            raise DeclarationError(
                f"{place.label} is counted by {by!r}, which must be one plain value, and not None",
                code="counter-key",
            )
        self.by_path = path.stored
        owner: Any = entry.model
        for step in path.steps[:-1]:
            shape = field_shape(owner.__name__, step.name, owner.__pydantic_fields__[step.name])
            owner = shape.python
        info = owner.__pydantic_fields__[path.steps[-1].name]
        self._adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
        python = path.shape.python
        self.exact_key: type | None = None
        if path.shape.kind == "scalar" and (python in EXACT or python.__name__ == "ObjectId"):
            plain = not [mark for mark in info.metadata if not hasattr(mark, "__get_pydantic_core_schema__")]
            self.exact_key = python if plain else None

    # -- for the graph -----------------------------------------------------------------

    def watches(self) -> Mapping[str, set[str] | None]:
        return {self.target.collection: set()}

    def maintained(self) -> set[str]:
        return {self.path}

    def stamps(self) -> set[str]:
        return {self.flushed_path} if self.flushed_path else set()

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        # Two documents for one key would each hold a part of its count.
        return [] if self.by_path == "_id" else [(self.target, IndexModel([(self.by_path, 1)], unique=True))]

    def instead(self, maintained: str) -> str:
        """What to do in place of a plain update, for its refusal."""
        return f"call store.counter({self.target.model.__name__}, {self.python_path!r}).add(id, n) instead"

    def kept(self) -> dict[str, Any]:
        """What `replace` leaves as it is stored, with what stands for it where it is missing."""
        values: dict[str, Any] = {self.path: self.zero}
        if self.flushed_path:
            values[self.flushed_path] = None
        return values

    # -- values --------------------------------------------------------------------------

    @property
    def zero(self) -> Any:
        return to_bson(self.number(0), [])

    def key(self, given: Any) -> Any:
        """The validated key of a document; never an operator."""
        try:
            return self._adapter.validate_python(given)
        except ValidationError as error:
            raise UsageError(
                f"{given!r} is no {self.declared.by} of {self.target.model.__name__}: "
                f"{error.errors(include_url=False)[0]['msg']}",
                code="id-invalid",
            ) from None

    def amount(self, n: Any) -> Any:
        """A number that may be added."""
        fits = isinstance(n, int) or (self.number is not int and isinstance(n, self.number))
        too_large = self.number is int and fits and abs(n) >= 2**63
        if isinstance(n, bool) or not fits or too_large or not math.isfinite(n):
            kind = f"{self.number.__name__}{' below 2**63' if too_large else ''}"
            raise UsageError(
                f"{n!r} cannot be added to {self.place.label}; it takes a finite {kind}",
                code="amount-invalid",
            )
        to_bson(self.number(n), [])
        return n

    def where(self, key: Any) -> Raw:
        """The filter for the document of a key."""
        return {self.by_path: {"$eq": to_bson(key, [])}}

    def increment(self, n: Any) -> Raw:
        """The update that adds a number."""
        update: Raw = {"$inc": {self.path: to_bson(self.number(n), [])}}
        if self.flushed_path:
            update["$currentDate"] = {self.flushed_path: True}
        return update

    def beginning(self, key: Any) -> Raw:
        """What an upsert stores beside the key and the counter: the model's own defaults, as plain paths."""
        values: Raw = {}
        raw = _defaults(self, key)
        avoided = {self.path, self.by_path, *([self.flushed_path] if self.flushed_path else [])}
        _flatten(raw, "", avoided, values)
        return values


def _defaults(rule: ApproximateRule, key: Any) -> Raw:
    given: dict[str, Any] = {}
    *outer, last = rule.declared.by.split(".")
    inner = given
    for name in outer:
        inner = inner.setdefault(name, {})
    inner[last] = key
    model = rule.target.model
    try:
        document = model.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise DeclarationError(
            f"{rule.place.label} has upsert=True, but a {model.__name__} cannot be made of its "
            f"{rule.declared.by} alone: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; "
            "give the other fields defaults",
            code="upsert-incomplete",
        ) from None
    return codec_of(model).dump(document, [])


def _flatten(raw: Raw, prefix: str, avoided: set[str], values: Raw) -> None:
    for name, value in raw.items():
        path = prefix + name
        if path in avoided or path == RESERVED:
            continue
        # Opened only where it must be: `$setOnInsert` of a whole would conflict with a part of it.
        if isinstance(value, dict) and any(each.startswith(path + ".") for each in avoided):
            _flatten(value, f"{path}.", avoided, values)
        else:
            values[path] = value


def _buffer_model(place: Place, collection: str) -> Any:
    """The model of buffered events, for set-up; what they hold is Treadle's own affair."""
    from treadle.model.document import Document

    kind: Any = type(Document)
    body = {"__annotations__": {"d": list[Any]}, "__module__": __name__}
    name = f"{place.entry.model.__name__}_{place.field.name}_buffer"
    return kind(name, (Document,), body, collection=collection, validation="off")
