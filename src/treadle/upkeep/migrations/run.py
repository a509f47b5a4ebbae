"""One run of a migration: what it is to do, how it behaves, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treadle.engine.set_aside import SET_ASIDE
from treadle.errors import UsageError
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.limits import Limits
from treadle.graph.pattern import Entry
from treadle.graph.reports import Report
from treadle.graph.versions import Lineage
from treadle.plan import Plan, Raw, aggregate, delete_many, find, update_one
from treadle.plan.capabilities import Capabilities


@dataclass(frozen=True, slots=True)
class SetAside:
    """A document that could not be migrated, and why."""

    model: str
    document_id: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What a migration would make of one document."""

    document_id: Any
    before: Raw
    after: Raw


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a run did, or with `dry_run` would do."""

    model: str
    to: int
    migrated: int
    remaining: int
    finished: bool
    set_aside: tuple[SetAside, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(slots=True)
class Options:
    """How a run behaves."""

    owner: str
    is_dead: Callable[[str], bool]
    batch: int
    throttle: float | None = None
    retry: bool = False
    stop: Callable[[], bool] | None = None
    report: Report | None = None

    def sized(self, most: int) -> int:
        """How many documents to take at a time: where it is throttled, what may be done in a second."""
        if self.throttle is None:
            return most
        return max(1, int(min(most, self.batch, self.throttle)))

    def check(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or not 1 <= self.batch <= 100_000:
            raise UsageError(
                f"batch={self.batch!r} is not a whole number from 1 to 100,000", code="migration-option"
            )
        if self.throttle is not None and not self.throttle > 0:
            raise UsageError(
                f"throttle={self.throttle!r} is not a number of documents per second", code="migration-option"
            )


@dataclass(slots=True)
class Run:
    """One run over the documents of one class, or of several that share their migrations."""

    graph: Graph
    server: Capabilities
    entry: Entry[Any]
    lineage: Lineage
    scope: Raw
    to: int
    options: Options
    token: int = 0
    total: int = 0
    done: int = 0
    aside: int = 0
    # How many were left when it ended, where that was counted.
    left: int | None = None

    @property
    def limits(self) -> Limits:
        return self.entry.limits

    @property
    def name(self) -> str:
        return f"migrate:{self.entry.collection}"

    @property
    def single(self) -> bool:
        """Whether each write stands for itself: guarded by itself, and not undone with others."""
        return not self.server.transactions

    @property
    def label(self) -> str:
        """Under which name documents are set aside."""
        return f"migrate {self.lineage.model.__name__}"

    @property
    def key(self) -> str:
        return f"{self.lineage.model.__name__}:{self.to}"

    @property
    def stale(self) -> Raw:
        """The condition that a document is of another version than the one to reach."""
        unlike: Raw = {"$ne": self.to} if self.to > 1 else {"$nin": [1, None]}
        return {**self.scope, self.lineage.field: unlike}

    @property
    def followed(self) -> bool:
        """Whether other documents follow from what is written here."""
        related = self.entry.root.related
        return any(each.rules or each.feeds for each in related)


def runs(
    graph: Graph, server: Capabilities, entry: Entry[Any], to: int | None, options: Options
) -> list[Run]:
    """The runs that bring all documents of a model to a version; classes with the same steps share one."""
    options.check()
    members = [each for each in [entry, *entry.below] if each.lineage is not None]
    if not members:
        raise UsageError(
            f"{entry.model.__name__} has no version=, so there is nothing to migrate", code="version-invalid"
        )
    groups: dict[Any, list[Entry[Any]]] = {}
    for each in members:
        assert each.lineage is not None
        lineage = each.lineage
        same = (lineage.current, lineage.written, *map(id, lineage.steps.values()))
        groups.setdefault(same, []).append(each)
    made = []
    for group in groups.values():
        chosen = group[0].lineage
        assert chosen is not None
        target = _target(chosen, to)
        scopes = [each.exactly for each in group]
        scope: Raw = scopes[0] if len(scopes) == 1 else {"$or": scopes}
        if any(each is entry for each in group) and len(group) == len([entry, *entry.below]):
            scope = dict(entry.scope)
        made.append(Run(graph, server, entry, chosen, scope, target, options))
    return made


def _target(lineage: Lineage, to: int | None) -> int:
    target = lineage.written if to is None else to
    highest = max([lineage.current, *(version + 1 for version in lineage.steps)])
    if isinstance(target, bool) or not isinstance(target, int) or not 1 <= target <= highest:
        raise UsageError(
            f"{lineage.model.__name__} cannot be migrated to version {target!r}; it has 1 to {highest}",
            code="version-invalid",
        )
    # Before anything is changed: a step that has no way down.
    lineage.ways(max(lineage.current, target), target)
    return target


# -- what there is -------------------------------------------------------------------------------


def status(entry: Entry[Any]) -> Plan[dict[int, int]]:
    """How many documents there are of each version."""
    members = [each for each in [entry, *entry.below] if each.lineage is not None]
    if not members:
        raise UsageError(f"{entry.model.__name__} has no version=", code="version-invalid")
    assert members[0].lineage is not None
    version = {"$ifNull": [f"${members[0].lineage.field}", 1]}
    rows = yield from aggregate(
        entry.collection,
        [
            {"$match": dict(entry.scope)},
            {"$group": {"_id": version, "n": {"$sum": 1}}},
            {"$sort": {"_id": 1}},
        ],
    )
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["_id"]] = counts.get(row["_id"], 0) + row["n"]
    return counts


def set_aside(entry: Entry[Any]) -> Plan[list[SetAside]]:
    """The documents that could not be migrated, the first thousand."""
    names = {f"migrate {each.model.__name__}": each for each in [entry, *entry.below]}
    rows = yield from find(
        SET_ASIDE,
        {"_id.rule": {"$in": list(names)}, "_id.collection": entry.collection},
        sort=[("_id", 1)],
        limit=entry.limits.migration_listed_max,
    )
    return [
        SetAside(names[row["_id"]["rule"]].model.__name__, row["_id"]["key"], row["reason"]) for row in rows
    ]


def put_aside(run: Run, key: Any, reason: str) -> Plan[None]:
    """Note a document that cannot be migrated, with the reason, and go on."""
    noted = yield from update_one(
        SET_ASIDE,
        {"_id": {"rule": run.label, "collection": run.entry.collection, "key": key}},
        {"$set": {"reason": reason[:500]}, "$currentDate": {"at": True}},
        upsert=True,
    )
    # Not one more where it was noted already.
    run.aside += noted.upserted_id is not None


def beginning_after(last: list[Any] | None) -> Raw:
    """What makes a find begin at an id, whatever types the ids have.

    The id stands in a list, because it may itself be null; None is the beginning.
    """
    return {} if last is None else {"min": {"_id": last[0]}, "hint": [("_id", 1)]}


def forget_settled(run: Run) -> Plan[None]:
    """Let go of notes about documents that are gone, or that have reached the version after all."""
    noted: Raw = {"_id.rule": run.label, "_id.collection": run.entry.collection}
    most = run.limits.migration_listed_max
    while True:
        rows = yield from find(SET_ASIDE, noted, {"_id": 1}, sort=[("_id", 1)], limit=most)
        if not rows:
            return
        keys = [row["_id"]["key"] for row in rows]
        chosen = {"$and": [{"_id": {"$in": keys}}, run.stale]}
        left = {freeze(each["_id"]) for each in (yield from find(run.entry.collection, chosen, {"_id": 1}))}
        settled = [row["_id"] for row in rows if freeze(row["_id"]["key"]) not in left]
        if settled:
            yield from delete_many(SET_ASIDE, {"_id": {"$in": settled}})
        noted["_id"] = {"$gt": rows[-1]["_id"]}
