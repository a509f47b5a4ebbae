"""How far back reads go: the dates that they ask for; nothing here talks to a server.

A read is bounded where its filter names a date from which on it reads, or
documents by their ids, whose dates can be looked up. A read without a bound
may reach any document, and then nothing can be said about the collection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from treadle.advisor.facts import READS, CollectionFacts, Query
from treadle.advisor.relations import KEY_CLASSES

READS_MIN = 20
DOCUMENTS_MIN = 1_000
IDS_MAX = 2_000
TOUCHES = READS | {"update", "delete"}


@dataclass(slots=True)
class Reads:
    """The reads and updates of one collection so far."""

    total: int = 0
    unbounded: int = 0
    bounded: Counter[str] = field(default_factory=Counter)
    oldest: dict[str, datetime] = field(default_factory=dict)
    reach_seconds: dict[str, float] = field(default_factory=dict)
    ids: dict[Any, None] = field(default_factory=dict)

    def add(self, bounds: Mapping[str, datetime], ids: list[Any], moment: Any) -> None:
        self.total += 1
        if ids and len(self.ids) + len(ids) <= IDS_MAX:
            self.ids.update(dict.fromkeys(ids))
        elif not bounds:
            self.unbounded += 1
        for path, bound in bounds.items():
            self.bounded[path] += 1
            self.oldest[path] = min(bound, self.oldest.get(path, bound))
            if isinstance(moment, datetime):
                seconds = (_aware(moment) - bound).total_seconds()
                self.reach_seconds[path] = max(seconds, self.reach_seconds.get(path, seconds))


@dataclass(slots=True)
class Observer:
    """Sees every operation of a workload with its values, and keeps only how far back it goes."""

    collections: dict[str, Reads] = field(default_factory=dict)

    def see(self, query: Query, document: Mapping[str, Any]) -> None:
        if query.kind in TOUCHES:
            condition, newest = _condition(document.get("command"))
            bounds = {} if newest is None else {newest: _aware(document["ts"])} if "ts" in document else {}
            ids: list[Any] = []
            _collect(condition, bounds, ids)
            reads = self.collections.setdefault(query.collection, Reads())
            reads.add(bounds, ids, document.get("ts"))


def _condition(command: Any) -> tuple[Any, str | None]:
    """The filter of an operation; and the path of a date of which it reads only the newest."""
    command = command if isinstance(command, Mapping) else {}
    pipeline = command.get("pipeline")
    if isinstance(pipeline, list):
        first = pipeline[0] if pipeline and isinstance(pipeline[0], Mapping) else {}
        return first.get("$match"), None
    for name in ("filter", "query", "q"):
        if isinstance(command.get(name), Mapping) and command[name]:
            return command[name], None
    sort = command.get("sort")
    if isinstance(sort, Mapping) and command.get("limit") and list(sort.values())[:1] == [-1]:
        return {}, str(next(iter(sort)))
    return {}, None


def _collect(condition: Any, bounds: dict[str, datetime], ids: list[Any]) -> None:
    """The lower bounds of dates in a filter, and the ids that it names."""
    if not isinstance(condition, Mapping):
        return
    for name, value in condition.items():
        if name == "$and" and isinstance(value, list):
            for part in value:
                _collect(part, bounds, ids)
        elif name == "_id":
            ids += _ids(value)
        elif not str(name).startswith("$"):
            found = value
            if isinstance(value, Mapping):
                found = next((value[each] for each in ("$gte", "$gt", "$eq") if each in value), None)
            if isinstance(found, datetime):
                bounds[str(name)] = _aware(found)


def _ids(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = value.get("$in", value.get("$eq"))
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, KEY_CLASSES)]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def bounded_path(facts: CollectionFacts, reads: Reads) -> str | None:
    """The date by which all reads of a collection are bounded; None where one is not."""
    if reads.total < READS_MIN or reads.unbounded or facts.count < DOCUMENTS_MIN or facts.capped:
        return None
    paths = [
        path
        for path, _ in reads.bounded.most_common()
        if path in facts.fields and set(facts.fields[path].value_types) == {"date"}
    ]
    if not paths or reads.bounded[paths[0]] < sum(reads.bounded.values()):
        return None
    is_expiring = any(index.expires for index in facts.indexes)
    return None if is_expiring else paths[0]


def older_pipeline(path: str, oldest: datetime) -> list[dict[str, Any]]:
    """How many documents there are, and how many are older than all that is read."""
    is_older = {"$and": [{"$eq": [{"$type": f"${path}"}, "date"]}, {"$lt": [f"${path}", oldest]}]}
    return [
        {
            "$group": {
                "_id": None,
                "n": {"$sum": 1},
                "older": {"$sum": {"$cond": [is_older, 1, 0]}},
                "newest": {"$max": f"${path}"},
            }
        }
    ]
