"""What a Bucket declaration comes to: stored names, windows, statistics, ids.

Readings are split into what is equal for a whole bucket (the series' key, and
metadata) and the inner part (time and measured fields). A reading's id is not
stored unless the model declares one: it is made of the series and the time,
so that it is the same in every layout and costs nothing.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import bson
from bson import ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import DeclarationError
from treadle.graph.limits import Limits
from treadle.graph.pattern import Place
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, UTC
from treadle.model.codec import Codec, StoredField
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.paths import ARRAYS, resolve

SEQUENCE = f"{RESERVED}.sequence"
NEXT = f"{RESERVED}.next"
CLOSED = f"{RESERVED}.closed"
REVISION = f"{RESERVED}.n"
PARTS = ("start", "end", "count", "readings", "stats")
LIMIT_MAX = 1_000_000
MOMENTS_REMEMBERED_MAX = 4096
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
WEEK = 7 * 24 * 3600 * 1000
# Weeks begin on Monday; the first one after the epoch did on 5 January 1970.
MONDAY = 4 * 24 * 3600 * 1000
YEAR_ONE = 62_135_596_800_000
TIME_BITS = 49
HASH_BITS = 47


def milliseconds(moment: dt.datetime) -> int:
    """A date as the server counts it."""
    return round(moment.timestamp() * 1000)


@functools.lru_cache(MOMENTS_REMEMBERED_MAX)
def moment(count: int) -> dt.datetime:
    """The date of a count; remembered, as a batch asks for few of them many times."""
    return EPOCH + dt.timedelta(milliseconds=count)


# One field's name, or several.
FieldNames = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stat:
    """One number whose statistics each bucket holds."""

    path: str
    python: str
    decimal: bool
    # Readings without a value do not count, so the bucket must say how many have one.
    optional: bool


@dataclass(frozen=True, slots=True)
class Names:
    """What the parts of a bucket are called."""

    start: str
    end: str
    count: str
    readings: str
    stats: str


class Spec:
    """A bound declaration; everything in stored names."""

    def __init__(self, declared: Any, model: type[Document], codec: Codec[Any], limits: Limits) -> None:
        self.declared = declared
        self.limits = limits
        self.model = model
        self.codec = codec
        self.layout: Literal["rows", "columns", "packed"] = declared.layout
        self.limit: int | None = declared.limit
        self.span: int | None = None if declared.span is None else round(declared.span.total_seconds() * 1000)
        self.origin = MONDAY if self.span is not None and self.span % WEEK == 0 else 0
        self.names = _part_names(declared, model)
        self.keys = tuple(_field(codec, name, "key", model) for name in as_tuple(declared.key))
        self.time = _field(codec, declared.time, "time", model)
        self.metadata = tuple(_field(codec, name, "metadata", model) for name in as_tuple(declared.metadata))
        self.key_names = tuple(each.stored for each in self.keys)
        self.outer_names = (*self.key_names, *(each.stored for each in self.metadata))
        self.stores_id = declared.ids == "stored" or (declared.ids is None and _declares_id(model))
        outer = set(self.outer_names) | (set() if self.stores_id else {"_id"})
        inner = [each for each in codec.fields if each.stored not in outer and each is not self.time]
        # The time first: columns and packed readings begin with it.
        self.inner = (self.time, *inner)
        self.value_names = tuple(each.stored for each in inner)
        self.stats = tuple(_stat(codec, name, model, self) for name in as_tuple(declared.stats))
        self.unique = None if declared.unique is None else _field(codec, declared.unique, "unique", model)
        # The ordinary declaration, for which grouping has a loop of its own.
        self.one_key = (
            len(self.outer_names) == 1
            and self.keys[0].shape.kind == "scalar"
            # A Decimal128 cannot be looked up in a dict.
            and self.keys[0].shape.python not in (decimal.Decimal, Decimal128)
            and self.span is not None
            and not self.stores_id
        )
        # Values of several types may be equal in Python that are not for the server, as 1 and True.
        self.mixed = any(each.shape.kind not in ("scalar", "enum") for each in (*self.keys, *self.metadata))
        self.reading_bytes_max = _bytes_max(self.inner, model)
        self._hashes: dict[Any, int] = {}
        _check(self)

    # -- windows ----------------------------------------------------------------------

    def window(self, count: int) -> int:
        """Where the window of a moment begins, in milliseconds; only where windows have a span."""
        assert self.span is not None
        return count - (count - self.origin) % self.span

    def last(self, start: int) -> int:
        """The last instant of a window that has a span."""
        assert self.span is not None
        return start + self.span - 1

    # -- ids --------------------------------------------------------------------------

    def series(self, values: tuple[Any, ...]) -> int:
        """A number for a series, from its key; two series have the same one hardly ever."""
        known = self.known(values)
        found = self._hashes.get(known)
        if found is None:
            if len(self._hashes) >= self.limits.bucket_keys_max:
                self._hashes.clear()
            found = self._hashes[known] = _hash(values)
        return found

    def known(self, values: tuple[Any, ...]) -> Any:
        """Key and metadata as something that a dict can hold, the same for the same values only."""
        if not self.mixed:
            try:
                hash(values)
                return values
            except TypeError:
                pass
        return bson.encode({"": values}, codec_options=CODEC_OPTIONS)

    def reading_id(self, series: int, count: int) -> ObjectId:
        """The id of a reading that stores none: its series and its time."""
        return ObjectId((series << TIME_BITS | (count + YEAR_ONE)).to_bytes(12, "big"))

    def flat(self, bucket: Raw, inner: Raw, series: int) -> Raw:
        """A whole reading, as the model knows it."""
        reading = {name: bucket.get(name) for name in self.outer_names}
        reading.update(inner)
        if not self.stores_id:
            reading["_id"] = self.reading_id(series, milliseconds(inner[self.time.stored]))
        return reading

    def series_of(self, bucket: Raw) -> int:
        return self.series(tuple(bucket.get(name) for name in self.key_names))

    def key_filter(self, values: Sequence[Any]) -> Raw:
        """The filter for one series; a value never becomes an operator."""
        return {name: {"$eq": value} for name, value in zip(self.key_names, values, strict=True)}

    @property
    def label(self) -> str:
        return self.model.__name__


def when_of(identity: Any) -> tuple[int, int] | None:
    """Series and time of a derived id; None where it cannot be one."""
    if not isinstance(identity, ObjectId):
        return None
    number = int.from_bytes(identity.binary, "big")
    return number >> TIME_BITS, (number & ((1 << TIME_BITS) - 1)) - YEAR_ONE


def _hash(values: Sequence[Any]) -> int:
    encoded = bson.encode({"": list(values)}, codec_options=CODEC_OPTIONS)
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") >> (64 - HASH_BITS)


def bind(declared: Any, model: type[Document], codec: Codec[Any], limits: Limits) -> Spec:
    """Check a declaration against its model."""
    return Spec(declared, model, codec, limits)


def _bytes_max(inner: Sequence[StoredField], model: type[Document]) -> int | None:
    """How large a reading can become in BSON; None where that depends on what it holds."""
    if model.model_config.get("extra") == "allow":
        return None
    if any(each.shape.kind != "scalar" or each.shape.python not in _FIXED for each in inner):
        return None
    # A field has a type, a name that ends with NUL, and at most 21 bytes, as a UUID takes; a reading
    # has a length, an end, and its place in the array.
    return sum(len(each.stored.encode()) + 23 for each in inner) + 16


_FIXED = (bool, int, float, dt.datetime, decimal.Decimal, ObjectId)


# -- checks -----------------------------------------------------------------------------


def _refuse(model: type[Document], said: str) -> DeclarationError:
    return DeclarationError(f"the bucket of {model.__name__} {said}", code="bucket-declaration")


def _field(codec: Codec[Any], name: Any, keyword: str, model: type[Document]) -> StoredField:
    if not isinstance(name, str):
        raise _refuse(model, f"has {keyword}={name!r}; it takes names of fields")
    found = codec.by_name.get(name)
    if found is None:
        if "." in name:
            raise _refuse(model, f"has {keyword}={name!r}; only fields of the model itself can be used here")
        resolve(codec, name, f"the {keyword}= of {model.__name__}'s bucket", "bucket-declaration")
        raise _refuse(model, f"names {name!r}; use the Python name of the field")
    return found


def _stat(codec: Codec[Any], name: str, model: type[Document], spec: Spec) -> Stat:
    path = resolve(codec, name, f"the stats= of {model.__name__}'s bucket", "bucket-declaration")
    numeric = path.shape.kind == "scalar" and path.shape.python in (int, float, decimal.Decimal)
    if path.in_array or not numeric:
        raise _refuse(
            model, f"has stats={name!r}, which is no number; statistics are of int, float or Decimal"
        )
    if path.steps[0].stored in spec.outer_names:
        raise _refuse(model, f"has stats={name!r}, which is the same for all readings of a bucket")
    fields = [codec.by_stored[path.steps[0].stored]]
    optional = path.shape.optional or any(each.shape.optional for each in fields) or len(path.steps) > 1
    return Stat(path.stored, path.python, path.shape.python is decimal.Decimal, optional)


def _part_names(declared: Any, model: type[Document]) -> Names:
    if not isinstance(declared.names, Mapping) or set(declared.names) - set(PARTS):
        raise _refuse(model, f"has names={declared.names!r}; it renames {', '.join(PARTS)}")
    chosen = {part: declared.names.get(part, part) for part in PARTS}
    taken = list(chosen.values())
    for name in taken:
        bad = not isinstance(name, str) or not name or "." in name or name.startswith("$") or "\0" in name
        if bad or name in ("_id", RESERVED) or taken.count(name) > 1:
            raise _refuse(model, f"calls a part {name!r}; parts need different names that can be stored")
    return Names(**chosen)


def _declares_id(model: type[Document]) -> bool:
    """Whether the model has an id of its own making, which then must be stored."""
    for each in model.__mro__:
        if each is Document:
            return False
        if "id" in inspect.get_annotations(each):
            return True
    return False


def _check(spec: Spec) -> None:
    declared, model = spec.declared, spec.model
    _check_window(spec)
    for keyword, allowed in (("layout", ("rows", "columns", "packed")), ("compression", (None, "zstd")),
                             ("ids", (None, "derived", "stored"))):  # fmt: skip
        if getattr(declared, keyword) not in allowed:
            raise _refuse(
                model,
                f"has {keyword}={getattr(declared, keyword)!r}; it takes {' or '.join(map(repr, allowed))}",
            )
    roles = [*spec.key_names, spec.time.stored, *(each.stored for each in spec.metadata)]
    for name in roles:
        if roles.count(name) > 1 or name == "_id":
            raise _refuse(model, f"uses {name!r} for two things, or the id; each field has one part to play")
        if name in vars_of(spec.names) and name != spec.time.stored:
            raise _refuse(
                model, f"has the field {name!r} beside a part of that name; rename the part: names={{…}}"
            )
    if not spec.keys:
        raise _refuse(model, "has no key; name the field that says which series a reading belongs to")
    for field in (*spec.keys, *spec.metadata):
        if field.shape.kind in ARRAYS:
            raise _refuse(model, f"uses the list {field.name!r} for a whole bucket; use a single value")
    shape = spec.time.shape
    if shape.kind != "scalar" or shape.python is not dt.datetime or shape.optional:
        raise _refuse(model, f"has time={spec.time.name!r}, which must be a datetime and not None")
    if spec.layout != "rows" and model.model_config.get("extra") == "allow":
        raise _refuse(model, f'has layout={spec.layout!r}, but extra="allow": use layout="rows"')
    if model.__pydantic_decorators__.model_serializers:
        raise _refuse(model, "stands on a model with a serializer of its own, whose fields are not known")
    if spec.unique is not None and (
        spec.unique.stored in spec.outer_names or spec.unique.shape.kind in (*ARRAYS, "map", "model", "any")
    ):
        raise _refuse(model, f"has unique={spec.unique.name!r}; it takes the time or a measured single value")
    expiry = declared.expire_after
    if expiry is not None and not (isinstance(expiry, dt.timedelta) and expiry >= dt.timedelta(seconds=1)):
        raise _refuse(model, f"has expire_after={expiry!r}; it takes a timedelta of a second or more")


def _check_window(spec: Spec) -> None:
    declared, model = spec.declared, spec.model
    if declared.span is None and declared.limit is None:
        raise _refuse(model, "has neither span= nor limit=; say when a bucket ends")
    if declared.span is not None and not (
        isinstance(declared.span, dt.timedelta)
        and declared.span >= dt.timedelta(milliseconds=1)
        and not declared.span % dt.timedelta(milliseconds=1)
    ):
        raise _refuse(model, f"has span={declared.span!r}; it takes a timedelta in whole milliseconds")
    whole = isinstance(declared.limit, int) and not isinstance(declared.limit, bool)
    if declared.limit is not None and not (whole and 1 <= declared.limit <= LIMIT_MAX):
        raise _refuse(model, f"has limit={declared.limit!r}; it takes a whole number from 1 to {LIMIT_MAX:,}")


def vars_of(names: Names) -> tuple[str, ...]:
    return tuple(getattr(names, part) for part in PARTS)


def as_tuple(names: FieldNames) -> tuple[str, ...]:
    """One name or several, as several."""
    return (names,) if isinstance(names, str) else tuple(names)


def refuse_others(place: Place) -> None:
    """Readings have no tree, kinds, versions or groups."""
    settings, name = place.entry.settings, place.entry.model.__name__
    others = {
        **{keyword: True for keyword in settings.patterns if keyword not in ("bucket", "timeseries")},
        "discriminator": settings.discriminator,
        "version": settings.version,
    }
    for keyword, other in others.items():
        if other is not None:
            raise DeclarationError(
                f"{name} has {keyword}= beside bucket= or timeseries=; readings have none",
                code="bucket-declaration",
            )
    if {"bucket", "timeseries"} <= set(settings.patterns):
        raise DeclarationError(
            f"{place.entry.model.__name__} has both bucket= and timeseries=; keep one",
            code="bucket-declaration",
        )
