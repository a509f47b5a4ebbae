"""A Bucket declaration, bound to its model: stored names, windows, statistics, and ids of readings.

A reading has series fields, which its whole bucket shares (the key of its
series, and metadata), and reading fields (the time and measured values). Its
id is stored only if the model declares one; otherwise it is derived from the
series and the time.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import hashlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import bson
from bson import ObjectId

from treadle.errors import DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, UTC
from treadle.model.codec import StoredField, without_id
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.paths import ARRAYS, resolve

SEQUENCE = f"{RESERVED}.sequence"
LIMIT_MAX = 1_000_000
# Hashes of series, and dates, that are remembered.
SERIES_REMEMBERED_MAX = 50_000
DATES_REMEMBERED_MAX = 4096

EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = dt.timedelta(milliseconds=1)
FIRST = dt.datetime.min.replace(tzinfo=UTC)
LAST = dt.datetime.max.replace(tzinfo=UTC)
WEEK = 7 * 24 * 3600 * 1000
# Weeks begin on Monday; the first Monday after the epoch was 5 January 1970.
MONDAY = 4 * 24 * 3600 * 1000
# A derived id has 47 bits of the series' hash and 49 bits of the milliseconds since the year 1.
HASH_BITS = 47
TIME_BITS = 49
YEAR_ONE = 62_135_596_800_000
YEAR_LAST = 253_402_300_799_999
# In the place of an id that a reading will not keep.
ANY_ID = ObjectId(b"\0" * 12)

# One field's name, or several.
FieldNames = str | tuple[str, ...]
_SINGLE = ("scalar", "enum")
# Values of these types take at most 21 bytes in BSON, with the type.
_SMALL = (bool, int, float, dt.datetime, decimal.Decimal, ObjectId)


def milliseconds(moment: dt.datetime) -> int:
    """Return a date as the server counts it."""
    return round(moment.timestamp() * 1000)


@functools.lru_cache(DATES_REMEMBERED_MAX)
def to_datetime(count: int) -> dt.datetime:
    """Return the date of a count of milliseconds."""
    return EPOCH + dt.timedelta(milliseconds=count)


@dataclass(frozen=True)
class Stat:
    """One number whose statistics each bucket holds."""

    path: str
    python: str
    type: type
    # Readings without a value do not count, so the bucket must say how many have one.
    optional: bool


@dataclass(frozen=True)
class Names:
    """The names of the parts of a bucket."""

    start: str = "start"
    end: str = "end"
    count: str = "count"
    readings: str = "readings"
    stats: str = "stats"


class Spec:
    """A declaration that was checked against its model; everything in stored names."""

    def __init__(self, declared: Any, entry: ModelEntry) -> None:
        self.declared = declared
        self.entry = entry
        self.collection = entry.collection
        self.label = entry.model.__name__
        self.codec = codec = entry.codec
        self.limit: int | None = declared.limit
        self.span: int | None = None if declared.span is None else round(declared.span.total_seconds() * 1000)
        self.origin = MONDAY if self.span is not None and self.span % WEEK == 0 else 0
        self.names = self._part_names()
        self.keys = self._fields("key")
        self.metadata = self._fields("metadata")
        (self.time,) = self._fields("time")
        self.unique = next(iter(self._fields("unique")), None)
        self.key_names = tuple(each.stored for each in self.keys)
        self.series_fields = (*self.key_names, *(each.stored for each in self.metadata))
        self.stores_id = _declares_id(entry.model)
        # A derived id is made later, so the dump need not generate one.
        self.dump_codec = codec if self.stores_id else without_id(entry.model)
        # What is not stored with each reading.
        self.shared = {*self.series_fields} if self.stores_id else {*self.series_fields, "_id"}
        self.reading_fields = tuple(each for each in codec.fields if each.stored not in self.shared)
        self.stats = tuple(self._stat(name) for name in as_tuple(declared.stats))
        # Whether Python can tell two series apart as the server does; it takes 1 and True for equal.
        self.has_plain_series = all(
            each.shape.kind in _SINGLE and each.shape.python is not decimal.Decimal
            for each in (*self.keys, *self.metadata)
        )
        self.reading_bytes_max = self._reading_bytes_max()
        self._hashes: dict[Any, int] = {}
        self._check_window()
        self._check_roles()
        check_reading_declaration(declared, entry, self.time)

    @property
    def collections(self) -> tuple[str, ...]:
        """The collections that hold buckets: the model's own, and its archive."""
        archive = self.entry.everything.archive
        return (self.collection,) if archive is None else (self.collection, archive)

    # -- windows ----------------------------------------------------------------------

    def window(self, count: int) -> int:
        """Return where the window of a moment begins, in milliseconds; only where windows have a span."""
        assert self.span is not None
        return count - (count - self.origin) % self.span

    def last(self, start: int) -> int:
        """Return the last instant of a window that has a span."""
        assert self.span is not None
        return start + self.span - 1

    # -- ids and series ---------------------------------------------------------------

    def hashable_key(self, values: tuple[Any, ...]) -> Any:
        """Return series values in a hashable form, equal only for values that Python and BSON agree on."""
        return values if self.has_plain_series else bson.encode({"": values}, codec_options=CODEC_OPTIONS)

    def series_hash(self, key: tuple[Any, ...]) -> int:
        """Return a number for a series, the same in every process."""
        known = self.hashable_key(key)
        number = self._hashes.get(known)
        if number is None:
            if len(self._hashes) >= SERIES_REMEMBERED_MAX:
                self._hashes.clear()
            encoded = bson.encode({"": list(key)}, codec_options=CODEC_OPTIONS)
            digest = hashlib.blake2b(encoded, digest_size=8).digest()
            number = self._hashes[known] = int.from_bytes(digest, "big") >> (64 - HASH_BITS)
        return number

    def key_of(self, raw: Raw) -> tuple[Any, ...]:
        """Return the key of the series of a bucket or a reading."""
        return tuple([raw.get(name) for name in self.key_names])

    def derived_id(self, reading: Raw) -> ObjectId:
        """Return the id of a reading that stores none."""
        return encode_id(self.series_hash(self.key_of(reading)), milliseconds(reading[self.time.stored]))

    def with_derived_id(self, reading: Raw) -> Raw:
        """Return a whole reading with the id that follows from its series and its time."""
        return reading if self.stores_id else {**reading, "_id": self.derived_id(reading)}

    def to_reading(self, bucket: Raw, reading: Raw) -> Raw:
        """Return a whole reading, as the model knows it, from a bucket and one of its elements."""
        return self.with_derived_id({**{name: bucket.get(name) for name in self.series_fields}, **reading})

    def to_element(self, reading: Raw) -> Raw:
        """Return what a bucket stores of a whole reading."""
        return {name: value for name, value in reading.items() if name not in self.shared}

    def key_filter(self, key: Sequence[Any]) -> Raw:
        """Return the filter for one series; a value never becomes an operator."""
        return {name: {"$eq": value} for name, value in zip(self.key_names, key, strict=True)}

    # -- fields -----------------------------------------------------------------------

    def _refusal(self, reason: str) -> DeclarationError:
        return refusal(self.declared, self.entry, reason)

    def _fields(self, keyword: str) -> tuple[StoredField, ...]:
        """Return the fields that a keyword names."""
        named = getattr(self.declared, keyword)
        return () if named is None else tuple(self._field(name, keyword) for name in as_tuple(named))

    def _field(self, name: Any, keyword: str) -> StoredField:
        if not isinstance(name, str):
            raise self._refusal(f"has {keyword}={name!r}; it takes names of fields")
        field = self.codec.by_name.get(name)
        if field is None:
            if "." in name:
                raise self._refusal(
                    f"has {keyword}={name!r}; only fields of the model itself can be used here"
                )
            resolve(self.codec, name, f"the {keyword}= of {self.label}'s bucket", "bucket-declaration")
            raise self._refusal(f"names {name!r}; use the Python name of the field")
        return field

    def _stat(self, name: str) -> Stat:
        path = resolve(self.codec, name, f"the stats= of {self.label}'s bucket", "bucket-declaration")
        numeric = path.shape.kind == "scalar" and path.shape.python in (int, float, decimal.Decimal)
        if path.in_array or not numeric:
            raise self._refusal(
                f"has stats={name!r}, which is no number; statistics are of int, float or Decimal"
            )
        if path.steps[0].stored in self.series_fields:
            raise self._refusal(f"has stats={name!r}, which is the same for all readings of a bucket")
        return Stat(path.stored, path.python, path.shape.python, path.shape.optional or len(path.steps) > 1)

    def _part_names(self) -> Names:
        given, parts = self.declared.names, [field.name for field in fields(Names)]
        if not isinstance(given, Mapping) or set(given) - set(parts):
            raise self._refusal(f"has names={given!r}; it renames {', '.join(parts)}")
        names = Names(**given)
        chosen = astuple(names)
        for name in chosen:
            if not _is_storable_name(name) or chosen.count(name) > 1:
                raise self._refusal(f"calls a part {name!r}; parts need different names that can be stored")
        return names

    def _reading_bytes_max(self) -> int | None:
        """Return the largest size of a stored reading; None where that depends on its values."""
        if self.entry.model.model_config.get("extra") == "allow" or any(
            each.shape.kind != "scalar" or each.shape.python not in _SMALL for each in self.reading_fields
        ):
            return None
        # Beside its fields, a reading has a length, an end, and its place in the array.
        return sum(len(each.stored.encode()) + 23 for each in self.reading_fields) + 16

    # -- checks -----------------------------------------------------------------------

    def _check_window(self) -> None:
        span, limit = self.declared.span, self.declared.limit
        if span is None and limit is None:
            raise self._refusal("has neither span= nor limit=; say when a bucket ends")
        if span is not None and not (
            isinstance(span, dt.timedelta) and span >= MILLISECOND and not span % MILLISECOND
        ):
            raise self._refusal(f"has span={span!r}; it takes a timedelta in whole milliseconds")
        whole = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and not (whole and 1 <= limit <= LIMIT_MAX):
            raise self._refusal(f"has limit={limit!r}; it takes a whole number from 1 to {LIMIT_MAX:,}")

    def _check_roles(self) -> None:
        roles = [*self.series_fields, self.time.stored]
        parts = astuple(self.names)
        for name in roles:
            if roles.count(name) > 1 or name == "_id":
                raise self._refusal(
                    f"uses {name!r} for two things, or the id; each field has one part to play"
                )
            if name in parts and name != self.time.stored:
                raise self._refusal(
                    f"has the field {name!r} beside a part of that name; rename the part: names={{…}}"
                )
        if not self.keys:
            raise self._refusal("has no key; name the field that says which series a reading belongs to")
        for field in (*self.keys, *self.metadata):
            if field.shape.kind in ARRAYS:
                raise self._refusal(f"uses the list {field.name!r} for a whole bucket; use a single value")
        if self.entry.model.__pydantic_decorators__.model_serializers:
            raise self._refusal("stands on a model with a serializer of its own, whose fields are not known")
        if self.unique is not None:
            self._check_unique(self.unique)

    def _check_unique(self, unique: StoredField) -> None:
        if unique.stored in self.series_fields or unique.shape.kind in (*ARRAYS, "map", "model", "any"):
            raise self._refusal(f"has unique={unique.name!r}; it takes the time or a measured single value")
        if self.span is None:
            raise self._refusal(
                f"has unique={unique.name!r} without span=; add span=, the window in which a reading "
                "is looked for, or drop unique="
            )


def encode_id(series: int, count: int) -> ObjectId:
    """Return the derived id of a reading: the hash of its series, and its time."""
    return ObjectId((series << TIME_BITS | (count + YEAR_ONE)).to_bytes(12, "big"))


def decode_id(identity: Any) -> tuple[int, int] | None:
    """Return the hash of the series, and the time, of a derived id; None where it cannot be one."""
    if not isinstance(identity, ObjectId):
        return None
    number = int.from_bytes(identity.binary, "big")
    count = (number & ((1 << TIME_BITS) - 1)) - YEAR_ONE
    # The time of an ObjectId from elsewhere may be beyond Python's years.
    return (number >> TIME_BITS, count) if count <= YEAR_LAST else None


def as_tuple(names: FieldNames) -> tuple[str, ...]:
    """Return one name or several, as several."""
    return (names,) if isinstance(names, str) else tuple(names)


def _declares_id(model: type[Document]) -> bool:
    """Whether the model declares an id, which then must be stored."""
    below = itertools.takewhile(lambda each: each is not Document, model.__mro__)
    return any("id" in inspect.get_annotations(each) for each in below)


def _is_storable_name(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", "_id", RESERVED):
        return False
    return "." not in name and "\0" not in name and not name.startswith("$")


# -- checks that Bucket and TimeSeries share ----------------------------------------------


def refusal(declared: Any, entry: ModelEntry, reason: str) -> DeclarationError:
    """Return the refusal of a declaration on a model."""
    what = declared.pattern.replace("_", " ")
    return DeclarationError(f"the {what} of {entry.model.__name__} {reason}", code="bucket-declaration")


def check_reading_declaration(declared: Any, entry: ModelEntry, time: StoredField) -> None:
    """Refuse a time that is not a date, an expiry that is not a time span, and adoption from itself."""
    shape, expiry = time.shape, declared.expire_after
    if shape.kind != "scalar" or shape.python is not dt.datetime or shape.optional:
        raise refusal(declared, entry, f"has time={time.name!r}, which must be a datetime and not None")
    if expiry is not None and not (isinstance(expiry, dt.timedelta) and expiry >= dt.timedelta(seconds=1)):
        raise refusal(
            declared, entry, f"has expire_after={expiry!r}; it takes a timedelta of a second or more"
        )
    if declared.adopt == entry.collection:
        raise refusal(
            declared,
            entry,
            f"has adopt={declared.adopt!r}, which is its own collection; rename that in MongoDB first, "
            "and give adopt= the new name",
        )
