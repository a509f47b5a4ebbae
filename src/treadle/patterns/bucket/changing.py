"""Changing and deleting readings, with count and statistics of their buckets kept exact.

A bucket is read, changed here and written back if nobody else changed it
meanwhile: its count and its revision (`_treadle.n`, which every change but an
append raises) say so. Who comes too late reads it again. A bucket that has
become empty is deleted. A reading whose time, series or metadata changed
moves: out of one bucket and into another, in one transaction.
"""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bson
from bson.decimal128 import Decimal128
from pymongo import DeleteOne

from treadle.errors import DataError, UsageError
from treadle.graph.gather import freeze
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.patterns.bucket.contents import derived_parts, form_of, is_number, start_of, stored_form
from treadle.patterns.bucket.matching import Opened, Selection, on_server, open_buckets
from treadle.patterns.bucket.reading import Scan, order_key
from treadle.patterns.bucket.spec import REVISION, Spec, milliseconds
from treadle.patterns.bucket.writing import Writer
from treadle.plan import (
    Plan,
    Raw,
    Update,
    bulk_write,
    delete_one,
    find,
    find_one,
    server_facts,
    transact,
    update_one,
    wait,
)
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import drop, has, put, top, value_at

# What a change makes of the picked readings of a bucket: a reading in their place, or None to delete it.
Change = Callable[[list[Raw]], Plan[list[Raw | None]]]
Pair = tuple[Raw, Raw | None]


class Changer:
    """Applies changes to the readings of one model."""

    def __init__(self, spec: Spec, collection: str, writer: Writer) -> None:
        self.spec = spec
        self.collection = collection
        self.writer = writer

    # -- all that match, or the first ---------------------------------------------------

    def change_all(
        self, selection: Selection, change: Change, *, only_first: bool = False
    ) -> Plan[tuple[int, list[Pair]]]:
        """Change what the selection means; how many, and the pairs of the last bucket that was changed."""
        server = yield from server_facts()
        count = 0
        pairs: list[Pair] = []
        # Readings that this very change moved into buckets which it has yet to visit.
        arrived: Counter[bytes] = Counter()
        size = 1 if only_first else self.spec.limits.bucket_page
        scan = Scan(self.collection, selection.buckets, size)
        while buckets := (yield from scan.next()):
            opened = yield from open_buckets(self.spec, self.collection, selection, buckets)
            for each in opened:
                if not each.picked:
                    continue
                pairs = yield from self._change(each, selection, change, server, only_first, arrived)
                count += len(pairs)
                if pairs and only_first:
                    return count, pairs
        return count, pairs

    def _change(
        self,
        opened: Opened,
        selection: Selection,
        change: Change,
        server: Capabilities,
        only_first: bool,
        arrived: Counter[bytes],
    ) -> Plan[list[Pair]]:
        """Change one bucket, again and again until nobody came between."""
        limits = self.spec.limits
        pause = limits.bucket_change_pause_seconds
        for attempt in range(limits.bucket_change_attempts_max):
            if attempt:
                bucket = yield from find_one(self.collection, {"_id": {"$eq": opened.bucket["_id"]}})
                if bucket is None:
                    return []
                (opened,) = yield from open_buckets(self.spec, self.collection, selection, [bucket])
            picked = self._not_arrived(opened, arrived) if arrived else list(opened.picked)
            picked = picked[:1] if only_first else picked
            if not picked:
                return []
            befores = [self._flat(opened, place) for place in picked]
            afters = yield from change(copy.deepcopy(befores))
            for before, after in zip(befores, afters, strict=True):
                self._require_readable(before, after)
            leaving = [
                after
                for before, after in zip(befores, afters, strict=True)
                if after is not None and self._leaves(opened, before, after)
            ]
            if leaving:
                written = yield from self._move(opened, picked, afters, leaving, server)
                if written:
                    arrived.update(self._digest(each) for each in leaving)
            else:
                written = yield from self._write_back(opened, picked, afters)
            if written:
                return list(zip(befores, afters, strict=True))
            if attempt > 2:
                yield from wait(pause)
                pause = min(pause * 1.5, limits.bucket_pause_max_seconds)
        raise DataError(
            f"a bucket of {self.spec.label} was changed by others each time in "
            f"{limits.bucket_change_attempts_max} attempts",
            code="bucket-contended",
        )

    def _require_readable(self, before: Raw, after: Raw | None) -> None:
        """Refuse to store what could not be read back; the validator does not look at each reading.

        A reading that others wrote and that cannot be read as it is may stay so.
        """
        if after is None or (problem := self._problem(after)) is None or self._problem(before) is not None:
            return
        raise DataError(
            f"this leaves a {self.spec.label} that does not fit its model ({problem})",
            code="validator-refused",
        )

    def _problem(self, flat: Raw) -> DataError | None:
        try:
            self.spec.codec.load(copy.deepcopy(flat))
        except DataError as error:
            return error
        return None

    def _flat(self, opened: Opened, place: int) -> Raw:
        return self.spec.flat(opened.bucket, opened.readings[place], opened.series)

    def _digest(self, flat: Raw) -> bytes:
        # An id that follows from series and time is not that of before.
        parts = {name: value for name, value in flat.items() if name != "_id" or self.spec.stores_id}
        encoded = bson.encode(dict(sorted(parts.items())), codec_options=CODEC_OPTIONS)
        return hashlib.blake2b(encoded, digest_size=16).digest()

    def _not_arrived(self, opened: Opened, arrived: Counter[bytes]) -> list[int]:
        """The picked readings without those that this change itself brought here."""
        left = Counter(arrived)
        picked = []
        for place in opened.picked:
            digest = self._digest(self._flat(opened, place))
            if left[digest]:
                left[digest] -= 1
            else:
                picked.append(place)
        return picked

    def _leaves(self, opened: Opened, before: Raw, after: Raw) -> bool:
        """Whether a changed reading has to be added anew, to another bucket or under another unique value."""
        spec, bucket = self.spec, opened.bucket
        if spec.unique is not None and not _same(
            before.get(spec.unique.stored), after.get(spec.unique.stored)
        ):
            return True
        if any(not _same(after.get(name), bucket.get(name)) for name in spec.outer_names):
            return True
        count, start = milliseconds(after[spec.time.stored]), start_of(spec, bucket)
        if spec.span is not None:
            return spec.window(count) != start
        following = bucket.get(RESERVED, {}).get("next")
        return count < start or (following is not None and count >= milliseconds(following))

    def _write_back(self, opened: Opened, picked: Sequence[int], afters: Sequence[Raw | None]) -> Plan[bool]:
        """Write the bucket with its changed readings, if it is still the one that was read."""
        spec = self.spec
        readings: list[Raw] = []
        changed = dict(zip(picked, afters, strict=True))
        for place, reading in enumerate(opened.readings):
            after = changed.get(place, reading)
            if after is reading:
                readings.append(reading)
            elif after is not None:
                readings.append(self.inner(after))
        unchanged = guard(spec, opened.bucket)
        if not readings:
            gone = yield from delete_one(self.collection, unchanged)
            return bool(gone.deleted_count)
        update = rewritten(spec, opened.bucket, readings)
        result = yield from update_one(self.collection, unchanged, update)
        return bool(result.matched_count)

    def inner(self, flat: Raw) -> Raw:
        """The part of a flat reading that is stored in the bucket's array."""
        outer = set(self.spec.outer_names) | (set() if self.spec.stores_id else {"_id"})
        return {name: value for name, value in flat.items() if name not in outer}

    def _move(
        self,
        opened: Opened,
        picked: Sequence[int],
        afters: Sequence[Raw | None],
        leaving: Sequence[Raw],
        server: Capabilities,
        *,
        drop_duplicates: bool = False,
    ) -> Plan[bool]:
        """Take readings out of one bucket and put them into theirs; whether nobody came between."""
        server.require_transactions(
            f"a change of time, series, metadata or unique value adds a {self.spec.label} anew and",
            "insert it anew and delete the old one",
        )
        going = {id(each) for each in leaving}
        staying = [None if id(after) in going else after for after in afters]

        def attempt() -> Plan[bool]:
            if not (yield from self._write_back(opened, picked, staying)):
                return False
            batches = self.writer.group([_whole(self.spec, each) for each in leaving])
            duplicates = yield from self.writer.append(batches, careful=True)
            if duplicates and not drop_duplicates:
                raise UsageError(
                    f"this would give a {self.spec.label} the {self.spec.unique and self.spec.unique.name} "
                    "of another one in its new bucket, which unique= forbids",
                    code="reading-duplicate",
                )
            return True

        return (yield from transact(attempt))

    def sort_out(
        self, opened: Opened, astray: set[int], surplus: set[int], server: Capabilities
    ) -> Plan[bool]:
        """Rewrite a bucket without surplus readings, move the astray ones; whether nobody came between."""
        picked = range(len(opened.readings))
        afters = [None if place in surplus else self._flat(opened, place) for place in picked]
        leaving = [after for place, after in enumerate(afters) if place in astray and after is not None]
        if leaving:
            return (yield from self._move(opened, picked, afters, leaving, server, drop_duplicates=True))
        return (yield from self._write_back(opened, picked, afters))

    # -- whole buckets ------------------------------------------------------------------

    def delete_buckets(self, selection: Selection) -> Plan[int]:
        """Delete buckets of which every reading is meant; how many readings there were."""
        names, limits = self.spec.names, self.spec.limits
        total = 0
        for _ in range(limits.bucket_change_attempts_max):
            shown = {names.count: 1, REVISION: 1, "_id": 1}
            scan = Scan(self.collection, selection.buckets, limits.bucket_delete_page, shown)
            missed = False
            while buckets := (yield from scan.next()):
                operations = [DeleteOne(guard(self.spec, bucket, light=True)) for bucket in buckets]
                result = yield from bulk_write(self.collection, operations, ordered=False)
                left: set[Any] = set()
                if result.deleted_count != len(buckets):
                    keys = [bucket["_id"] for bucket in buckets]
                    rest = yield from find(self.collection, {"_id": {"$in": keys}}, {"_id": 1})
                    left = {freeze(each["_id"]) for each in rest}
                    missed = True
                total += sum(
                    int(bucket.get(names.count, 0)) for bucket in buckets if freeze(bucket["_id"]) not in left
                )
            if not missed:
                break
        return total


def _whole(spec: Spec, flat: Raw) -> Raw:
    """A flat reading with every part that grouping takes out."""
    return {**dict.fromkeys((*spec.outer_names, "_id")), **copy.deepcopy(flat)}


def _same(one: Any, other: Any) -> bool:
    return order_key(one) == order_key(other)


def guard(spec: Spec, bucket: Raw, *, light: bool = False) -> Raw:
    """The filter that a bucket meets only as long as nobody changed it."""
    revision = bucket.get(RESERVED, {}).get("n")
    held = {} if light else {spec.names.readings: {"$type": _BSON_TYPE[form_of(spec, bucket)]}}
    if not light and form_of(spec, bucket) == "columns":
        # An array of objects also passes for an object.
        held = {f"{spec.names.readings}.{spec.time.stored}": {"$type": "array"}}
    return {
        "_id": {"$eq": bucket["_id"]},
        spec.names.count: {"$eq": bucket.get(spec.names.count)},
        REVISION: {"$exists": False} if revision is None else {"$eq": revision},
        **held,
    }


_BSON_TYPE = {"rows": "array", "columns": "object", "packed": "binData"}


def rewritten(spec: Spec, bucket: Raw, readings: Sequence[Raw], form: Any = None) -> Raw:
    """The update that gives a bucket these readings, in its form or another."""
    start = start_of(spec, bucket)
    held = stored_form(spec, form or form_of(spec, bucket), start, readings)
    sets = {spec.names.readings: held, **derived_parts(spec, start, readings)}
    return {"$set": sets, "$inc": {REVISION: 1}}


# -- what an update makes of a reading --------------------------------------------------------


def applied(spec: Spec, collection: str, update: Update) -> Change:
    """A change from an update of MongoDB's: operators by Python, a pipeline by the server."""
    if not isinstance(update, Mapping):
        stages: list[Raw] = [dict(stage) for stage in update]
        return lambda readings: _by_server(spec, collection, readings, stages)
    for operator in update:
        if operator not in _OPERATORS and operator != "$setOnInsert":
            known = ", ".join(sorted(_OPERATORS))
            raise UsageError(
                f"{operator} is not offered on readings in buckets; use {known} or a pipeline",
                code="update-invalid",
            )
    for operator, fields in update.items():
        for path in fields:
            _check_path(spec, operator, path)
    dated = "$currentDate" in update

    def change(readings: list[Raw]) -> Plan[list[Raw | None]]:
        for reading in readings:
            for operator, fields in update.items():
                for path, operand in fields.items():
                    if operator in _OPERATORS and operator != "$currentDate":
                        _OPERATORS[operator](reading, path, operand)
        if dated:
            now: Raw = dict.fromkeys(update["$currentDate"], "$$NOW")
            return (yield from _by_server(spec, collection, readings, [{"$set": now}]))
        return [_checked(spec, reading) for reading in readings]

    return change


def _check_path(spec: Spec, operator: str, path: str) -> None:
    if top(path) == "_id":
        raise UsageError("the id of a reading cannot be updated", code="update-invalid")
    if path == RESERVED or path.startswith(f"{RESERVED}."):
        raise UsageError(f"{RESERVED} is Treadle's own and cannot be updated", code="field-maintained")
    if any(not part or part.startswith("$") or part.isdigit() for part in path.split(".")):
        raise UsageError(
            f"{operator} of {path!r}: positions in arrays are not offered on readings in buckets; "
            "use a pipeline",
            code="update-invalid",
        )


def _checked(spec: Spec, reading: Raw) -> Raw:
    if not isinstance(reading.get(spec.time.stored), dt.datetime):
        raise UsageError(
            f"this leaves a {spec.label} without a date in {spec.time.stored!r}", code="update-invalid"
        )
    for stat in spec.stats:
        value = value_at(reading, stat.path)
        if value is not None and not is_number(value):
            raise UsageError(
                f"this makes {stat.path!r} of a {spec.label} something else than a number, of which its "
                "bucket holds statistics",
                code="update-invalid",
            )
    return reading


def _by_server(spec: Spec, collection: str, readings: list[Raw], stages: list[Raw]) -> Plan[list[Raw | None]]:
    sent = [{**each, "_id": number} for number, each in enumerate(readings)]
    if spec.stores_id:
        sent = [{**each, RESERVED: {"id": each["_id"]}} for each in readings]
        sent = [{**each, "_id": number} for number, each in enumerate(sent)]
    found = yield from on_server(collection, sent, stages)
    if len(found) != len(sent):
        raise DataError(
            f"the buckets of {spec.label} were deleted while a reading was updated", code="bucket-contended"
        )
    changed: list[Raw | None] = []
    for before, after in zip(readings, found, strict=True):
        result = {key: value for key, value in after.items() if key != RESERVED}
        if result.get("_id") is None:
            raise UsageError("the id of a reading cannot be removed by a pipeline", code="update-invalid")
        changed.append(_checked(spec, {**result, "_id": before["_id"]}))
    return changed


def _set(reading: Raw, path: str, operand: Any) -> None:
    put(reading, path, copy.deepcopy(operand))


def _unset(reading: Raw, path: str, operand: Any) -> None:
    drop(reading, path)


def _arithmetic(sign: str) -> Callable[[Raw, str, Any], None]:
    def change(reading: Raw, path: str, operand: Any) -> None:
        if not is_number(operand):
            raise UsageError(f"{sign} takes a number, not {operand!r}", code="update-invalid")
        present = has(reading, path)
        current = value_at(reading, path)
        if present and not is_number(current):
            raise UsageError(
                f"{sign} of {path!r}: one of the readings has no number there",
                code="update-invalid",
            )
        if not present:
            nothing = Decimal128("0") if isinstance(operand, Decimal128) else type(operand)(0)
            put(reading, path, operand if sign == "$inc" else nothing)
            return
        put(reading, path, _compute(current, operand, sign))

    return change


def _compute(one: Any, other: Any, sign: str) -> Any:
    if isinstance(one, Decimal128) or isinstance(other, Decimal128):
        with decimal.localcontext() as context:
            context.prec = 34
            a, b = (
                each.to_decimal()
                if isinstance(each, Decimal128)
                else decimal.Decimal(repr(each) if isinstance(each, float) else each)
                for each in (one, other)
            )
            return Decimal128(a + b if sign == "$inc" else a * b)
    return one + other if sign == "$inc" else one * other


def _extreme(largest: bool) -> Callable[[Raw, str, Any], None]:
    def change(reading: Raw, path: str, operand: Any) -> None:
        if not has(reading, path):
            put(reading, path, operand)
            return
        current = order_key(value_at(reading, path))
        if (order_key(operand) > current) if largest else (order_key(operand) < current):
            put(reading, path, operand)

    return change


def _rename(reading: Raw, path: str, operand: Any) -> None:
    if has(reading, path):
        value = value_at(reading, path)
        drop(reading, path)
        put(reading, str(operand), value)


def _nothing(reading: Raw, path: str, operand: Any) -> None:
    """Done by the server, which has a clock."""


_OPERATORS: dict[str, Callable[[Raw, str, Any], None]] = {
    "$set": _set, "$unset": _unset, "$inc": _arithmetic("$inc"), "$mul": _arithmetic("$mul"),
    "$min": _extreme(False), "$max": _extreme(True), "$rename": _rename, "$currentDate": _nothing,
}  # fmt: skip
