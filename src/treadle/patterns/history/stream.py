"""Histories that the worker writes: a row for each change that the server reports, by any program.

The server keeps documents as they were before and after each change, so no
state is missed, also where several followed each other quickly. Where the
server has not kept one (the worker was behind for longer than it keeps them),
the next row says so (`missed`).

A row that repair or a backfill writes begins in the middle of the stream. It
holds a number that is written into the document at the same time (`awaits`);
changes that arrive before that number's own event are older than the row, and
are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import UpdateOne

from treadle.engine.pages import by_ids
from treadle.graph.events import BEFORE, Event
from treadle.graph.rule import REVISION
from treadle.patterns.history.rows import HistoryRows
from treadle.patterns.history.track import MILLISECOND, Track, store, tracks_of
from treadle.plan import Plan, Raw, by_id, find_one_and_update
from treadle.query.keys import distinct, freeze
from treadle.query.paths import value_at


def bump(rules: HistoryRows, key: Any) -> Plan[int | None]:
    """Write a document, so that the stream tells where a row of this moment belongs. Returns its number."""
    document = yield from find_one_and_update(
        rules.target.collection, by_id(key), {"$inc": {REVISION: 1}}, projection={REVISION: 1}
    )
    return None if document is None else value_at(document, REVISION)


def replay(rules: HistoryRows, events: Sequence[Event]) -> Plan[None]:
    """Write the rows of these changes, which follow the rows that are stored."""
    events = net(events)
    images_missing = [event.key for event in events if event.kind == "update" and event.after is None]
    now = yield from by_ids(rules.target.collection, images_missing)
    tracks = yield from tracks_of(rules, distinct(event.key for event in events))
    for event in events:
        track = tracks[freeze(event.key)]
        if not _precedes(track, event):
            _take(track, event, now.get(freeze(event.key)))
    yield from store(rules, tracks.values())


def net(events: Sequence[Event]) -> list[Event]:
    """Return the changes with those that one transaction made to one document as one.

    They have one time, which no other change has. A transaction that is
    reported in two batches is two.
    """
    merged: dict[Any, Event | None] = {}
    for position, event in enumerate(events):
        time = event.raw.get("clusterTime")
        place = freeze(event.key), position if time is None else time
        first = merged.get(place)
        if first is None:
            # An insert that the transaction took back again may be followed by another.
            merged.pop(place, None)
            merged[place] = event
        elif event.kind == "delete" and first.kind == "insert":
            merged[place] = None
        else:
            merged[place] = Event(
                _net_kind(first, event), event.key, None, {**event.raw, BEFORE: first.before}
            )
    return [event for event in merged.values() if event is not None]


def _net_kind(first: Event, event: Event) -> str:
    if first.kind == "insert" and event.after is not None:
        return "insert"
    # A document that is inserted again was there before, which another event of the transaction told.
    return "replace" if event.kind == "insert" else event.kind


def _precedes(track: Track, event: Event) -> bool:
    """Whether an event is older than the row that repair wrote; the first later one ends its waiting."""
    last = track.last
    if last is None or "awaits" not in last:
        return False
    numbers = [value_at(each, REVISION) for each in (event.before, event.after) if each is not None]
    # Not only that very number: a transaction that wrote the document again is one event.
    if not any(isinstance(number, int) and number >= last["awaits"] for number in numbers):
        return True
    del last["awaits"]
    track.updates.append(UpdateOne(by_id(last["_id"]), {"$unset": {"awaits": 1}}))
    return False


def _take(track: Track, event: Event, now: Raw | None) -> None:
    """Follow one change; `now` is the document where the server did not keep what the change made."""
    before, after, missed = _own(track, event.before), _own(track, event.after), 0
    if event.kind == "update" and event.after is None:
        if now is None:
            # It is gone since; its deletion is another event.
            return
        after, missed = _own(track, now), 1
    same_state, state = track.rules.same_state, track.state
    if state is None or after is None:
        track.become(after, event.time, missed if track.last is not None else 0)
    elif not same_state(state, after):
        if before is not None and not same_state(state, before):
            # Nothing told how the document came to be what it was before this change.
            track.become(before, event.time - MILLISECOND, 1)
        track.become(after, event.time, missed)


def _own(track: Track, document: Raw | None) -> Raw | None:
    """Return a document if it is one of the model's own."""
    return document if document is not None and track.rules.target.targets.admits(document) else None
