"""A counter at its place in a model: its stored names, and the keys and amounts that callers give."""

from __future__ import annotations

import decimal
import math
import operator
from collections.abc import Iterable
from typing import Any

import bson
from bson import Decimal128, ObjectId
from bson.decimal128 import create_decimal128_context
from pydantic import TypeAdapter, ValidationError

from treadle.engine.documents import revisions
from treadle.errors import DeclarationError, UsageError
from treadle.graph.binding import sibling
from treadle.graph.calls import CounterRule, Sums
from treadle.graph.rule import NOTHING, TRANSACTIONS, Models, Place
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS, to_bson
from treadle.model.codec import codec_of
from treadle.model.document import Document
from treadle.model.shape import field_shape
from treadle.plan import Raw
from treadle.query.keys import freeze
from treadle.query.paths import Path, put, resolve, value_at

# The id or key of an amount.
COUNTER_KEY_BYTES_MAX = 15_000
# The keys that are sent in one command.
COUNTER_KEYS_BYTES_MAX = 8 * 1024 * 1024
# Ids of these types are taken as they are; others are validated first.
EXACT_TYPES = frozenset({str, int, bytes, ObjectId})
INT64 = 2**63


class CounterField(CounterRule):
    """Where a counter is stored, and what can be added to it."""

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
        path = self._key_path()
        self.by_path = path.stored
        info = _field_info(place.entry.model, path)
        self._adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
        constraints = [mark for mark in info.metadata if not hasattr(mark, "__get_pydantic_core_schema__")]
        is_exact = path.shape.kind == "scalar" and path.shape.python in EXACT_TYPES and not constraints
        self.exact_key: type | None = path.shape.python if is_exact else None
        # Where durable events are stored until they are added to their documents.
        self.buffer_collection: str = (
            declared.collection or f"treadle.buffer.{place.entry.collection}.{self.path}"
        )
        self.needs = NOTHING if declared.buffer == "sampled" else TRANSACTIONS
        if declared.collection is not None:
            graph.add_side(_event_model(place, declared.collection), place.label)

    def _key_path(self) -> Path:
        """Return the path by which a document is found."""
        place, by = self.place, self.declared.by
        path = resolve(place.entry.codec, by, place.label, "reference-field-missing")
        if path.in_array or path.shape.kind not in ("scalar", "enum", "literal") or path.shape.optional:
            raise DeclarationError(
                f"{place.label} is counted by {by!r}, which must be one plain value, and not None",
                code="counter-key",
            )
        return path

    # -- keys ----------------------------------------------------------------------------------

    def key(self, given: Any) -> Any:
        """Return the validated key of a document; raises `UsageError`. Never an operator."""
        try:
            key = self._adapter.validate_python(given)
        except ValidationError as error:
            raise self._invalid_key(given, error.errors(include_url=False)[0]["msg"]) from None
        except (OverflowError, decimal.DecimalException) as error:
            raise self._invalid_key(given, str(error)) from None
        if not _is_storable(key):
            raise self._invalid_key(given, "it cannot be stored, or is too long")
        return key

    def _invalid_key(self, given: Any, why: str) -> UsageError:
        what = f"{given!r:.100} is no {self.declared.by} of {self.target.model.__name__}"
        return UsageError(f"{what}: {why}", code="id-invalid")

    def filter(self, key: Any) -> Raw:
        """Return the filter for the document of a key."""
        return {self.by_path: {"$eq": to_bson(key, [])}}

    def filter_any(self, keys: Iterable[Any]) -> Raw:
        """Return the filter for the documents of these keys."""
        return {self.by_path: {"$in": [to_bson(key, []) for key in keys]}}

    def select(self, amounts: Sums, documents: Iterable[Raw]) -> dict[Any, Any]:
        """Return the amounts of these documents."""
        keys = {freeze(value_at(each, self.by_path)) for each in documents}
        return {key: n for key, n in amounts.items() if freeze(to_bson(key, [])) in keys}

    # -- amounts -------------------------------------------------------------------------------

    @property
    def zero(self) -> Any:
        return to_bson(self.number(0), [])

    def amount(self, n: Any) -> Any:
        """Return a number that may be added; raises `UsageError` for any other."""
        fits = isinstance(n, int) or (self.number is not int and isinstance(n, self.number))
        too_large = self.number is int and fits and abs(n) >= INT64
        if isinstance(n, bool) or not fits or too_large or not math.isfinite(n):
            kind = f"{self.number.__name__}{' below 2**63' if too_large else ''}"
            raise UsageError(
                f"{n!r} cannot be added to {self.place.label}; it takes a finite {kind}",
                code="amount-invalid",
            )
        to_bson(self.number(n), [])
        return n

    def load(self, stored: Any) -> Any:
        """Return a stored number as the model declares it; zero where there is none."""
        value = stored.to_decimal() if isinstance(stored, Decimal128) else stored
        is_number = isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool)
        if not is_number or (self.number is int and not math.isfinite(value)):
            return self.number(0)
        return self.number(value)

    def add_up(self, parts: Iterable[Sums]) -> dict[Any, Any]:
        """Return the sums of several amounts by key."""
        total: dict[Any, Any] = {}
        for amounts in parts:
            for key, n in amounts.items():
                total[key] = self.plus(total.get(key, 0), n)
        return total

    def increment(self, n: Any) -> Raw:
        """Return the update that adds a number."""
        update: Raw = {"$inc": {self.path: to_bson(self.number(n), []), **revisions(self.target)}}
        if self.flushed_path:
            update["$currentDate"] = {self.flushed_path: True}
        return update

    def new_document(self, key: Any) -> Raw:
        """Return the document of a key for `upsert=True`: the model's own defaults, with a count of zero."""
        given: dict[str, Any] = {}
        put(given, self.declared.by, key)
        model = self.target.model
        try:
            document = model.model_validate(given)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise DeclarationError(
                f"{self.place.label} has upsert=True, but a {model.__name__} cannot be made of its "
                f"{self.declared.by} alone: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; "
                "give the other fields defaults",
                code="upsert-incomplete",
            ) from None
        raw = codec_of(model).dump(document, [])
        put(raw, self.path, self.zero)
        return raw


def _field_info(model: Any, path: Path) -> Any:
    """Return what Pydantic knows of the field at a path."""
    for step in path.steps[:-1]:
        model = field_shape(model.__name__, step.name, model.__pydantic_fields__[step.name]).python
    return model.__pydantic_fields__[path.steps[-1].name]


def _is_storable(key: Any) -> bool:
    if type(key) is ObjectId or (type(key) is int and -INT64 <= key < INT64):
        return True
    try:
        return _size_in_bytes([key]) <= COUNTER_KEY_BYTES_MAX
    except (UsageError, *ENCODING_ERRORS):
        return False


def fit_one_command(keys: Sums) -> bool:
    """Whether keys can be sent in one command."""
    few = len(keys) * COUNTER_KEY_BYTES_MAX <= COUNTER_KEYS_BYTES_MAX
    return few or _size_in_bytes(keys) <= COUNTER_KEYS_BYTES_MAX


def _size_in_bytes(keys: Iterable[Any]) -> int:
    return len(bson.encode({"": [to_bson(key, []) for key in keys]}, codec_options=CODEC_OPTIONS))


def _event_model(place: Place, collection: str) -> Any:
    """Return the model of buffered events, for set-up; what they hold is Treadle's own."""
    kind: Any = type(Document)
    body = {"__annotations__": {"d": list[Any]}, "__module__": __name__}
    name = f"{place.entry.model.__name__}_{place.field.name}_buffer"
    return kind(name, (Document,), body, collection=collection, validation="off")
