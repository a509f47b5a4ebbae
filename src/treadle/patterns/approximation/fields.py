"""Counters: the names of all parts, and the numbers and keys that callers give."""

from __future__ import annotations

import contextlib
import decimal
import math
import operator
from collections.abc import Iterable
from typing import Any

import bson
from bson import ObjectId
from bson.decimal128 import create_decimal128_context
from pydantic import TypeAdapter, ValidationError

from treadle.engine.documents import revisions
from treadle.errors import DeclarationError, UsageError
from treadle.graph.binding import sibling
from treadle.graph.calls import CounterRule, Sums
from treadle.graph.rule import NOTHING, TRANSACTIONS, Models, Place
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS, RESERVED, to_bson
from treadle.model.codec import codec_of
from treadle.model.document import Document
from treadle.model.shape import field_shape
from treadle.plan import Raw
from treadle.query.keys import freeze
from treadle.query.paths import put, resolve, value_at

# The id or key of an amount.
COUNTER_KEY_BYTES_MAX = 15_000
# The keys that are sent in one command.
COUNTER_KEYS_BYTES_MAX = 8 * 1024 * 1024

# Ids of these types are taken as they are; others are validated first.
EXACT = frozenset({str, int, bytes})
INT64 = 2**63


class CounterFields(CounterRule):
    """A counter at its place."""

    pattern = "approximation"

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        self.declared = declared
        shape = place.field.shape
        if shape.kind != "scalar" or shape.optional or shape.python not in (int, float, decimal.Decimal):
            raise DeclarationError(
                f"{place.label} must be an int, a float or a Decimal, and not None, to be a counter",
                code="maintained-type",
            )
        self.number = shape.python
        # Python's own sums of decimals would be cut to 28 digits; the server keeps 34.
        self.plus = create_decimal128_context().add if self.number is decimal.Decimal else operator.add
        self.flushed_path = (
            None if declared.flushed_at is None else sibling(place, declared.flushed_at, "flushed_at")
        )
        self._resolve_key(place, declared.by)
        # Where durable events wait; they are added to their documents and deleted in one commit.
        self.buffer_collection: str = (
            declared.collection or f"treadle.buffer.{place.entry.collection}.{self.path}"
        )
        self.needs = NOTHING if declared.buffer == "sampled" else TRANSACTIONS
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

    # -- values --------------------------------------------------------------------------

    @property
    def zero(self) -> Any:
        return to_bson(self.number(0), [])

    def key(self, given: Any) -> Any:
        """The validated key of a document; never an operator."""
        try:
            key = self._adapter.validate_python(given)
        except ValidationError as error:
            raise self._no_key(given, error.errors(include_url=False)[0]["msg"]) from None
        except (OverflowError, decimal.DecimalException) as error:
            raise self._no_key(given, str(error)) from None
        if not self._is_storable(key):
            raise self._no_key(given, "it cannot be stored, or is too long")
        return key

    def _no_key(self, given: Any, why: str) -> UsageError:
        what = f"{given!r:.100} is no {self.declared.by} of {self.target.model.__name__}"
        return UsageError(f"{what}: {why}", code="id-invalid")

    def _is_storable(self, key: Any) -> bool:
        if type(key) is ObjectId or (type(key) is int and -INT64 <= key < INT64):
            return True
        try:
            return self._bytes([key]) <= COUNTER_KEY_BYTES_MAX
        except (UsageError, *ENCODING_ERRORS):
            return False

    @staticmethod
    def _bytes(keys: Iterable[Any]) -> int:
        return len(bson.encode({"": [to_bson(key, []) for key in keys]}, codec_options=CODEC_OPTIONS))

    def fit(self, sums: Sums) -> tuple[dict[Any, Any], bool]:
        """The amounts under keys that can be sent, and whether all of them can be in one command.

        Single events are counted without looking at their keys, so this is asked before they are written.
        """
        with contextlib.suppress(UsageError, *ENCODING_ERRORS):
            if self._bytes(sums) <= COUNTER_KEYS_BYTES_MAX:
                return dict(sums), True
        kept = {key: n for key, n in sums.items() if self._is_storable(key)}
        return kept, self._bytes(kept) <= COUNTER_KEYS_BYTES_MAX

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

    def where_any(self, keys: Iterable[Any]) -> Raw:
        """The filter for the documents of these keys."""
        return {self.by_path: {"$in": [to_bson(key, []) for key in keys]}}

    def of_documents(self, sums: Sums, documents: Iterable[Raw]) -> dict[Any, Any]:
        """The amounts of these documents."""
        keys = {freeze(value_at(each, self.by_path)) for each in documents}
        return {key: n for key, n in sums.items() if freeze(to_bson(key, [])) in keys}

    def joined(self, parts: Iterable[Sums]) -> dict[Any, Any]:
        """Several sums as one."""
        total: dict[Any, Any] = {}
        for sums in parts:
            for key, n in sums.items():
                total[key] = self.plus(total.get(key, 0), n)
        return total

    def increment(self, n: Any) -> Raw:
        """The update that adds a number."""
        update: Raw = {"$inc": {self.path: to_bson(self.number(n), []), **revisions(self.target)}}
        if self.flushed_path:
            update["$currentDate"] = {self.flushed_path: True}
        return update

    def beginning(self, key: Any) -> Raw:
        """What an upsert stores beside the key and the counter: the model's own defaults, as plain paths."""
        values: Raw = {}
        _flatten(_defaults(self, key), "", {self.by_path, *(owned.path for owned in self.owns())}, values)
        return values


def _defaults(rule: CounterFields, key: Any) -> Raw:
    given: dict[str, Any] = {}
    put(given, rule.declared.by, key)
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
    kind: Any = type(Document)
    body = {"__annotations__": {"d": list[Any]}, "__module__": __name__}
    name = f"{place.entry.model.__name__}_{place.field.name}_buffer"
    return kind(name, (Document,), body, collection=collection, validation="off")
