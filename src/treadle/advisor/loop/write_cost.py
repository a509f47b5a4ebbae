"""What writes cost: without the patterns and with them, by representative writes at recorded rates.

The recording says how many documents of a collection were inserted, deleted, or changed in fields that a
pattern follows. Documents of the copy are changed in the same way on both copies, interleaved, and put back.
Clients write as they do; what the worker takes to follow is measured beside it, per document.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import perf_counter
from typing import Any, Literal, NamedTuple

from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.loop.answers import at
from treadle.advisor.loop.compare import Count, side
from treadle.advisor.loop.following import catch_up
from treadle.advisor.loop.perform import Row, reading_view
from treadle.advisor.loop.request_shape import condition_of
from treadle.advisor.loop.results import RequestResult
from treadle.advisor.loop.statistics import ratio
from treadle.advisor.loop.workload_file import MALFORMED, Request
from treadle.advisor.proposals import Draft
from treadle.store.blocking.store import Store

ROUNDS = 4
ROUNDS_MIN = 2
SECONDS_MAX = 2.0
# A worker does many writes in one batch, so what it takes per write is measured over many.
UNITS_MAX = 20
IDS_MAX = 200
IDLE_ROUNDS = 3
_NUMBER_MAX = 2**31 - 1

Kind = Literal["update", "insert", "delete"]
Times = list[list[float]]
Act = Callable[[Database[Row]], Any]


@dataclass(slots=True)
class WriteCounter:
    """Counts the documents that recorded writes concern; takes requests one by one."""

    # Per collection the fields that a pattern follows.
    watched: Mapping[str, set[str]]
    documents: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    changed: dict[str, Counter[str]] = field(default_factory=dict)
    ids: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, request: Request) -> None:
        """Look at the next request; one that no server understands, which is recorded too, is passed over."""
        with contextlib.suppress(*MALFORMED):
            self._take(request)

    def _take(self, request: Request) -> None:
        if request.is_read or request.collection not in self.watched:
            return
        kind = kind_of(request)
        if kind == "update":
            fields = changed_fields(request, self.watched[request.collection])
            if not fields:
                return
            self.changed.setdefault(request.collection, Counter()).update(fields)
        self.documents[request.collection, kind] += max(1, request.returned)
        identity = condition_of(request).get("_id")
        ids = self.ids.setdefault(request.collection, {})
        if identity is not None and not isinstance(identity, (Mapping, list)) and len(ids) < IDS_MAX:
            ids.setdefault(repr(identity), identity)


def kind_of(request: Request) -> Kind:
    if request.operation == "insert":
        return "insert"
    return "delete" if request.operation == "delete" or request.body.get("remove") else "update"


def changed_fields(request: Request, watched: set[str]) -> set[str]:
    """The followed fields that an update may change; all of them where it replaces or computes."""
    update = request.body.get("u", request.body.get("update"))
    if not isinstance(update, Mapping) or not next(iter(update), "").startswith("$"):
        return set(watched)
    paths = {str(path) for fields in update.values() if isinstance(fields, Mapping) for path in fields}
    return {other for other in watched if any(_overlap(path, other) for path in paths)}


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def watched_fields(draft: Draft) -> dict[str, set[str]]:
    """Per collection the fields whose change a draft's fields follow."""
    watched: dict[str, set[str]] = {}
    for each in draft.derived:
        of_source = each.of if each.operator == "copy" else (each.by, *each.of, *dict(each.sort))
        watched.setdefault(each.source, set()).update(set(of_source) - {"_id"})
        watched.setdefault(each.target, set()).update({each.by} if each.operator == "copy" else ())
    for index in draft.indexes:
        watched.setdefault(index.collection, set()).update(path for path, _ in index.keys)
    return watched


class Write(NamedTuple):
    """A change of one document, what makes it possible, and what takes it back."""

    prepare: Act
    change: Act
    restore: Act


def write_costs(
    before: Database[Any],
    store: Store,
    counted: WriteCounter,
    seconds: float,
    count: Count | None = None,
    rounds: int = ROUNDS,
) -> tuple[list[RequestResult], list[str]]:
    """What the recorded writes cost in both ways, and in words those that could not be measured."""
    bench = _Bench(reading_view(before), reading_view(store.database), store, count, rounds)
    bench.settle_idle()
    results: list[RequestResult] = []
    notes: list[str] = []
    for (collection, kind), number in sorted(counted.documents.items()):
        fields = sorted(counted.changed.get(collection, ())) if kind == "update" else []
        label = f"{collection}: {kind}" + (f" of {', '.join(fields)}" if fields else "")
        try:
            documents = bench.documents(collection, list(counted.ids.get(collection, {}).values()))
            writes = [
                each
                for each in (_write(collection, kind, one, fields, documents) for one in documents)
                if each
            ]
            if writes:
                results.append(bench.measure(label, writes, number, seconds))
                continue
            reason = "no document of the copy can be changed so"
        except PyMongoError as error:
            reason = f"the server refuses it ({type(error).__name__})"
        notes.append(f"{label}: {reason}.")
    return results, notes


def _write(
    collection: str, kind: Kind, document: Row, fields: Sequence[str], others: Sequence[Row]
) -> Write | None:
    """A representative write of a document; None where nothing in it can be changed."""
    own = {"_id": document["_id"]}

    def remove(database: Database[Row]) -> None:
        database[collection].delete_one(own)

    def insert(database: Database[Row]) -> None:
        database[collection].insert_one(dict(document))

    def nothing(database: Database[Row]) -> None:
        pass

    if kind == "delete":
        return Write(nothing, remove, insert)
    if kind == "insert":
        return Write(remove, insert, nothing)
    values = {path: _other(path, at(document, path), others) for path in fields}
    values = {path: value for path, value in values.items() if value is not None}
    if not values:
        return None
    former = {path: at(document, path) for path in values}
    return Write(
        nothing,
        lambda database: database[collection].update_one(own, {"$set": values}),
        lambda database: database[collection].update_one(own, {"$set": former}),
    )


def _other(path: str, value: Any, documents: Sequence[Row]) -> Any:
    """Another value of the same type; that of another document where only those are meaningful."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if abs(value) < _NUMBER_MAX else 0
    if isinstance(value, str):
        return f"{value}~"
    if isinstance(value, datetime) and value.year > 1:
        return value - timedelta(seconds=1)
    others = (at(each, path) for each in documents)
    return None if value is None else next((each for each in others if each not in (None, value)), None)


@dataclass(slots=True)
class _Bench:
    before: Database[Row]
    after: Database[Row]
    store: Store
    count: Count | None
    rounds: int
    followed: bool = False
    # What the worker takes to find that there is nothing to do.
    idle: float = 0.0

    def settle_idle(self) -> None:
        self.followed = any(rule.maintain == "stream" for rule in self.store.graph.rules)
        self.settle()
        if self.followed:
            self.idle = min(self.settle() for _ in range(IDLE_ROUNDS))

    def settle(self) -> float:
        """Let the worker apply everything that was written. Returns the seconds of its work."""
        return catch_up(self.store) if self.followed else 0.0

    def documents(self, collection: str, ids: Sequence[Any]) -> list[Row]:
        """Documents of the copy, those first that recorded writes name."""
        named = list(self.before[collection].find({"_id": {"$in": list(ids)}}, limit=UNITS_MAX))
        if len(named) < UNITS_MAX:
            others = {"_id": {"$nin": [each["_id"] for each in named]}}
            stages: list[Row] = [{"$match": others}, {"$sample": {"size": UNITS_MAX - len(named)}}]
            named += list(self.before[collection].aggregate(stages))
        return named

    def measure(self, label: str, writes: Sequence[Write], number: int, seconds: float) -> RequestResult:
        times, upkeep = self._rounds(writes)
        one, other = self._work(self.before, writes), self._work(self.after, writes)
        self.settle()
        return RequestResult(
            "write",
            label,
            f"the same write{'; the worker follows' if self.followed else ''}",
            number,
            number / max(seconds, 1e-9),
            len(writes),
            0,
            0,
            side(times[0], *one),
            side(times[1], *other),
            ratio(*times),
            "Measured with changes of documents of the copy.",
            upkeep * 1000 if self.followed else None,
        )

    def _rounds(self, writes: Sequence[Write]) -> tuple[tuple[Times, Times], float]:
        """Seconds by round and write, before and after, and what the worker takes per write."""
        times: tuple[Times, Times] = ([], [])
        upkeep: list[float] = []
        deadline = perf_counter() + SECONDS_MAX
        for number in range(self.rounds):
            if number >= ROUNDS_MIN and perf_counter() > deadline:
                break
            self._act([each.prepare for each in writes], self.before, self.after)
            taken: dict[str, list[float]] = {self.before.name: [], self.after.name: []}
            for place, write in enumerate(writes):
                # Each way is first in turn.
                ways = [self.before, self.after] if (number + place) % 2 == 0 else [self.after, self.before]
                for database in ways:
                    taken[database.name].append(_seconds(write.change, database))
            upkeep.append(max(0.0, self.settle() - self.idle) / len(writes))
            self._act([each.restore for each in writes], self.before, self.after)
            times[0].append(taken[self.before.name])
            times[1].append(taken[self.after.name])
        return times, statistics.median(upkeep)

    def _act(self, acts: Sequence[Act], *databases: Database[Row]) -> None:
        for database in databases:
            for act in acts:
                act(database)
        self.settle()

    def _work(self, database: Database[Row], writes: Sequence[Write]) -> tuple[float, float, float]:
        """Commands, documents examined and bytes answered per write, where that is counted."""
        if self.count is None:
            return 0.0, 0.0, 0.0
        self._act([each.prepare for each in writes], database)
        counted = self.count(database, lambda: [write.change(database) for write in writes])
        self._act([each.restore for each in writes], database)
        commands, examined, answered = (each / len(writes) for each in counted)
        return commands, examined, answered


def _seconds(act: Act, database: Database[Row]) -> float:
    start = perf_counter()
    act(database)
    return perf_counter() - start
