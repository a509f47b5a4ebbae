"""The Store's calls on a model in a native time-series collection.

The server keeps readings in buckets of its own and shows them as documents,
so reading is as everywhere else. Writing is not: there are no transactions,
single readings cannot be changed, and only the series can be used to change
or delete many. What the server refuses is refused with the way out.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, NoReturn, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine import crud
from treadle.engine.indexes import compare_indexes, existing_indexes, set_up_indexes
from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.pattern import Entry
from treadle.graph.reports import Action, Finding, Progress, Report, Summary
from treadle.model.adapt import adapter_of
from treadle.model.codec import StoredField
from treadle.model.document import Document
from treadle.model.indexed import Indexed
from treadle.patterns.bucket.reading import NAIVE_EPOCH, Scan, bounds, field_summary, is_dateless
from treadle.patterns.bucket.spec import EPOCH, as_tuple, moment
from treadle.plan import (
    Plan,
    Raw,
    Read,
    aggregate,
    count_documents,
    create,
    database_command,
    delete_many,
    find,
    insert_many,
    is_inside,
    update_many,
)
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import (
    COMMAND_NOT_SUPPORTED_ON_VIEW,
    ILLEGAL_OPERATION,
    INVALID_OPTIONS,
    OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
    codes_of,
)
from treadle.query.safety import Sort, clean, clean_filter, clean_update

D = TypeVar("D", bound=Document)

REFUSED = {
    ILLEGAL_OPERATION,
    INVALID_OPTIONS,
    COMMAND_NOT_SUPPORTED_ON_VIEW,
    OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
}


class NativeReader(Generic[D]):
    """Documents of a time-series collection, as they come."""

    def __init__(self, entry: Entry[D], command: Read) -> None:
        self.page = entry.limits.find_page
        self.done = False
        self._command = command
        self._load = entry.codec.load

    @property
    def command(self) -> Read:
        return self._command

    def take(self, raws: list[Raw], ended: bool) -> Plan[list[D]]:
        self.done = ended
        return [self._load(raw) for raw in raws]
        yield  # pragma: no cover (a plan that asks for nothing)


class NativeLayout(Layout[D]):
    """Readings in the server's own kind of collection."""

    pattern = "time_series"

    def __init__(self, entry: Entry[D], declared: Any) -> None:
        self.entry = entry
        self.declared = declared
        self.collection = entry.collection
        self.name = entry.model.__name__
        self.time = self._field(declared.time, "time")
        self.key = None if declared.key is None else self._field(declared.key, "key")
        self.stats = tuple(self._field(name, "stats") for name in as_tuple(declared.stats))
        self._check()

    def _refuse(self, said: str) -> DeclarationError:
        return DeclarationError(f"the time series of {self.name} {said}", code="bucket-declaration")

    def _field(self, name: Any, keyword: str) -> StoredField:
        field = self.entry.codec.by_name.get(name) if isinstance(name, str) else None
        if field is None or field.stored == "_id":
            raise self._refuse(
                f"has {keyword}={name!r}; it takes one field of the model, and the server knows one field "
                "per series: put several into a nested model"
            )
        return field

    def _check(self) -> None:
        shape = self.time.shape
        if shape.kind != "scalar" or shape.python is not dt.datetime or shape.optional:
            raise self._refuse(f"has time={self.time.name!r}, which must be a datetime and not None")
        if self.declared.granularity not in ("seconds", "minutes", "hours"):
            raise self._refuse(
                f"has granularity={self.declared.granularity!r}; it takes seconds, minutes or hours"
            )
        expiry = self.declared.expire_after
        if expiry is not None and not (
            isinstance(expiry, dt.timedelta) and expiry >= dt.timedelta(seconds=1)
        ):
            raise self._refuse(f"has expire_after={expiry!r}; it takes a timedelta of a second or more")
        if self.entry.settings.validation == "strict":
            raise self._refuse('has validation="strict", but the server validates nothing there; use bucket=')
        unique = any(index.document.get("unique") for index in self.entry.settings.indexes) or any(
            isinstance(mark, Indexed) and mark.unique
            for field in self.entry.codec.fields
            for mark in field.shape.metadata
        )
        if unique:
            raise self._refuse(
                "has a unique index, which the server does not make there; use bucket= with unique="
            )

    def _not_offered(self, what: str, instead: str) -> UsageError:
        return UsageError(
            f"{what} is not offered on {self.name}, which is stored with timeseries=: the server refuses it "
            f"on its native kind; {instead}",
            code="timeseries-refused",
        )

    def _translated(self, error: OperationFailure, what: str) -> NoReturn:
        if codes_of(error) & REFUSED:
            raise self._not_offered(what, "use bucket=, which offers all calls") from error
        raise error

    # -- writing --------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        return (yield from self.insert_many([document]))[0]

    def insert_many(self, documents: Iterable[D]) -> Plan[list[D]]:
        if (yield from is_inside()):
            raise self._not_offered("a transaction", "write outside of it, or use bucket=")
        listed = list(documents)
        try:
            if len(listed) == 1:
                return [(yield from crud.insert(self.entry, listed[0]))]
            return (yield from crud.insert_many(self.entry, listed))
        except OperationFailure as error:
            self._translated(error, "this insert")

    # -- reading --------------------------------------------------------------------------

    def reader(self, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> NativeReader[D]:
        crud.check_window(skip, limit)
        return NativeReader(self.entry, crud.find_command(self.entry, filter, sort, skip, limit))

    def id_filter(self, identity: Any) -> Raw:
        return {"_id": {"$eq": self.entry.identity(identity)}}

    def count(self, filter: Any) -> Plan[int]:
        return (yield from crud.count(self.entry, filter))

    def _series(self, key: Any, start: Any, end: Any) -> Raw:
        low, high = bounds(start, end)
        times = {
            **({"$gte": moment(low)} if low is not None else {}),
            **({"$lte": moment(high)} if high is not None else {}),
        }
        series: Raw = {}
        if self.key is not None:
            value = clean(key)
            if isinstance(value, dict):
                # The server sorts the fields of a series, so the whole would not be equal.
                series = {f"{self.key.stored}.{name}": {"$eq": item} for name, item in value.items()}
            else:
                series = {self.key.stored: {"$eq": value}}
        return {**series, **({self.time.stored: times} if times else {})}

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        """One entry for the whole range, computed by the server: its own buckets are not to be seen."""
        group: Raw = {
            "_id": None, "count": {"$sum": 1}, "start": {"$min": f"${self.time.stored}"},
            "end": {"$max": f"${self.time.stored}"},
        }  # fmt: skip
        for number, field in enumerate(self.stats):
            path = f"${field.stored}"
            # What is null does not count for an average.
            there = {"$cond": [{"$gt": [path, None]}, 1, 0]}
            group |= {
                f"min{number}": {"$min": path}, f"max{number}": {"$max": path},
                f"sum{number}": {"$sum": path}, f"count{number}": {"$sum": there},
            }  # fmt: skip
        rows = yield from aggregate(
            self.collection, [{"$match": self._series(key, start, end)}, {"$group": group}]
        )
        return [
            Summary(
                row["start"],
                row["end"],
                row["count"],
                {
                    field.name: field_summary(
                        {part: row[f"{part}{number}"] for part in ("min", "max", "sum", "count")},
                        row["count"],
                    )
                    for number, field in enumerate(self.stats)
                },
            )
            for row in rows
        ]

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        outer = {self.time.stored, "_id"} | ({self.key.stored} if self.key else set())
        chosen = (
            [self._field(name, "fields") for name in fields]
            if fields is not None
            else [each for each in self.entry.codec.fields if each.stored not in outer]
        )
        names = [self.time.stored, *(each.stored for each in chosen)]
        naive = all(is_dateless(each.shape) for each in chosen)
        raws = yield from find(
            self.collection, self._series(key, start, end), {"_id": 0, **dict.fromkeys(names, 1)},
            sort=[(self.time.stored, 1)], naive=naive,
        )  # fmt: skip
        if naive:
            for raw in raws:
                if isinstance(when := raw[names[0]], dt.datetime):
                    raw[names[0]] = EPOCH + (when - NAIVE_EPOCH)
        adapters = [None, *(adapter_of(self.entry.codec, each.shape) for each in chosen)]
        if not any(adapters) and len(names) > 1:
            try:
                return list(map(itemgetter(*names), raws))
            except KeyError:
                pass
        return [
            tuple(
                value if (value := raw.get(name)) is None or adapt is None else adapt(value)
                for name, adapt in zip(names, adapters, strict=True)
            )
            for raw in raws
        ]

    # -- changing -------------------------------------------------------------------------

    def update(self, id_or_filter: Any, update: Any) -> Plan[D | None]:
        raise self._not_offered("update", "update_many can change the series as a whole; or use bucket=")
        yield  # pragma: no cover (a plan that asks for nothing)

    def replace(self, document: D) -> Plan[D]:
        raise self._not_offered("replace", "use bucket=")
        yield  # pragma: no cover (a plan that asks for nothing)

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        raise self._not_offered("delete", "delete_many can delete a series as a whole; or use bucket=")
        yield  # pragma: no cover (a plan that asks for nothing)

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        crud.require_filter(self.entry, filter)
        cleaned, change = clean_filter(self.entry.codec, filter), clean_update(self.entry.codec, update)
        # The server reports its own buckets, not readings.
        number = yield from count_documents(self.collection, cleaned)
        try:
            yield from update_many(self.collection, cleaned, change)
        except OperationFailure as error:
            self._translated(error, "this update_many")
        return number

    def delete_all(self, filter: Any) -> Plan[int]:
        crud.require_filter(self.entry, filter)
        cleaned = clean_filter(self.entry.codec, filter)
        try:
            result = yield from delete_many(self.collection, cleaned)
        except OperationFailure as error:
            self._translated(error, "this delete_many")
        return result.deleted_count

    # -- set-up ---------------------------------------------------------------------------

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        declared = self.declared
        options: Raw = {"timeField": self.time.stored, "granularity": declared.granularity}
        if self.key is not None:
            options["metaField"] = self.key.stored
        expiry: Raw = {}
        if declared.expire_after is not None:
            expiry = {"expireAfterSeconds": int(declared.expire_after.total_seconds())}
        found = existing.get(self.collection)
        if found is None:
            actions.append(Action("create collection", self.collection, "time series"))
            yield from create(self.collection, timeseries=options, **expiry)
        else:
            yield from self._compare(found, options, expiry, actions)
        present = [] if found is None else (yield from existing_indexes(self.collection))
        missing, changed = compare_indexes(self.entry, present)
        yield from set_up_indexes(self.entry, missing, changed, actions)

    def _compare(self, found: Raw, options: Raw, expiry: Raw, actions: list[Action]) -> Plan[None]:
        if found["type"] != "timeseries":
            raise DataError(
                f"{self.name} is to be a time series in {self.collection!r}, but that is an ordinary "
                f"{found['type']}; choose another name, and adopt={self.collection!r} moves its documents",
                code="collection-conflict",
            )
        current = found.get("options", {})
        there = current.get("timeseries", {})
        differing = [name for name in ("timeField", "metaField") if there.get(name) != options.get(name)]
        if differing:
            raise DataError(
                f"{self.collection!r} is a time series with another {' and '.join(differing)} than "
                f"{self.name} declares, which cannot be changed; choose another collection",
                code="collection-conflict",
            )
        change: Raw = {}
        if there.get("granularity", options["granularity"]) != options["granularity"]:
            change["timeseries"] = {"granularity": options["granularity"]}
        if current.get("expireAfterSeconds") != expiry.get("expireAfterSeconds"):
            change["expireAfterSeconds"] = expiry.get("expireAfterSeconds", "off")
        if change:
            actions.append(Action("change collection", self.collection, ", ".join(change)))
            yield from database_command({"collMod": self.collection, **change})

    # -- adoption -------------------------------------------------------------------------

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """Documents that wait to be moved here; the server looks after all the rest."""
        findings: list[Finding] = []
        if self.declared.adopt is None:
            return findings
        scan = Scan(self.declared.adopt, {}, self.entry.limits.adopt_page, {"_id": 1})
        while documents := (yield from scan.next()):
            findings += [
                Finding(
                    self.pattern, self.name, each["_id"], "",
                    f"a document of its own in {self.declared.adopt}", "a reading in the time series",
                )
                for each in documents
            ]  # fmt: skip
        return findings

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return (yield from self._adopt(report))

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return (yield from self._adopt(report))

    def _adopt(self, report: Report | None) -> Plan[int]:
        """Move documents here page by page; how many there were.

        There are no transactions on a time series. A reading keeps its `_id`,
        so after a crash those that are here already are known and left out.
        """
        source = self.declared.adopt
        if source is None:
            return 0
        total = (yield from count_documents(source, {})) if report else 0
        adopted = 0
        for _ in range(self.entry.limits.adopt_passes_max):
            moved = 0
            scan = Scan(source, {}, self.entry.limits.adopt_page)
            while documents := (yield from scan.next()):
                moved += yield from self._adopt_page(source, [each for each in documents if self._fits(each)])
                if report:
                    report(Progress(self.name, adopted + moved, max(total, adopted + moved)))
            adopted += moved
            if not moved:
                break
        return adopted

    def _fits(self, document: Raw) -> bool:
        try:
            self.entry.codec.load(copy.deepcopy(document))
            return isinstance(document.get(self.time.stored), dt.datetime)
        except TreadleError:
            return False

    def _adopt_page(self, source: str, documents: list[Raw]) -> Plan[int]:
        if not documents:
            return 0
        keys = [each["_id"] for each in documents]
        times = [each[self.time.stored] for each in documents]
        there = yield from find(
            self.collection,
            {self.time.stored: {"$gte": min(times), "$lte": max(times)}, "_id": {"$in": keys}},
            {"_id": 1},
        )
        known = [each["_id"] for each in there]
        fresh = [each for each in documents if each["_id"] not in known]
        if fresh:
            yield from insert_many(self.collection, fresh, ordered=False)
        yield from delete_many(source, {"_id": {"$in": keys}})
        return len(keys)
