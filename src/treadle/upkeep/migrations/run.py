"""One run of a migration: what it is to do, how it behaves, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo.errors import BulkWriteError

from treadle.engine.lease import Lease
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.limits import Limits
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Pace, Report
from treadle.graph.quarantine import SET_ASIDE, note_aside
from treadle.graph.versions import VersionChain
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import is_about_one_document
from treadle.query.keys import freeze
from treadle.upkeep.jobs import Throttle, check_throttle

# Documents set aside that are listed at a time.
MIGRATION_LISTED_MAX = 1_000


@dataclass(frozen=True)
class SetAside:
    """A document that could not be migrated, and why."""

    model: str
    document_id: Any
    reason: str


@dataclass(frozen=True)
class Sample:
    """What a migration would make of one document."""

    document_id: Any
    before: Raw
    after: Raw


@dataclass(frozen=True)
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
    throttle: Throttle = None
    retry: bool = False
    stop: Callable[[], bool] | None = None
    report: Report | None = None

    def sized(self, most: int) -> int:
        """How many documents to take at a time: where it is throttled, what may be done in a second."""
        if isinstance(self.report, Pace) and self.throttle is not None:
            return self.report.sized(min(most, self.batch))
        return most

    def check(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or not 1 <= self.batch <= 100_000:
            raise UsageError(
                f"batch={self.batch!r} is not a whole number from 1 to 100,000", code="migration-option"
            )
        check_throttle(self.throttle)


@dataclass(slots=True)
class Run:
    """One run over the documents of one model, kinds included."""

    graph: Graph
    server: Capabilities
    entry: ModelEntry
    chain: VersionChain
    scope: Raw
    to: int
    options: Options
    lease: Lease
    total: int = 0
    done: int = 0
    aside: int = 0
    # How many were left when it ended, where that was counted.
    left: int | None = None

    @property
    def limits(self) -> Limits:
        return self.entry.limits

    @property
    def label(self) -> str:
        """Under which name documents are set aside."""
        return f"migrate {self.chain.model.__name__}"

    @property
    def noted(self) -> Raw:
        """The condition for notes about documents that were set aside."""
        return {"_id.rule": self.label, "_id.collection": self.entry.collection}

    @property
    def key(self) -> str:
        return f"{self.chain.model.__name__}:{self.to}"

    @property
    def stale(self) -> Raw:
        """The condition that a document is of another version than the one to reach."""
        unlike: Raw = {"$ne": self.to} if self.to > 1 else {"$nin": [1, None]}
        return {**self.scope, self.chain.field: unlike}

    @property
    def followed(self) -> bool:
        """Whether other documents follow from what is written here."""
        return any(each.rules or each.effects.on_write for each in self.entry.kinds.root.kinds.related)


def make_run(graph: Graph, server: Capabilities, entry: ModelEntry, to: int | None, options: Options) -> Run:
    """The run that brings all documents of a model to a version."""
    options.check()
    chain = _require_versions(entry)
    lease = Lease(
        f"migrate:{entry.collection}", entry.limits.migration_lease_seconds, options.owner, options.is_dead
    )
    scope = dict(entry.targets.with_deleted.filter())
    return Run(graph, server, entry, chain, scope, _target(chain, to), options, lease)


def _require_versions(entry: ModelEntry) -> VersionChain:
    if not entry.versions.is_versioned:
        raise UsageError(
            f"{entry.model.__name__} has no version=, so there is nothing to migrate", code="version-invalid"
        )
    return entry.versions


def _target(chain: VersionChain, to: int | None) -> int:
    target = chain.written if to is None else to
    if isinstance(target, bool) or not isinstance(target, int) or not 1 <= target <= chain.highest:
        raise UsageError(
            f"{chain.model.__name__} cannot be migrated to version {target!r}; it has 1 to {chain.highest}",
            code="version-invalid",
        )
    # Before anything is changed: a step that has no way down.
    chain.ways(max(chain.current, target), target)
    return target


# -- what there is -------------------------------------------------------------------------------


def status(entry: ModelEntry) -> Plan[dict[int, int]]:
    """How many documents there are of each version; under 0 those whose version is none."""
    version: Raw = {"$ifNull": ["$_id", 1]}
    bounds = [{"$gte": [version, 1]}, {"$lt": [version, 2**31]}]
    whole = {"$and": [*bounds, {"$eq": [version, {"$trunc": version}]}]}
    # Each in its own condition: what is no number cannot be cut to a whole one.
    version = {"$cond": [{"$isNumber": version}, {"$cond": [whole, {"$toInt": version}, 0]}, 0]}
    rows = yield from aggregate(
        entry.collection,
        [
            {"$match": dict(entry.targets.with_deleted.filter())},
            # By the field itself first, which is several times quicker, so that few are left to judge.
            {"$group": {"_id": f"${_require_versions(entry).field}", "n": {"$sum": 1}}},
            {"$group": {"_id": version, "n": {"$sum": "$n"}}},
            {"$sort": {"_id": 1}},
        ],
    )
    return {row["_id"]: row["n"] for row in rows}


def set_aside(entry: ModelEntry) -> Plan[list[SetAside]]:
    """The documents that could not be migrated, the first thousand."""
    name = entry.versions.model.__name__
    noted = {"_id.rule": f"migrate {name}", "_id.collection": entry.collection}
    rows = yield from find(SET_ASIDE, noted, sort=[("_id", 1)], limit=MIGRATION_LISTED_MAX)
    return [SetAside(name, row["_id"]["key"], row["reason"]) for row in rows]


def put_aside(run: Run, key: Any, reason: str) -> Plan[None]:
    """Note a document that cannot be migrated, with the reason, and go on."""
    # Not one more where it was noted already.
    run.aside += yield from note_aside(run.label, run.entry.collection, key, reason, "migration-failed")


def write_each(run: Run, writes: Sequence[tuple[Any, Any]]) -> Plan[tuple[int, int]]:
    """Perform writes, each with the id of its document; how many matched, and how many were set aside."""
    operations = [write for _, write in writes]
    try:
        result = yield from bulk_write(run.entry.collection, operations, ordered=False)
        return result.matched_count, 0
    except BulkWriteError as error:
        details = error.details or {}
        if details.get("writeConcernErrors") or not is_about_one_document(error):
            raise
    refused = details.get("writeErrors", [])
    for each in refused:
        yield from put_aside(run, writes[each["index"]][0], str(each.get("errmsg")))
    return int(details.get("nMatched", 0)), len(refused)


def forget_settled(run: Run) -> Plan[None]:
    """Let go of notes about documents that are gone, or that have reached the version after all."""
    noted = {**run.noted, "as_text": None}
    most = MIGRATION_LISTED_MAX
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
