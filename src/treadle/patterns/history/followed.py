"""Histories that the worker writes: a row for each change that the server tells of, whoever made it.

The server keeps documents as they were before and after each change, so that
no state is missed, also where several followed each other quickly. Where one
is missing all the same (the worker was behind for longer than the server
keeps them), the next row says so (`missed`).

A row that repair or the backfill writes begins in the middle of the stream.
It holds a number that is written into the document at the same time
(`awaits`); changes that come before that number's own event are older than
the row, and are passed over.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo import InsertOne, UpdateOne

from treadle.engine.pages import by_ids
from treadle.graph.events import BEFORE, Event
from treadle.graph.rule import REVISION
from treadle.patterns.history.rows import MILLISECOND, OPEN, HistoryRows
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one_and_update
from treadle.query.keys import freeze
from treadle.query.paths import value_at


def hold(rule: HistoryRows, key: Any) -> Plan[int | None]:
    """Really write a document, so that the stream tells where a row of this moment belongs; its number."""
    document = yield from find_one_and_update(
        rule.target.collection, by_id(key), {"$inc": {REVISION: 1}}, projection={REVISION: 1}
    )
    return None if document is None else value_at(document, REVISION)


def replay(rule: HistoryRows, events: Sequence[Event]) -> Plan[None]:
    """Write the rows of these changes, which follow those that are there."""
    events = net(events)
    ids = list({freeze(event.key): event.key for event in events}.values())
    blind = [event.key for event in events if event.kind == "update" and event.after is None]
    now = yield from by_ids(rule.target.collection, blind)
    chosen = {"document_id": {"$in": ids}, **OPEN}
    tracks = {freeze(key): _Track(rule, key) for key in ids}
    for row in (yield from find(rule.rows_collection, chosen)):
        tracks[freeze(row["document_id"])].last = row
    ended = [key for key in ids if tracks[freeze(key)].last is None]
    for frozen, row in (yield from rule.last_rows(ended)).items():
        tracks[frozen].last = row
        if row["valid_to"] is None:
            # Open all the same: somebody removed the field.
            whole = yield from find(rule.rows_collection, by_id(row["_id"]))
            tracks[frozen].last = {**row, **whole[0]}
    for event in events:
        tracks[freeze(event.key)].take(event, now.get(freeze(event.key)))
    operations = [each for track in tracks.values() for each in track.operations]
    if operations:
        yield from bulk_write(rule.rows_collection, operations)


def net(events: Sequence[Event]) -> list[Event]:
    """The changes with those that one transaction made to one document as one: nobody saw what lay between.

    They have one time, which no other change has. A transaction that is told
    of in two batches is two.
    """
    merged: list[Event | None] = []
    places: dict[Any, int] = {}
    for event in events:
        key, time = freeze(event.key), event.raw.get("clusterTime")
        at = places.get((key, time)) if time is not None else None
        first = merged[at] if at is not None else None
        if at is None or first is None:
            places[key, time] = len(merged)
            merged.append(event)
        elif event.kind == "delete" and first.kind == "insert":
            merged[at] = None
        else:
            kind = event.kind
            if first.kind == "insert" and event.after is not None:
                kind = "insert"
            elif kind == "insert":
                # It was there before, which another event of the transaction told.
                kind = "replace"
            merged[at] = Event(kind, event.key, None, {**event.raw, BEFORE: first.before})
    return [event for event in merged if event is not None]


@dataclass(slots=True)
class _Track:
    """The rows of one document, as its changes come by."""

    rule: HistoryRows
    key: Any
    last: Raw | None = None
    operations: list[Any] = field(default_factory=list)

    @property
    def state(self) -> Raw | None:
        """The state that holds."""
        return self.last["document"] if self.last is not None and self.last["valid_to"] is None else None

    def _held(self, document: Raw | None) -> Raw | None:
        return document if document is not None and self.rule.target.targets.admits(document) else None

    def take(self, event: Event, now: Raw | None) -> None:
        """Follow one change; `now` is the document where the server did not keep what the change made."""
        before, after, missed = self._held(event.before), self._held(event.after), 0
        if self.last is not None and "awaits" in self.last and not self._met(event):
            return
        if event.kind == "update" and event.after is None:
            if now is None:
                # It is gone since; its deletion is another event.
                return
            after, missed = self._held(now), 1
        state = self.state
        if after is None:
            if state is not None:
                self._end(event.time, gone=True)
            return
        if state is None:
            self._begin(event.time, after, missed)
        elif not self.rule.alike(state, after):
            if before is not None and not self.rule.alike(state, before):
                # Nobody told how it came to be what it was before this change.
                self._end(event.time - MILLISECOND)
                self._begin(event.time - MILLISECOND, before, 1)
            self._end(event.time)
            self._begin(event.time, after, missed)

    def _met(self, event: Event) -> bool:
        """Whether an event is the one that a row of repair belongs to, or comes after it."""
        assert self.last is not None
        numbers = [value_at(each, REVISION) for each in (event.before, event.after) if each is not None]
        # Not only the very number: a transaction that wrote the document again is one event.
        if not any(isinstance(number, int) and number >= self.last["awaits"] for number in numbers):
            return False
        del self.last["awaits"]
        self.operations.append(UpdateOne(by_id(self.last["_id"]), {"$unset": {"awaits": 1}}))
        return True

    def _end(self, time: dt.datetime, *, gone: bool = False) -> None:
        assert self.last is not None
        ends = max(time, self.last["valid_from"] + MILLISECOND)
        update = {"$set": {"valid_to": ends, **({"deleted": True} if gone else {})}}
        self.operations.append(UpdateOne(by_id(self.last["_id"]), update))
        self.last["valid_to"] = ends

    def _begin(self, time: dt.datetime, after: Raw, missed: int) -> None:
        revision, begins = 1, time
        if self.last is not None:
            revision = self.last["revision"] + 1 + missed
            begins = max(time, self.last["valid_to"])
        elif missed:
            missed = 0
        self.last = self.rule.row(self.key, revision, begins, after)
        if missed:
            self.last["missed"] = missed
        self.operations.append(InsertOne(self.last))
