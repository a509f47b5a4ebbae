"""A Bucket declaration, bound to its model: stored names, windows, statistics, ids.

A reading has an outer part, which its whole bucket shares (the key of its
series, and metadata), and an inner part (time and measured fields). Its id is
not stored unless the model declares one: it is made of the series and the
time, so that it costs nothing.
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
from bson.decimal128 import Decimal128

from treadle.errors import DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Place
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, UTC
from treadle.model.codec import StoredField, without_id
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.paths import ARRAYS, resolve

# Keys whose hashes are remembered.
BUCKET_KEYS_MAX = 50_000

SEQUENCE = f"{RESERVED}.sequence"
NEXT = f"{RESERVED}.next"
CLOSED = f"{RESERVED}.closed"
LIMIT_MAX = 1_000_000
MOMENTS_REMEMBERED_MAX = 4096
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = dt.timedelta(milliseconds=1)
WEEK = 7 * 24 * 3600 * 1000
# Weeks begin on Monday; the first one after the epoch did on 5 January 1970.
MONDAY = 4 * 24 * 3600 * 1000
YEAR_ONE = 62_135_596_800_000
TIME_BITS = 49
HASH_BITS = 47
# In place of an id that a reading will not keep.
ANY_ID = ObjectId(b"\0" * 12)


def milliseconds(moment: dt.datetime) -> int:
    """A date as the server counts it."""
    return round(moment.timestamp() * 1000)


@functools.lru_cache(MOMENTS_REMEMBERED_MAX)
def moment(count: int) -> dt.datetime:
    """The date of a count; remembered, as a batch asks for few of them many times."""
    return EPOCH + dt.timedelta(milliseconds=count)


# One field's name, or several.
FieldNames = str | tuple[str, ...]


@dataclass(frozen=True)
class Stat:
    """One number whose statistics each bucket holds."""

    path: str
    python: str
    decimal: bool
    # Readings without a value do not count, so the bucket must say how many have one.
    optional: bool


@dataclass(frozen=True)
class Names:
    """What the parts of a bucket are called."""

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
        self.limits = entry.limits
        self.collection = entry.collection
        self.label = entry.model.__name__
        self.codec = codec = entry.codec
        self.limit: int | None = declared.limit
        self.span: int | None = None if declared.span is None else round(declared.span.total_seconds() * 1000)
        self.origin = MONDAY if self.span is not None and self.span % WEEK == 0 else 0
        self.names = self._part_names()
        self.keys = tuple(self._field(name, "key") for name in as_tuple(declared.key))
        self.time = self._field(declared.time, "time")
        self.metadata = tuple(self._field(name, "metadata") for name in as_tuple(declared.metadata))
        self.key_names = tuple(each.stored for each in self.keys)
        self.outer_names = (*self.key_names, *(each.stored for each in self.metadata))
        self.stores_id = _declares_id(entry.model)
        # An id that is derived need not be made before.
        self.dumping = codec if self.stores_id else without_id(entry.model)
        # What is not stored with each reading.
        self.outer = {*self.outer_names} if self.stores_id else {*self.outer_names, "_id"}
        self.inner = tuple(each for each in codec.fields if each.stored not in self.outer)
        self.value_names = tuple(each.stored for each in self.inner if each is not self.time)
        self.stats = tuple(self._stat(name) for name in as_tuple(declared.stats))
        self.unique = None if declared.unique is None else self._field(declared.unique, "unique")
        # The ordinary declaration, for which grouping has a loop of its own.
        self.one_key = (
            len(self.keys) == len(self.outer_names) == 1
            and self.keys[0].shape.kind == "scalar"
            # A Decimal128 cannot be looked up in a dict.
            and self.keys[0].shape.python not in (decimal.Decimal, Decimal128)
            and self.span is not None
            and not self.stores_id
        )
        # Values of several types may be equal in Python that are not for the server, as 1 and True.
        self.mixed = any(each.shape.kind not in ("scalar", "enum") for each in (*self.keys, *self.metadata))
        self.reading_bytes_max = self._reading_bytes_max()
        self._hashes: dict[Any, int] = {}
        self._check_window()
        self._check_fields()

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
        """A number for a series, from its key; two series hardly ever have the same one."""
        known = self.known(values)
        number = self._hashes.get(known)
        if number is None:
            if len(self._hashes) >= BUCKET_KEYS_MAX:
                self._hashes.clear()
            encoded = bson.encode({"": list(values)}, codec_options=CODEC_OPTIONS)
            digest = hashlib.blake2b(encoded, digest_size=8).digest()
            number = self._hashes[known] = int.from_bytes(digest, "big") >> (64 - HASH_BITS)
        return number

    def series_of(self, reading: Raw) -> int:
        """The number of the series that a bucket or a reading belongs to."""
        return self.series(tuple([reading.get(name) for name in self.key_names]))

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

    def identified(self, reading: Raw) -> Raw:
        """A whole reading with the id that follows from its series and its time."""
        if not self.stores_id:
            count = milliseconds(reading[self.time.stored])
            reading["_id"] = self.reading_id(self.series_of(reading), count)
        return reading

    def key_filter(self, values: Sequence[Any]) -> Raw:
        """The filter for one series; a value never becomes an operator."""
        return {name: {"$eq": value} for name, value in zip(self.key_names, values, strict=True)}

    def siblings(self, bucket: Raw) -> Raw:
        """The filter for the buckets of the same series."""
        return self.key_filter([bucket.get(name) for name in self.key_names])

    # -- fields -----------------------------------------------------------------------

    def _refusal(self, reason: str) -> DeclarationError:
        return refusal(self.declared, self.entry, reason)

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
        is_decimal = path.shape.python is decimal.Decimal
        numeric = path.shape.kind == "scalar" and (is_decimal or path.shape.python in (int, float))
        if path.in_array or not numeric:
            raise self._refusal(
                f"has stats={name!r}, which is no number; statistics are of int, float or Decimal"
            )
        if path.steps[0].stored in self.outer_names:
            raise self._refusal(f"has stats={name!r}, which is the same for all readings of a bucket")
        return Stat(path.stored, path.python, is_decimal, path.shape.optional or len(path.steps) > 1)

    def _part_names(self) -> Names:
        given, parts = self.declared.names, [field.name for field in fields(Names)]
        if not isinstance(given, Mapping) or set(given) - set(parts):
            raise self._refusal(f"has names={given!r}; it renames {', '.join(parts)}")
        names = Names(**given)
        for name in (chosen := astuple(names)):
            bad = not isinstance(name, str) or not name or "." in name or name.startswith("$") or "\0" in name
            if bad or name in ("_id", RESERVED) or chosen.count(name) > 1:
                raise self._refusal(f"calls a part {name!r}; parts need different names that can be stored")
        return names

    def _reading_bytes_max(self) -> int | None:
        """How large a reading can become in BSON; None where that depends on what it holds."""
        if self.entry.model.model_config.get("extra") == "allow" or any(
            each.shape.kind != "scalar" or each.shape.python not in _FIXED for each in self.inner
        ):
            return None
        # A field has a type, a name that ends with NUL, and at most 21 bytes, as a UUID takes; a reading
        # has a length, an end, and its place in the array.
        return sum(len(each.stored.encode()) + 23 for each in self.inner) + 16

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

    def _check_fields(self) -> None:
        roles = [*self.outer_names, self.time.stored]
        for name in roles:
            if roles.count(name) > 1 or name == "_id":
                raise self._refusal(
                    f"uses {name!r} for two things, or the id; each field has one part to play"
                )
            if name in astuple(self.names) and name != self.time.stored:
                raise self._refusal(
                    f"has the field {name!r} beside a part of that name; rename the part: names={{…}}"
                )
        if not self.keys:
            raise self._refusal("has no key; name the field that says which series a reading belongs to")
        for field in (*self.keys, *self.metadata):
            if field.shape.kind in ARRAYS:
                raise self._refusal(f"uses the list {field.name!r} for a whole bucket; use a single value")
        check_time_and_expiry(self.declared, self.entry, self.time)
        check_adoption(self.declared, self.entry)
        if self.entry.model.__pydantic_decorators__.model_serializers:
            raise self._refusal("stands on a model with a serializer of its own, whose fields are not known")
        if self.unique is not None and (
            self.unique.stored in self.outer_names
            or self.unique.shape.kind in (*ARRAYS, "map", "model", "any")
        ):
            raise self._refusal(
                f"has unique={self.unique.name!r}; it takes the time or a measured single value"
            )
        if self.unique is not None and self.span is None:
            raise self._refusal(
                f"has unique={self.unique.name!r} without span=; add span=, the window in which a reading "
                "is looked for, or drop unique="
            )


_FIXED = (bool, int, float, dt.datetime, decimal.Decimal, ObjectId)


def when_of(identity: Any) -> tuple[int, int] | None:
    """Series and time of a derived id; None where it cannot be one."""
    if not isinstance(identity, ObjectId):
        return None
    number = int.from_bytes(identity.binary, "big")
    return number >> TIME_BITS, (number & ((1 << TIME_BITS) - 1)) - YEAR_ONE


def state(bucket: Raw, name: str) -> Any:
    """A part of what Treadle notes about a bucket; None where it is not there."""
    noted = bucket.get(RESERVED)
    return noted.get(name) if isinstance(noted, dict) else None


def _declares_id(model: type[Document]) -> bool:
    """Whether the model has an id of its own making, which then must be stored."""
    below = itertools.takewhile(lambda each: each is not Document, model.__mro__)
    return any("id" in inspect.get_annotations(each) for each in below)


def as_tuple(names: FieldNames) -> tuple[str, ...]:
    """One name or several, as several."""
    return (names,) if isinstance(names, str) else tuple(names)


# -- checks that Bucket and TimeSeries share ----------------------------------------------


def refusal(declared: Any, entry: ModelEntry, reason: str) -> DeclarationError:
    """The refusal of a declaration on a model."""
    what = declared.pattern.replace("_", " ")
    return DeclarationError(f"the {what} of {entry.model.__name__} {reason}", code="bucket-declaration")


def check_time_and_expiry(declared: Any, entry: ModelEntry, time: StoredField) -> None:
    shape, expiry = time.shape, declared.expire_after
    if shape.kind != "scalar" or shape.python is not dt.datetime or shape.optional:
        raise refusal(declared, entry, f"has time={time.name!r}, which must be a datetime and not None")
    if expiry is not None and not (isinstance(expiry, dt.timedelta) and expiry >= dt.timedelta(seconds=1)):
        raise refusal(
            declared, entry, f"has expire_after={expiry!r}; it takes a timedelta of a second or more"
        )


def check_adoption(declared: Any, entry: ModelEntry) -> None:
    """Refuse to move single documents inside of one collection."""
    if declared.adopt == entry.collection:
        raise refusal(
            declared,
            entry,
            f"has adopt={declared.adopt!r}, which is its own collection; rename that in MongoDB first, "
            "and give adopt= the new name",
        )


def refuse_others(place: Place) -> None:
    """Readings have no tree, kinds, versions or groups."""
    settings, name = place.entry.model.__treadle__, place.entry.model.__name__
    layouts = {"bucket", "timeseries"}
    others = [
        keyword
        for keyword, patterns in settings.patterns.items()
        if keyword not in layouts and not all(getattr(each, "beside", False) for each in patterns)
    ]
    others += [keyword for keyword in ("discriminator", "version") if getattr(settings, keyword) is not None]
    if others:
        reason = f"{others[0]}= beside bucket= or timeseries=; readings have none"
    elif layouts <= set(settings.patterns):
        reason = "both bucket= and timeseries=; keep one"
    else:
        return
    raise DeclarationError(f"{name} has {reason}", code="bucket-declaration")
