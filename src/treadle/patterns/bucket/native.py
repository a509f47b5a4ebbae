"""The Store's calls on a model in a native time-series collection.

The server stores readings in buckets of its own and shows them as documents,
so reading is as for ordinary documents. Writing is not: there are no
transactions, single readings cannot be changed, and many can be changed or
deleted only by their series. What the server refuses is refused by name, with
what to do instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine.document_reads import DocumentReads
from treadle.engine.documents import as_stored, dump_all, require_filter, translated
from treadle.engine.indexes import compare_indexes, existing_indexes, set_up_indexes
from treadle.engine.reads import DocumentReader, find_command
from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action, Finding, Report, Summary
from treadle.graph.query import Query
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import check_batch, clean
from treadle.model.codec import StoredField
from treadle.model.document import Document, Indexed
from treadle.patterns.bucket.adoption import SeriesAdoption
from treadle.patterns.bucket.bucket_document import column
from treadle.patterns.bucket.query import time_condition
from treadle.patterns.bucket.series import adapted, chosen_fields, field_summary, make_aware, times_between
from treadle.patterns.bucket.spec import as_tuple, check_reading_declaration, refusal
from treadle.plan import (
    Call,
    Plan,
    Raw,
    aggregate,
    count_documents,
    create,
    database_command,
    delete_many,
    find,
    is_inside,
    update_many,
)
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import REFUSED_ON_TIME_SERIES, codes_of
from treadle.query.filters import Sort, parse_filter
from treadle.query.updates import parse_update

D = TypeVar("D", bound=Document)

# What to do in place of calls that the server refuses.
ALTERNATIVES = {
    "update": "update_many can change the series as a whole; or use bucket=",
    "replace": "use bucket=",
    "change": "use bucket=",
    "upsert": "use insert; or use bucket=",
    "delete": "delete_many can delete a series as a whole; or use bucket=",
}


class TimeSeriesLayout(DocumentReads[D]):
    """Readings in the server's own kind of collection; reads are those of ordinary documents."""

    pattern = "time_series"

    def __init__(self, entry: ModelEntry[D], declared: Any) -> None:
        super().__init__(entry)
        self.declared = declared
        self.collection = entry.collection
        self.name = entry.model.__name__
        self.time = self._field(declared.time, "time")
        self.key = None if declared.key is None else self._field(declared.key, "key")
        self.stats = tuple(self._field(name, "stats") for name in as_tuple(declared.stats)) or tuple(
            field
            for field in entry.codec.fields
            if field.shape.kind == "scalar"
            and field.shape.python in (int, float, Decimal)
            and field not in (self.time, self.key)
        )
        self._check()

    def _refusal(self, reason: str) -> DeclarationError:
        return refusal(self.declared, self.entry, reason)

    def _field(self, name: Any, keyword: str) -> StoredField:
        field = self.entry.codec.by_name.get(name) if isinstance(name, str) else None
        if field is None or field.stored == "_id":
            raise self._refusal(
                f"has {keyword}={name!r}; it takes one field of the model, and the server knows one field "
                "per series: put several into a nested model"
            )
        return field

    def _check(self) -> None:
        check_reading_declaration(self.declared, self.entry, self.time)
        if self.declared.granularity not in ("seconds", "minutes", "hours"):
            raise self._refusal(
                f"has granularity={self.declared.granularity!r}; it takes 'seconds' or 'minutes' or 'hours'"
            )
        if self.entry.model.__treadle__.validation == "strict":
            raise self._refusal(
                'has validation="strict", but the server validates nothing there; use bucket='
            )
        unique = any(index.document.get("unique") for index in self.entry.model.__treadle__.indexes) or any(
            isinstance(mark, Indexed) and mark.unique
            for field in self.entry.codec.fields
            for mark in field.shape.metadata
        )
        if unique:
            raise self._refusal(
                "has a unique index, which the server does not make there; use bucket= with unique="
            )

    def _not_answered(self, call: str, hint: str = "use find or count") -> NoReturn:
        if call in ALTERNATIVES:
            raise self._unsupported(call, ALTERNATIVES[call])
        super()._not_answered(call, hint)

    def _unsupported(self, what: str, instead: str) -> UsageError:
        return UsageError(
            f"{what} is not offered on {self.name}, which is stored with timeseries=: the server refuses it "
            f"on its native kind; {instead}",
            code="timeseries-refused",
        )

    @contextmanager
    def _translated(self, what: str) -> Generator[None]:
        try:
            yield
        except OperationFailure as error:
            if not codes_of(error) & REFUSED_ON_TIME_SERIES:
                raise
            raise self._unsupported(what, "use bucket=, which offers all calls") from error

    # -- writing --------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        return (yield from self.insert_many([document]))[0]

    def insert_many(self, documents: Iterable[D], ordered: bool = True) -> Plan[list[D]]:
        if not ordered:
            self._not_answered("insert_many with ordered=False", "leave it out")
        if (yield from is_inside()):
            raise self._unsupported("a transaction", "write outside of it, or use bucket=")
        listed, altered = list(documents), list[Any]()
        raws = dump_all(self.entry, listed, altered)
        if len(raws) > 1:
            check_batch(raws, self.entry.model.__name__)
        stored = [as_stored(self.entry, *pair, altered) for pair in zip(listed, raws, strict=True)]
        with self._translated("this insert"), translated(self.entry.model.__name__, raws):
            for chunk in chunks(raws, self.entry.limits.insert_max):
                yield Call(self.collection, "insert_many", (chunk,))
        return stored

    # -- reading --------------------------------------------------------------------------

    def reader(self, query: Query) -> DocumentReader[Any]:
        if query.deleted:
            self._not_answered("find(…, deleted=True)")
        command = find_command(self.entry, query)
        if query.sort is None:
            # In the order of time, as of buckets; the server has its own in the order of their windows.
            order = {"sort": [(self.time.stored, 1)], "allow_disk_use": True}
            command = replace(command, options={**command.options, **order})
        return DocumentReader(self.entry, command, query)

    def first(self, filter: Any, sort: Sort | None, card: Any = None) -> Plan[Any]:
        # In the order of time.
        return Layout.first(self, filter, sort, card)

    def _series(self, key: Any, start: Any, end: Any) -> Raw:
        times = time_condition(times_between(start, end))
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
        """Return one entry for the whole range, computed by the server, whose own buckets are hidden."""
        group: Raw = {
            "_id": None, "count": {"$sum": 1}, "start": {"$min": f"${self.time.stored}"},
            "end": {"$max": f"${self.time.stored}"},
        }  # fmt: skip
        for number, field in enumerate(self.stats):
            path = f"${field.stored}"
            # What is null does not count for an average.
            present = {"$cond": [{"$gt": [path, None]}, 1, 0]}
            group |= {
                f"min{number}": {"$min": path}, f"max{number}": {"$max": path},
                f"sum{number}": {"$sum": path}, f"count{number}": {"$sum": present},
            }  # fmt: skip
        rows = yield from aggregate(
            self.collection, [{"$match": self._series(key, start, end)}, {"$group": group}]
        )
        summaries = []
        for row in rows:
            stats = {}
            for number, field in enumerate(self.stats):
                parts = {part: row[f"{part}{number}"] for part in ("min", "max", "sum", "count")}
                stats[field.name] = field_summary(parts, row["count"])
            summaries.append(Summary(row["start"], row["end"], row["count"], stats))
        return summaries

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        outer = {self.time.stored, "_id"} | ({self.key.stored} if self.key else set())
        chosen, naive = chosen_fields(self.entry.codec, fields, outer)
        names = [self.time.stored, *(each.stored for each in chosen)]
        raws = yield from find(
            self.collection, self._series(key, start, end), {"_id": 0, **dict.fromkeys(names, 1)},
            sort=[(self.time.stored, 1)], naive=naive,
        )  # fmt: skip
        if naive:
            for raw in raws:
                make_aware(raw, self.time.stored)
        rows = list(zip(*(column(raws, name) for name in names), strict=True))
        return adapted(self.entry.codec, chosen, rows)

    # -- changing -------------------------------------------------------------------------

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        require_filter(self.entry, filter)
        paths = self.entry.paths.fields
        chosen, change = parse_filter(paths, filter), parse_update(paths, update).update
        # The server reports its own buckets, not readings.
        number = yield from count_documents(self.collection, chosen)
        with self._translated("this update_many"):
            yield from update_many(self.collection, chosen, change)
        return number

    def delete_all(self, filter: Any) -> Plan[int]:
        require_filter(self.entry, filter)
        with self._translated("this delete_many"):
            chosen = parse_filter(self.entry.paths.fields, filter)
            return (yield from delete_many(self.collection, chosen)).deleted_count

    # -- set-up ---------------------------------------------------------------------------

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        declared = self.declared
        options: Raw = {"timeField": self.time.stored, "granularity": declared.granularity}
        if self.key is not None:
            options["metaField"] = self.key.stored
        expiry: Raw = {}
        if declared.expire_after is not None:
            expiry = {"expireAfterSeconds": int(declared.expire_after.total_seconds())}
        present: list[Raw] = []
        if self.collection in existing:
            yield from self._compare(existing[self.collection], options, expiry, actions)
            present = yield from existing_indexes(self.collection)
        else:
            actions.append(Action("create collection", self.collection, "time series"))
            yield from create(self.collection, timeseries=options, **expiry)
        missing, changed = compare_indexes(self.entry, present)
        yield from set_up_indexes(self.entry, missing, changed, actions)

    def _compare(self, collection: Raw, options: Raw, expiry: Raw, actions: list[Action]) -> Plan[None]:
        """Change what can be changed of an existing collection; raises where it cannot be used."""
        if collection["type"] != "timeseries":
            raise DataError(
                f"{self.name} is to be a time series in {self.collection!r}, but that is an ordinary "
                f"{collection['type']}; choose another name, and adopt={self.collection!r} moves its "
                "documents",
                code="collection-conflict",
            )
        current = collection.get("options", {})
        series = current.get("timeseries", {})
        differing = [name for name in ("timeField", "metaField") if series.get(name) != options.get(name)]
        if differing:
            raise DataError(
                f"{self.collection!r} is a time series with another {' and '.join(differing)} than "
                f"{self.name} declares, which cannot be changed; choose another collection",
                code="collection-conflict",
            )
        change: Raw = {}
        if series.get("granularity", options["granularity"]) != options["granularity"]:
            change["timeseries"] = {"granularity": options["granularity"]}
        if current.get("expireAfterSeconds") != expiry.get("expireAfterSeconds"):
            change["expireAfterSeconds"] = expiry.get("expireAfterSeconds", "off")
        if change:
            actions.append(Action("change collection", self.collection, ", ".join(change)))
            yield from database_command({"collMod": self.collection, **change})

    # -- adoption -------------------------------------------------------------------------

    def _adoption(self) -> SeriesAdoption:
        return SeriesAdoption(self.entry, self.time.stored, self.declared.adopt)

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """Return the documents that wait to be moved here; the server looks after all the rest."""
        return self._adoption().waiting()

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return self._adoption().adopt(report)

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return self._adoption().adopt(report)
