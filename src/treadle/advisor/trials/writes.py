"""What recorded writes cost: as clients send them, and through the Store that keeps the pattern right.

Both ways run on copies, interleaved. A write that would change nothing, since
the copy was made after it, is preceded by one that is not timed: an inserted
document is removed first, a deleted one stored again, and a field that is set
gets another value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice
from time import perf_counter
from typing import Any

from bson import ObjectId
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.trials.answers import at, same
from treadle.advisor.trials.compare import Count, side
from treadle.advisor.trials.declared import Counter, Patterns
from treadle.advisor.trials.perform import Row, reading_view
from treadle.advisor.trials.results import RequestResult
from treadle.advisor.trials.statistics import ratio
from treadle.advisor.trials.units import Group, describe
from treadle.advisor.trials.workload_file import Request
from treadle.errors import TreadleError
from treadle.query.names import Unchecked
from treadle.store.blocking.store import Store

ROUNDS = 5
UNITS_MAX = 15
# How many increments are collected at a time when a counter is tried.
INCREMENTS = 200

Act = Callable[[], Any]


class NotTried(Exception):
    """A write that this cannot perform in both ways; says why."""


@dataclass(frozen=True, slots=True)
class Acts:
    """A write in both ways, and what comes before each without being timed."""

    before: Act
    after: Act
    prepare: Act


def counter_of(request: Request, counters: Sequence[Counter]) -> tuple[Counter, Any, Any] | None:
    """The counter that an update raises, the key, and by how much; None where it does anything else."""
    update, condition = request.body.get("u"), request.body.get("q")
    if request.operation != "update" or not isinstance(update, Mapping) or not isinstance(condition, Mapping):
        return None
    amounts = update.get("$inc")
    stamps = update.get("$set", {})
    others = set(update) - {"$inc", "$set", "$currentDate"}
    if others or not isinstance(amounts, Mapping) or len(amounts) != 1:
        return None
    if not all(isinstance(each, datetime) for each in stamps.values()):
        return None
    ((path, amount),) = amounts.items()
    for counter in counters:
        if (
            counter.collection == request.collection
            and counter.place == path
            and set(condition) == {counter.by}
        ):
            key = condition[counter.by]
            return None if isinstance(key, Mapping) else (counter, key, amount)
    return None


@dataclass(slots=True)
class WriteTrial:
    """Writes of one trial, on the copy without the pattern and on the one with it."""

    before: Database[Any]
    store: Store
    patterns: Patterns
    seconds: float
    count: Count | None = None
    rounds: int = ROUNDS
    borrowed: int = 0

    def run(self, groups: Sequence[Group]) -> tuple[list[RequestResult], list[str]]:
        results: list[RequestResult] = []
        notes: list[str] = []
        self.before = reading_view(self.before)
        for group in groups:
            try:
                results.append(self._group(group))
            except NotTried as reason:
                notes.append(f"{describe(group.units[0])}: {reason}.")
            except TreadleError as error:
                notes.append(f"{describe(group.units[0])}: Treadle refuses it ({error.code}).")
            except PyMongoError as error:
                notes.append(f"{describe(group.units[0])}: the server refuses it ({type(error).__name__}).")
        return results, notes

    def _group(self, group: Group) -> RequestResult:
        if counter_of(group.first, self.patterns.counters) is not None:
            return self._counted(group)
        acts: list[Acts] = []
        reasons: list[NotTried] = []
        for unit in group.units[:UNITS_MAX]:
            try:
                acts.append(self._acts(unit[0]))
            except NotTried as reason:
                reasons.append(reason)
        if not acts:
            raise reasons[0]
        one: list[list[float]] = []
        other: list[list[float]] = []
        for number in range(self.rounds):
            first: list[float] = []
            second: list[float] = []
            for place, act in enumerate(acts):
                act.prepare()
                ways = [(first, act.before), (second, act.after)]
                for times, perform in ways if (number + place) % 2 == 0 else reversed(ways):
                    times.append(_seconds(perform))
            one.append(first)
            other.append(second)
        counts = [self._work(acts, way) for way in ("before", "after")]
        for act in acts:
            # Counting the work of one way left the other behind.
            act.prepare()
            act.before()
            act.after()
        label = f"store.{_call(group.first)}({self.patterns.models[group.first.collection].__name__}, …)"
        return self._result(group, label, len(acts), 0, 0, (one, other), counts)

    def _work(self, acts: Sequence[Acts], way: str) -> tuple[float, float, float]:
        if self.count is None:
            return 0.0, 0.0, 0.0
        for act in acts:
            act.prepare()
        database = self.before if way == "before" else self.store.database
        counted = self.count(database, lambda: [getattr(act, way)() for act in acts])
        commands, examined, answered = (each / len(acts) for each in counted)
        return commands, examined, answered

    def _result(
        self,
        group: Group,
        label: str,
        tried: int,
        compared: int,
        different: int,
        times: tuple[list[list[float]], list[list[float]]],
        counts: Sequence[tuple[float, float, float]],
    ) -> RequestResult:
        one, other = times
        return RequestResult(
            "write",
            describe(group.units[0]),
            label,
            group.recorded,
            group.recorded / max(self.seconds, 1e-9),
            tried,
            compared,
            different,
            side(one, *counts[0]),
            side(other, *counts[1]),
            ratio(one, other),
        )

    # -- one write in both ways ------------------------------------------------------------------

    def _acts(self, request: Request) -> Acts:
        if request.collection not in self.patterns.models:
            raise NotTried("no model was made for its collection")
        if request.operation == "insert":
            return self._insert(request)
        if request.operation == "delete" or request.body.get("remove"):
            return self._delete(request)
        return self._update(request)

    def _document(self, request: Request, condition: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A document of the copy; any, where none matches."""
        collection = self.before[request.collection]
        document = collection.find_one(condition) if condition else None
        # Another one each time: two inserts of one document would meet.
        self.borrowed += 1
        for skipped in (self.borrowed, 0):
            if document is None:
                document = next(iter(collection.find().skip(skipped).limit(1)), None)
        if document is None:
            raise NotTried("the copy holds no document of the collection")
        return dict(document)

    def _load(self, request: Request, document: dict[str, Any]) -> Any:
        model = self.patterns.models[request.collection]
        try:
            return self.store.graph.entry(model).codec.load(dict(document))
        except (TreadleError, ValueError):
            raise NotTried("the document does not fit the model") from None

    def _insert(self, request: Request) -> Acts:
        given = request.body.get("document")
        document = dict(given) if isinstance(given, Mapping) else self._document(request)
        model = self.patterns.models[request.collection]
        collection = self.before[request.collection]
        if any(each.source == request.collection for each in self.patterns.readings):
            # A reading of a bucket is one more, under an id of its own.
            document.pop("_id", None)
            reading = self._load(request, {**document, "_id": ObjectId()})
            return Acts(
                lambda: collection.insert_one(dict(document)),
                lambda: self.store.insert(reading.model_copy(update={"id": ObjectId()})),
                lambda: None,
            )
        key = document.get("_id")
        loaded = self._load(request, document)

        def prepare() -> None:
            collection.delete_one({"_id": key})
            self.store.delete(model, Unchecked({"_id": key}))

        return Acts(
            lambda: collection.insert_one(dict(document)),
            lambda: self.store.insert(loaded.model_copy(deep=True)),
            prepare,
        )

    def _delete(self, request: Request) -> Acts:
        condition = request.body.get("q", request.body.get("query"))
        if (
            request.operation == "delete"
            and request.body.get("limit", 1) != 1
            and set(condition or {}) != {"_id"}
        ):
            raise NotTried("deletions of several documents are not tried")
        document = self._document(request, condition if isinstance(condition, Mapping) else None)
        model = self.patterns.models[request.collection]
        collection, key = self.before[request.collection], document["_id"]
        loaded = self._load(request, document)

        def prepare() -> None:
            if collection.find_one({"_id": key}, {"_id": 1}) is None:
                collection.insert_one(dict(document))
            if self.store.collection(model).find_one({"_id": key}, {"_id": 1}) is None:
                self.store.insert(loaded.model_copy(deep=True))

        return Acts(
            lambda: collection.delete_one({"_id": key}),
            lambda: self.store.delete(model, Unchecked({"_id": key})),
            prepare,
        )

    def _update(self, request: Request) -> Acts:
        body = request.body
        condition, update = body.get("q", body.get("query")), body.get("u", body.get("update"))
        if not isinstance(update, Mapping) or not isinstance(condition, Mapping):
            raise NotTried("updates by a pipeline are not tried")
        if body.get("arrayFilters"):
            raise NotTried("updates of chosen array elements are not tried")
        model, collection = self.patterns.models[request.collection], self.before[request.collection]
        if body.get("upsert") and collection.find_one(condition, {"_id": 1}) is None:
            raise NotTried("the copy does not hold what an upsert found or made")
        if not all(str(name).startswith("$") for name in update):
            return self._replacement(request, condition, update)
        many = bool(body.get("multi"))
        undone = _other_values(update.get("$set"), condition)

        def write(of: Any, change: Mapping[str, Any]) -> Any:
            return of.update_many(condition, change) if many else of.update_one(condition, change)

        def store(change: Mapping[str, Any]) -> Any:
            call = self.store.update_many if many else self.store.update
            return call(model, Unchecked(condition), Unchecked(change))

        def prepare() -> None:
            if undone:
                write(collection, {"$set": undone})
                store({"$set": undone})

        return Acts(lambda: write(collection, update), lambda: store(update), prepare)

    def _replacement(
        self, request: Request, condition: Mapping[str, Any], document: Mapping[str, Any]
    ) -> Acts:
        if set(condition) != {"_id"}:
            raise NotTried("replacements by another field than the id are not tried")
        model, collection = self.patterns.models[request.collection], self.before[request.collection]
        loaded = self._load(request, {**document, **condition})
        undone = _other_values(document, condition)

        def prepare() -> None:
            if undone:
                collection.update_one(condition, {"$set": undone})
                self.store.update(model, Unchecked(condition), Unchecked({"$set": undone}))

        return Acts(
            lambda: collection.replace_one(condition, dict(document)),
            lambda: self.store.replace(loaded.model_copy(deep=True)),
            prepare,
        )

    # -- counters --------------------------------------------------------------------------------

    def _counted(self, group: Group) -> RequestResult:
        """Increments one by one, against increments that are collected and written as sums."""
        found = [counter_of(unit[0], self.patterns.counters) for unit in group.units]
        raised = [each for each in found if each is not None]
        counter = raised[0][0]
        pairs = list(islice(cycle([(key, amount) for _, key, amount in raised]), INCREMENTS))
        collection = self.before[counter.collection]
        handle = self.store.counter(self.patterns.models[counter.collection], counter.name)
        updates = [unit[0].body["u"] for unit in group.units]

        def one_by_one() -> None:
            for (key, _), update in zip(pairs, cycle(updates), strict=False):
                collection.update_one({counter.by: key}, update)

        def collected() -> None:
            for key, amount in pairs:
                handle.add(key, amount)
            handle.flush()

        one: list[list[float]] = []
        other: list[list[float]] = []
        for number in range(self.rounds):
            ways = [(one, one_by_one), (other, collected)]
            for times, act in ways if number % 2 == 0 else reversed(ways):
                times.append([_seconds(act) / len(pairs)])
        counts = [(0.0, 0.0, 0.0)] * 2
        if self.count is not None:
            works = ((self.before, one_by_one), (self.store.database, collected))
            totals = [self.count(database, act) for database, act in works]
            counts = [(a / len(pairs), b / len(pairs), c / len(pairs)) for a, b, c in totals]
        keys = {repr(key): key for key, _ in pairs}
        different = sum(not self._agree(counter, key) for key in keys.values())
        label = f"{counter.collection}: counter of {counter.place}"
        return self._result(group, label, len(pairs), len(keys), different, (one, other), counts)

    def _agree(self, counter: Counter, key: Any) -> bool:
        rows = [
            database[counter.collection].find_one({counter.by: key}, {counter.place: 1}) or {}
            for database in (self.before, reading_view(self.store.database))
        ]
        return same(*(at(row, counter.place) for row in rows))


def _seconds(act: Act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


def _call(request: Request) -> str:
    if request.operation == "insert":
        return "insert"
    if request.operation == "delete" or request.body.get("remove"):
        return "delete"
    update = request.body.get("u", request.body.get("update"))
    if isinstance(update, Mapping) and not next(iter(update), "$").startswith("$"):
        return "replace"
    return "update_many" if request.body.get("multi") else "update"


def _other_values(fields: Any, condition: Mapping[str, Any]) -> Row:
    """Other values of the same types for the fields that an update sets; none for what its filter names."""
    if not isinstance(fields, Mapping):
        return {}
    others = {path: _other(value) for path, value in fields.items() if path not in condition}
    return {path: value for path, value in others.items() if value is not None}


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}~"
    return value - timedelta(seconds=1) if isinstance(value, datetime) else None
