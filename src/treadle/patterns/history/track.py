"""How a history's rows are written: by commits, by the worker, and by repair.

Rules:

1. Times are the server's. A state ends at least a millisecond after its
   beginning, whatever the clock does, and the next one begins at that very
   moment.
2. The row of a state is written in the commit that begins the state, and ended
   in the commit that ends it. Both write the document as well, so two writers
   of one document always conflict, and numbers have no holes.
3. Several writes of one document in a transaction of the caller make one
   state. A row that is seen inside the transaction, but not outside of it, is
   its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo import InsertOne, UpdateMany, UpdateOne

from treadle.graph.changes import Before, Change, Changes, NotRead
from treadle.graph.scope import Image
from treadle.graph.versions import given
from treadle.patterns.history.rows import OPEN, HistoryRows
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    delete_one,
    find,
    find_one,
    outside,
    update_many,
)
from treadle.query.keys import freeze

MILLISECOND = dt.timedelta(milliseconds=1)
# The time of a command, in all of its statements. So the end of a state and the beginning of the next
# agree if they are in one command.
NOW = "$$NOW"


@dataclass(slots=True)
class Track:
    """The newest row of one document, and what is to be written of its rows.

    Times are values, or `NOW` where all that is written goes into one command.
    """

    rules: HistoryRows
    id: Any
    # The newest row; None where the document has none.
    last: Raw | None = None
    # Updates of stored rows; those that end, each with what is set; new rows.
    updates: list[UpdateOne] = field(default_factory=list)
    ended: list[tuple[Any, Raw]] = field(default_factory=list)
    begun: list[Raw] = field(default_factory=list)
    # Whether `last` is as it was before the transaction under way.
    is_rewound: bool = False

    @property
    def is_open(self) -> bool:
        return self.last is not None and self.last["valid_to"] is None

    @property
    def state(self) -> Raw | None:
        """The state that holds, where it was read; None where the document does not exist."""
        return (self.last.get("document") or {}) if self.last is not None and self.is_open else None

    def become(self, after: Raw | None, at: Any, missed: int = 0) -> None:
        """Move to another state, or to none where the document is deleted."""
        if self.is_open:
            self._end(at, deleted=after is None)
        if after is not None:
            self._begin(after, at, missed)

    def adopt(self, document: Raw, at: Any) -> None:
        """Begin a state that was not recorded; the document is known to have had it until `at`."""
        last = self.last
        begins = last["valid_to"] if last is not None else _shortly_before(at)
        self._begin(document, begins, 0)

    def reopen(self) -> None:
        """Let the newest state hold again."""
        assert self.last is not None
        update = {"$set": {"valid_to": None}, "$unset": {"deleted": 1}}
        self.updates.append(UpdateOne(by_id(self.last["_id"]), update))
        self.last = {**self.last, "valid_to": None}

    def _begin(self, document: Raw, at: Any, missed: int) -> None:
        last = self.last
        if last is None:
            self.last = self.rules.row(self.id, 1, at, document)
        else:
            number, begins = last["revision"] + 1 + missed, _latest(at, last["valid_to"])
            self.last = self.rules.row(self.id, number, begins, document)
            if missed:
                self.last["missed"] = missed
        self.begun.append(self.last)

    def _end(self, at: Any, *, deleted: bool) -> None:
        last = self.last
        assert last is not None
        begins = last["valid_from"]
        # A state that begins at an expression is one that was adopted, before `at`.
        floor = begins + MILLISECOND if isinstance(begins, dt.datetime) else None
        sets = {"valid_to": _latest(at, floor), **({"deleted": True} if deleted else {})}
        last.update(sets)
        if not (self.begun and self.begun[-1] is last):
            self.ended.append((last["_id"], sets))


def _latest(at: Any, floor: Any) -> Any:
    """Return a time that is not before another."""
    if floor is None:
        return at
    if not isinstance(floor, dt.datetime):
        # The time of this very command.
        return floor
    return max(at, floor) if isinstance(at, dt.datetime) else {"$max": [at, floor]}


def _shortly_before(at: Any) -> Any:
    return at - MILLISECOND if isinstance(at, dt.datetime) else {"$subtract": [at, 1]}


def store(rules: HistoryRows, tracks: Iterable[Track]) -> Plan[None]:
    """Write what tracks hold: first the ends, since no document has two open rows."""
    tracks = list(tracks)
    operations: list[Any] = [each for track in tracks for each in track.updates]
    operations += _endings([each for track in tracks for each in track.ended])
    operations += [_insertion(row) for track in tracks for row in track.begun]
    if operations:
        yield from bulk_write(rules.rows_collection, operations)


def _endings(ended: Sequence[tuple[Any, Raw]]) -> list[UpdateMany]:
    """Return the updates that end rows, one for all that end in the same way."""
    alike: dict[str, tuple[Raw, list[Any]]] = {}
    for identity, sets in ended:
        alike.setdefault(repr(sets), (sets, []))[1].append(identity)
    return [UpdateMany({"_id": {"$in": ids}}, [{"$set": sets}]) for sets, ids in alike.values()]


def _insertion(row: Raw) -> Any:
    """Return the operation that stores a new row; an update where the server is to tell the times."""
    times = {name: row[name] for name in ("valid_from", "valid_to")}
    if all(time is None or isinstance(time, dt.datetime) for time in times.values()):
        return InsertOne(row)
    whole = {name: times.get(name, {"$literal": value}) for name, value in row.items()}
    return UpdateOne(by_id(row["_id"]), [{"$replaceWith": whole}], upsert=True)


def tracks_of(rules: HistoryRows, ids: Sequence[Any], *, whole: bool = True) -> Plan[dict[Any, Track]]:
    """Return the tracks of documents by their frozen ids, with the newest states if `whole`."""
    newest = yield from rules.newest(ids, whole=whole)
    return {freeze(key): Track(rules, key, newest.get(freeze(key))) for key in ids}


# -- commits -----------------------------------------------------------------------------------------


def record(rules: HistoryRows, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
    """Write the rows of the states that the changes of a commit end and begin."""
    changes = [change for change in changes if _matters(rules, change)]
    if not ledger.joined:
        changes = yield from _end_deleted(rules, changes)
    tracks = yield from _tracks_before(rules, changes, ledger)
    # Many rows are several commands, and are written as values, which is quicker.
    at: Any = (yield from _server_time(rules.rows_collection)) if len(changes) > 1 else NOW
    for change in changes:
        yield from _follow(tracks[freeze(change.id)], change, at)
    yield from store(rules, tracks.values())


def _end_deleted(rules: HistoryRows, changes: Sequence[Change]) -> Plan[list[Change]]:
    """End the open rows of deleted documents, which need not be read. Returns the other changes."""
    deleted = {freeze(each.id): each.id for each in changes if _own(rules, each.after) is None}
    ended = (yield from _end_unread(rules, deleted)) if deleted else set[Any]()
    return [each for each in changes if freeze(each.id) not in ended]


def _end_unread(rules: HistoryRows, ids: dict[Any, Any]) -> Plan[set[Any]]:
    """End the open rows of documents, given by frozen id. Returns the frozen ids of those that had one."""
    ended = set(ids)
    chosen: Raw = {"document_id": {"$in": list(ids.values())}, **OPEN}
    if len(ids) > 1:
        rows = yield from find(rules.rows_collection, chosen, {"document_id": 1})
        ended = {freeze(row["document_id"]) for row in rows}
        chosen = {"_id": {"$in": [row["_id"] for row in rows]}}
    sets = {"valid_to": {"$max": [NOW, {"$add": ["$valid_from", 1]}]}, "deleted": True}
    result = yield from update_many(rules.rows_collection, chosen, [{"$set": sets}])
    return ended if result.matched_count else set()


def _tracks_before(rules: HistoryRows, changes: Sequence[Change], ledger: Changes) -> Plan[dict[Any, Track]]:
    """Return the tracks of changed documents as they were before the commit."""
    stored = [
        each.id for each in changes if each.before is not None or not ledger.is_new_id(rules.target, each.id)
    ]
    whole = ledger.joined or any(isinstance(each.before, NotRead) for each in changes)
    tracks = {freeze(each.id): Track(rules, each.id) for each in changes}
    tracks |= yield from tracks_of(rules, stored, whole=whole)
    if ledger.joined:
        yield from _rewind(rules, tracks.values())
    return tracks


def _server_time(collection: str) -> Plan[dt.datetime]:
    """Return the server's time, in the transaction under way."""
    rows = yield from aggregate(collection, [*given([{}]), {"$set": {"now": NOW}}])
    now: dt.datetime = rows[0]["now"]
    return now


def _matters(rules: HistoryRows, change: Change) -> bool:
    """Whether a change may begin or end a state of this model; an upgrade does."""
    before, after = _own(rules, change.before), _own(rules, change.after)
    if not isinstance(before, Image) or not isinstance(after, Image):
        return before is not None or after is not None
    return before.outdated != after.outdated or not rules.same_state(before.document, after.document)


def _own(rules: HistoryRows, image: Before) -> Before:
    """Return an image if the model's own documents hold it; one that is soft-deleted they do not."""
    return image if not isinstance(image, Image) or rules.target.everything.holds(image) else None


def _follow(track: Track, change: Change, at: Any) -> Plan[None]:
    """Take a track from before a change to after it."""
    before, after = _own(track.rules, change.before), _own(track.rules, change.after)
    document = after.document if isinstance(after, Image) else None
    if track.is_rewound or isinstance(before, NotRead):
        if (yield from _has_state(track, document, at)):
            return
    elif before is None and track.is_open:
        # Another program deleted the document.
        track.become(None, at)
    elif before is not None and not track.is_open:
        track.adopt(before.document, at)
    track.become(document, at)


def _has_state(track: Track, document: Raw | None, at: Any) -> Plan[bool]:
    """Whether a document is in the state that it had; the newest row tells which that was."""
    state = track.state
    if state is None and not track.is_rewound:
        # No other transaction can have written the document since.
        images = yield from outside(lambda: track.rules.target.targets.find(by_id(track.id)))
        state = images[0].document if images else None
    is_same = state is not None and document is not None and track.rules.same_state(state, document)
    if state is not None and not is_same and not track.is_open:
        track.adopt(state, at)
    return is_same


def _rewind(rules: HistoryRows, tracks: Iterable[Track]) -> Plan[None]:
    """Bring tracks to where they were before the caller's transaction: its writes make one state."""
    newest = {track.last["_id"]: track for track in tracks if track.last is not None}
    chosen = {"_id": {"$in": list(newest)}}
    rows = yield from outside(lambda: find(rules.rows_collection, chosen, {"valid_to": 1}))
    committed = {row["_id"]: row.get("valid_to") for row in rows}
    for identity, track in newest.items():
        if track.is_open and identity not in committed:
            yield from _take_back(track)
        elif not track.is_open and identity in committed and committed[identity] is None:
            track.is_rewound = True
            track.reopen()


def _take_back(track: Track) -> Plan[None]:
    """Remove the row that this transaction has begun, and reopen the one that it ended for it."""
    own = track.last
    assert own is not None
    track.is_rewound = True
    yield from delete_one(track.rules.rows_collection, by_id(own["_id"]))
    earlier = {**track.rules.of(track.id), "revision": own["revision"] - 1}
    track.last = yield from find_one(track.rules.rows_collection, earlier)
    if track.last is not None:
        track.last.setdefault("valid_to", None)
        if track.last["valid_to"] == own["valid_from"] and not track.last.get("deleted"):
            track.reopen()
