"""History: each state that a document had is kept, once, with the time for which it held.

The invariant (Document Versioning, a slowly changing dimension of type 2): per
document states 1, 2, 3 without a hole; each begins where the one before it
ended; one is open while the document exists, and none afterwards. The row of
a state is written in the commit of the write that begins it, whatever that
write is, or by the worker with `maintain="stream"`. How rows are written is in
`track.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pymongo import DeleteMany

from treadle.engine.write_path import WritePath
from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.changes import Change, Changes
from treadle.graph.events import Event
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.rule import TRANSACTIONS, Due, Models, Needs, Pattern, Place, Reads, Rule
from treadle.graph.stored_pages import chunks
from treadle.patterns.history import stream, track, verify
from treadle.patterns.history.handle import HistoryHandle
from treadle.patterns.history.rows import HistoryRows
from treadle.plan import Plan, Raw, aggregate, bulk_write, count_documents, delete_many, find

KEEP_MAX = 1_000_000
# Documents whose states are trimmed after one pass over the history.
TRIMMED_DOCUMENTS_MAX = 50_000
ENDED: Raw = {"valid_to": {"$ne": None}}


@dataclass(frozen=True)
class History(Pattern):
    """Keep each state of the model's documents; `keep` bounds them by number of ended states, or by age."""

    pattern: ClassVar[str] = "history"
    keyword: ClassVar[str] = "history"
    beside: ClassVar[bool] = True

    collection: str | None = None
    keep: int | dt.timedelta | None = None
    maintain: Literal["write", "stream"] = "write"

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "maintain", self.maintain, ("write", "stream"))
        if isinstance(self.keep, dt.timedelta):
            if self.keep <= dt.timedelta(0):
                raise DeclarationError(
                    f"{place.label} has keep={self.keep!r}; an age is above zero", code="pattern-keyword"
                )
        elif self.keep is not None:
            check_whole_number(place, "keep", self.keep, KEEP_MAX)
        return (WrittenHistory if self.maintain == "write" else StreamHistory)(place, graph, self)


class HistoryRule(HistoryRows):
    """A history, as the rest of Treadle asks for it."""

    needs = TRANSACTIONS

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place, graph, declared)
        if declared.keep is not None:
            self.due_work = "remove states that keep= no longer holds"

    def reads(self) -> Reads:
        return {self.target.collection: None}

    def calls(self, write_path: WritePath, entry: ModelEntry) -> HistoryHandle:
        return HistoryHandle(self, write_path, entry)

    # -- verify and repair ---------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        return verify.examine_rows(self) if page is None else verify.examine(self, page)

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if keys is not None:
            return (yield from verify.repair(self, keys))
        yield from verify.repair_orphans(self)
        return []

    def run_due(self, work: Due) -> Plan[int]:
        if work.now is None or self.declared.keep is None:
            return 0
        return (yield from trim(self, work.now, work.dry_run))


class WrittenHistory(HistoryRule):
    """A history that is written with each write."""

    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        return track.record(self, changes, ledger)


class StreamHistory(HistoryRule):
    """A history that the worker writes."""

    # The server's pre-images are the only record of the states that were.
    needs: Needs = MappingProxyType({**TRANSACTIONS, "pre_images": 'declare maintain="write"'})

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place, graph, declared)
        self.maintain = "stream"

    def replay(self, events: Sequence[Event]) -> Plan[None]:
        return stream.replay(self, events)


# -- what keep= no longer holds ------------------------------------------------------------------------


def trim(rules: HistoryRows, now: dt.datetime, dry_run: bool) -> Plan[int]:
    """Remove the ended states beyond `keep=`, the oldest first. Returns their number."""
    keep = rules.declared.keep
    if isinstance(keep, dt.timedelta):
        return (yield from _trim_by_age(rules, {"valid_to": {"$ne": None, "$lte": now - keep}}, dry_run))
    return (yield from _trim_by_number(rules, keep, dry_run))


def _trim_by_age(rules: HistoryRows, aged: Raw, dry_run: bool) -> Plan[int]:
    if dry_run:
        return (yield from count_documents(rules.rows_collection, aged))
    removed, size = 0, rules.limits.history_trim_page
    while rows := (yield from find(rules.rows_collection, aged, {"_id": 1}, limit=size)):
        chosen = {"_id": {"$in": [row["_id"] for row in rows]}, **ENDED}
        removed += (yield from delete_many(rules.rows_collection, chosen)).deleted_count
    return removed


def _trim_by_number(rules: HistoryRows, keep: int, dry_run: bool) -> Plan[int]:
    removed = 0
    while True:
        documents = yield from _documents_beyond(rules, keep)
        if dry_run or not documents:
            beyond_all: int = sum(each["n"] - keep for each in documents)
            return removed + beyond_all
        for some in chunks(documents, rules.limits.history_trim_page):
            beyond = [{**rules.of(each["_id"]), "valid_from": {"$lt": each["kept"]}} for each in some]
            operations = [DeleteMany({**each, **ENDED}) for each in beyond]
            removed += (yield from bulk_write(rules.rows_collection, operations)).deleted_count


def _documents_beyond(rules: HistoryRows, keep: int) -> Plan[list[Raw]]:
    """Return documents with more than so many ended states, and the beginning of the oldest that is kept."""
    newest = {"$maxN": {"input": "$valid_from", "n": keep}}
    stages: list[Raw] = [
        {"$match": ENDED},
        {"$group": {"_id": "$document_id", "n": {"$sum": 1}, "kept": newest}},
        {"$match": {"n": {"$gt": keep}}},
        {"$limit": TRIMMED_DOCUMENTS_MAX},
        {"$set": {"kept": {"$min": "$kept"}}},
    ]
    return (yield from aggregate(rules.rows_collection, stages, allowDiskUse=True))
