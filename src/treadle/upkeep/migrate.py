"""Migrating whole collections in the background, up or down, while readers and writers continue.

One run at a time per collection, under a lease. It goes through the documents
in batches, in the order of `_id`, and writes a checkpoint into the lease after
each: a run that was stopped or killed continues from there. Nothing depends on
the checkpoint: a document that was migrated is not migrated again, and what
writers of another version left behind is found in a further pass.

Functions convert documents that are read and stored in one transaction.
Pipelines run on the server, by ranges of `_id`, where nothing follows from the
documents. A document that cannot be converted is quarantined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.engine import lease
from treadle.engine.lease import Lease
from treadle.engine.pages import by_ids
from treadle.engine.references import follow_own
from treadle.engine.salvage import divide
from treadle.engine.version_upgrade import store_converted
from treadle.engine.write_path import commit_changes
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.quarantine import SET_ASIDE, note_aside
from treadle.graph.stored_pages import chunks, matching, readable_page, starting_at
from treadle.graph.versions import Upgraded, VersionChain, Way
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    count_documents,
    delete_many,
    find,
    find_one,
    transact,
    update_many,
    wait,
)
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import is_about_one_document, message_of, translate
from treadle.query.keys import freeze
from treadle.upkeep.jobs import Job, Throttle, check_throttle

# Documents at a time where others follow.
BATCH_WITH_DEPENDENTS = 100
# Passes over a collection that is written concurrently, and the pause after one that could do nothing.
PASSES_MAX = 20
PAUSE_SECONDS = 0.05
# Documents that a dry run shows, and among which it looks for them.
SAMPLES = 3
SAMPLED_MAX = 100
# Quarantined documents that are listed at a time.
LISTED_MAX = 1_000


# -- results -------------------------------------------------------------------------------------


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


def status(entry: ModelEntry) -> Plan[dict[int, int]]:
    """Return the number of documents of each version; under 0 those whose version is not a version."""
    version: Raw = {"$ifNull": ["$_id", 1]}
    bounds = [{"$gte": [version, 1]}, {"$lt": [version, 2**31]}]
    whole = {"$and": [*bounds, {"$eq": [version, {"$trunc": version}]}]}
    # Each in a condition of its own: what is not a number cannot be truncated.
    number = {"$cond": [{"$isNumber": version}, {"$cond": [whole, {"$toInt": version}, 0]}, 0]}
    stages = [
        {"$match": dict(entry.targets.with_deleted.filter())},
        # By the field itself first, which is several times quicker, so that few are left to judge.
        {"$group": {"_id": f"${_require_versions(entry).field}", "n": {"$sum": 1}}},
        {"$group": {"_id": number, "n": {"$sum": "$n"}}},
        {"$sort": {"_id": 1}},
    ]
    return {row["_id"]: row["n"] for row in (yield from aggregate(entry.collection, stages))}


def set_aside(entry: ModelEntry) -> Plan[list[SetAside]]:
    """Return the documents that could not be migrated, the first thousand."""
    name = entry.versions.model.__name__
    rows = yield from find(SET_ASIDE, _quarantined(entry), sort=[("_id", 1)], limit=LISTED_MAX)
    return [SetAside(name, row["_id"]["key"], row["reason"]) for row in rows]


def _label(entry: ModelEntry) -> str:
    """Return the name under which documents are quarantined."""
    return f"migrate {entry.versions.model.__name__}"


def _quarantined(entry: ModelEntry) -> Raw:
    return {"_id.rule": _label(entry), "_id.collection": entry.collection}


def _require_versions(entry: ModelEntry) -> VersionChain:
    if not entry.versions.is_versioned:
        raise UsageError(
            f"{entry.model.__name__} has no version=, so there is nothing to migrate", code="version-invalid"
        )
    return entry.versions


# -- one run -------------------------------------------------------------------------------------


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

    def check(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or not 1 <= self.batch <= 100_000:
            raise UsageError(
                f"batch={self.batch!r} is not a whole number from 1 to 100,000", code="migration-option"
            )
        check_throttle(self.throttle)

    def sized(self, most: int) -> int:
        """Return how many documents to take at a time: where it is throttled, no more than in a second."""
        if isinstance(self.report, Pace) and self.throttle is not None:
            return self.report.sized(min(most, self.batch))
        return most


class Step(NamedTuple):
    """One step between two versions."""

    start: int
    reached: int
    way: Way


class Reached(NamedTuple):
    """How far a run has come: the last id, in a list, and the number of documents since the one before."""

    last: list[Any]
    number: int


@dataclass(slots=True)
class Run:
    """One run over the documents of one model, kinds included."""

    graph: Graph
    entry: ModelEntry
    to: int
    options: Options
    lease: Lease
    total: int = 0
    done: int = 0

    @property
    def chain(self) -> VersionChain:
        return self.entry.versions

    @property
    def scope(self) -> Raw:
        return dict(self.entry.targets.with_deleted.filter())

    @property
    def key(self) -> str:
        return f"{self.chain.model.__name__}:{self.to}"

    @property
    def outdated(self) -> Raw:
        """The condition that a document has another version than the one to reach."""
        other: Raw = {"$ne": self.to} if self.to > 1 else {"$nin": [1, None]}
        return {**self.scope, self.chain.field: other}

    @property
    def has_dependents(self) -> bool:
        """Whether other documents follow from what is written here."""
        return any(each.rules or each.effects.on_write for each in self.entry.kinds.root.kinds.related)

    @property
    def steps(self) -> list[Step]:
        """The steps from all other versions, in the order in which they are taken."""
        steps = self.chain.steps
        up = [Step(version, version + 1, steps[version].up) for version in range(1, self.to)]
        back = {version: step.back for version, step in steps.items() if version >= self.to}
        down = [Step(version + 1, version, way) for version, way in sorted(back.items(), reverse=True) if way]
        return [*up, *down]

    @property
    def is_on_server(self) -> bool:
        """Whether the server can convert the documents by itself."""
        return not self.has_dependents and not any(callable(step.way) for step in self.steps)


def perform(
    graph: Graph, server: Capabilities, entry: ModelEntry, to: int | None, dry_run: bool, options: Options
) -> Plan[Migrated]:
    """Bring all documents of a model to a version, or say what that would do."""
    server.require_transactions(f"migrate({entry.model.__name__})")
    options.check()
    chain = _require_versions(entry)
    held_seconds = entry.limits.migration_lease_seconds
    own_lease = Lease(f"migrate:{entry.collection}", held_seconds, options.owner, options.is_dead)
    run = Run(graph, entry, _target(chain, to), options, own_lease)
    return (yield from (_dry_run(run) if dry_run else _migrate(run)))


def _target(chain: VersionChain, to: int | None) -> int:
    target = chain.written if to is None else to
    if isinstance(target, bool) or not isinstance(target, int) or not 1 <= target <= chain.highest:
        raise UsageError(
            f"{chain.model.__name__} cannot be migrated to version {target!r}; it has 1 to {chain.highest}",
            code="version-invalid",
        )
    # Raises for a step that has no way down, before anything is changed.
    chain.ways(max(chain.current, target), target)
    return target


def _migrate(run: Run) -> Plan[Migrated]:
    if not (yield from run.lease.take()):
        held = yield from find_one(lease.COLLECTION, {"_id": run.lease.name})
        raise DataError(
            f"{run.entry.collection} is being migrated already, by "
            f"{(held or {}).get('owner', 'another process')}; wait for that run, or stop it",
            code="migration-running",
        )
    if isinstance(run.options.report, Job):
        run.options.report.tending = run.lease.renew
        run.options.report.stopping = run.options.stop
    try:
        left = yield from _passes(run)
    except Exception:
        yield from run.lease.release()
        raise
    yield from run.lease.release()
    remaining = left
    if remaining is None:
        remaining = yield from count_documents(run.entry.collection, run.outdated)
    yield from _forget_resolved(run)
    failures = tuple((yield from set_aside(run.entry)))
    return Migrated(run.entry.model.__name__, run.to, run.done, remaining, left is not None, failures)


def _passes(run: Run) -> Plan[int | None]:
    """Go through the documents until all that are left are quarantined. Returns their number, or None."""
    collection, quarantined = run.entry.collection, _quarantined(run.entry)
    # Whether a document whose id cannot be stored still exists, only a pass over all of them tells.
    yield from delete_many(SET_ASIDE, quarantined if run.options.retry else {**quarantined, "as_text": True})
    yield from _forget_resolved(run)
    last = None if run.options.retry else (yield from _checkpoint(run))
    if run.options.report:
        run.total = yield from count_documents(collection, run.outdated)
    for _ in range(PASSES_MAX):
        done_before = run.done
        if not (yield from _pass(run, last)):
            return None
        last = None
        yield from _set_checkpoint(run, None)
        most = yield from count_documents(SET_ASIDE, quarantined)
        left = yield from count_documents(collection, run.outdated, limit=most + 1)
        if left <= most:
            return left
        if run.done == done_before:
            # Writers of the other version were quicker everywhere.
            yield from wait(PAUSE_SECONDS)
    return None


def _pass(run: Run, last: list[Any] | None) -> Plan[bool]:
    """Migrate the documents after `last`. Returns False if the run was stopped on the way."""
    is_on_server = run.is_on_server
    while run.options.stop is None or not run.options.stop():
        reached = yield from _next(run, last, is_on_server)
        if reached is None:
            return True
        last = reached.last
        yield from _set_checkpoint(run, last)
        if run.options.report:
            done = min(run.done, run.total)
            run.options.report(Progress(run.entry.model.__name__, done, max(run.total, 1)))
        yield from resting(run.options.report, reached.number)
    return False


def _next(run: Run, last: list[Any] | None, is_on_server: bool) -> Plan[Reached | None]:
    """Migrate the next documents; None where there are no more."""
    if is_on_server and not (last is not None and isinstance(last[0], UndecodableId)):
        try:
            return (yield from _migrate_range(run, last))
        except Unreadable:
            # An id that cannot be decoded is no end of a range.
            pass
    return (yield from _migrate_batch(run, last))


def _checkpoint(run: Run) -> Plan[list[Any] | None]:
    """Return where the last run to the same version has stopped."""
    row = yield from find_one(lease.COLLECTION, {"_id": run.lease.name})
    progress = (row or {}).get("progress") or {}
    return progress.get("after") if progress.get("key") == run.key else None


def _set_checkpoint(run: Run, last: list[Any] | None) -> Plan[None]:
    """Hold the lease for longer, and store how far the run has come, in one write."""
    progress = {"key": run.key, "after": last, "done": run.done}
    yield from run.lease.renew({"progress": {"$literal": progress}})
    if not run.lease.held:
        raise DataError(
            f"the lease of the migration of {run.entry.collection} was lost to another run, which continues "
            "from here; this one has stopped",
            code="migration-running",
        )


# -- documents that could not be migrated ----------------------------------------------------------


def _quarantine(run: Run, key: Any, reason: str) -> Plan[None]:
    yield from note_aside(_label(run.entry), run.entry.collection, key, reason, "migration-failed")


def _among_quarantined(run: Run, keys: Raw) -> Plan[list[Any]]:
    """Return the keys of quarantined documents that meet a condition on their ids."""

    def row_id(key: Any) -> Raw:
        return {"rule": _label(run.entry), "collection": run.entry.collection, "key": key}

    chosen = {name: list(map(row_id, each)) if name == "$in" else row_id(each) for name, each in keys.items()}
    rows = yield from find(SET_ASIDE, {"_id": chosen}, {"_id.key": 1})
    return [row["_id"]["key"] for row in rows]


def _forget_resolved(run: Run) -> Plan[None]:
    """Delete the rows of documents that are gone, or that have reached the version after all."""
    chosen = {**_quarantined(run.entry), "as_text": None}
    while rows := (yield from find(SET_ASIDE, chosen, {"_id": 1}, sort=[("_id", 1)], limit=LISTED_MAX)):
        among = {"$and": [{"_id": {"$in": [row["_id"]["key"] for row in rows]}}, run.outdated]}
        left = {freeze(each["_id"]) for each in (yield from find(run.entry.collection, among, {"_id": 1}))}
        resolved = [row["_id"] for row in rows if freeze(row["_id"]["key"]) not in left]
        if resolved:
            yield from delete_many(SET_ASIDE, {"_id": {"$in": resolved}})
        chosen["_id"] = {"$gt": rows[-1]["_id"]}


# -- batches of documents ------------------------------------------------------------------------


def _migrate_batch(run: Run, last: list[Any] | None) -> Plan[Reached | None]:
    """Convert the next documents in transactions, with all that follows from them.

    A document that cannot be written undoes the whole transaction. The batch
    is halved until that document is alone, and quarantined.
    """

    def alone(raw: Raw, error: Exception) -> Plan[list[None]]:
        yield from _quarantine(run, raw["_id"], message_of(translate(error, run.chain.model.__name__)))
        return []

    batch = run.options.batch
    size = run.options.sized(min(batch, BATCH_WITH_DEPENDENTS) if run.has_dependents else batch)
    reading = matching(run.entry.collection, run.outdated, last, size)
    documents, reached = yield from readable_page(_label(run.entry), reading, last)
    if reached is None:
        return None
    quarantined = yield from _among_quarantined(run, {"$in": [each["_id"] for each in documents]})
    failed = set(map(freeze, quarantined))
    some = [each for each in documents if freeze(each["_id"]) not in failed]
    yield from divide(some, partial(_convert_together, run), alone)
    return Reached(reached, len(documents))


def _convert_together(run: Run, documents: Sequence[Raw]) -> Plan[list[None]]:
    """Convert documents in one transaction, and quarantine those for which a migration fails."""
    failed: list[tuple[Any, DataError]] = []
    chosen = {"$and": [{"_id": {"$in": [each["_id"] for each in documents]}}, run.outdated]}

    def convert() -> Plan[list[Raw]]:
        """Store the documents; returns them as they were."""
        outcome = yield from _converted(run, (yield from find(run.entry.collection, chosen)))
        failed[:] = outcome.failed
        befores, converted = outcome.pairs
        yield from store_converted(run.entry, befores, converted)
        return befores

    if run.has_dependents and run.to == run.chain.current:
        run.done += yield from commit_changes(run.graph, partial(_follow, run.entry, convert))
    else:
        # A document of an older version is the same as a source: nothing follows from the way down.
        run.done += len((yield from transact(convert)))
    for key, error in failed:
        yield from _quarantine(run, key, error.message)
    return []


def _converted(run: Run, documents: Sequence[Raw]) -> Plan[Upgraded]:
    if run.to == run.chain.current:
        return (yield from run.chain.upgrade(documents))
    return (yield from run.chain.convert(documents, run.to))


def _follow(entry: ModelEntry, convert: Callable[[], Plan[list[Raw]]], changes: Changes) -> Plan[int]:
    """Convert documents to the current version, and add their changes. Returns their number."""
    befores = yield from convert()
    if not befores:
        return 0
    stored = yield from by_ids(entry.collection, [each["_id"] for each in befores])
    current = [stored[freeze(each["_id"])] for each in befores]
    # The upgrade changed nothing that the model's own rules follow: snapshots stay.
    afters = yield from follow_own(entry.kinds.root, list(zip(current, current, strict=True)))
    yield from changes.add(entry, zip(befores, afters, strict=True))
    return len(befores)


# -- ranges of ids, on the server ------------------------------------------------------------------


def _migrate_range(run: Run, last: list[Any] | None) -> Plan[Reached | None]:
    """Let the server convert a range of documents, none of which is fetched."""
    # A range costs the client nothing but its two ends.
    is_default = run.options.batch == run.entry.limits.migration_batch
    size = run.options.sized(run.entry.limits.migration_range if is_default else run.options.batch)
    ends = yield from _range_ends(run.entry.collection, last, size)
    if ends is None:
        return None
    within, done_before = (yield from _range_filter(run.entry.collection, *ends, size)), run.done
    for step in run.steps:
        yield from _convert_range(run, within, step)
    return Reached([ends[1]], run.done - done_before)


def _range_ends(collection: str, last: list[Any] | None, size: int) -> Plan[tuple[Any, Any] | None]:
    """Return the first id after `last` and the last one of so many; None where there are no more."""
    ids, ascending = {"_id": 1}, [("_id", 1)]
    rows = yield from find(collection, {}, ids, sort=ascending, limit=2, **starting_at(last))
    starts = [each["_id"] for each in rows if last is None or freeze(each["_id"]) != freeze(last[0])]
    if not starts:
        return None
    from_start = starting_at([starts[0]])
    ends = yield from find(collection, {}, ids, sort=ascending, skip=size - 1, limit=1, **from_start)
    if not ends:
        ends = yield from find(collection, {}, ids, sort=[("_id", -1)], limit=1)
    return (starts[0], ends[0]["_id"]) if ends else None


def _range_filter(collection: str, start: Any, end: Any, size: int) -> Plan[Raw]:
    # NaN is before all numbers, but compares with none of them.
    if _bracket(start) == _bracket(end) and start == start:
        return {"_id": {"$gte": start, "$lte": end}}
    # A comparison ends where the type of the ids changes, so the ids are listed.
    rows = yield from find(collection, {}, {"_id": 1}, sort=[("_id", 1)], limit=size, **starting_at([start]))
    return {"_id": {"$in": [row["_id"] for row in rows]}}


def _bracket(identity: Any) -> str:
    number = isinstance(identity, (int, float)) and not isinstance(identity, bool)
    return "number" if number else type(identity).__name__


def _convert_range(run: Run, within: Raw, step: Step) -> Plan[None]:
    """Take one step with the documents of a range that have its version; quarantine those that fail."""
    # One without a version has version 1.
    conditions = [
        run.scope,
        {run.chain.field: {"$in": [1, None]} if step.start == 1 else {"$eq": step.start}},
    ]
    quarantined = yield from _among_quarantined(run, within["_id"])
    if quarantined:
        conditions.append({"_id": {"$nin": quarantined}})
    assert isinstance(step.way, list)
    pipeline = [*step.way, {"$set": {run.chain.field: {"$literal": step.reached}}}]
    chosen = {"$and": [within, *conditions]}
    try:
        converted = (yield from update_many(run.entry.collection, chosen, pipeline)).modified_count
    except OperationFailure as error:
        if not is_about_one_document(error):
            raise
        converted = yield from _convert_each(run, chosen, conditions, pipeline)
    if step.reached == run.to:
        run.done += converted


def _convert_each(run: Run, chosen: Raw, conditions: list[Raw], pipeline: list[Raw]) -> Plan[int]:
    """Convert documents so that one that fails does not stop the others. Returns the number converted."""
    converted = 0
    rows = yield from find(run.entry.collection, chosen, {"_id": 1}, sort=[("_id", 1)])
    for some in chunks([row["_id"] for row in rows], run.entry.limits.migration_batch):
        operations = [UpdateOne({"$and": [by_id(key), *conditions]}, pipeline) for key in some]
        try:
            result = yield from bulk_write(run.entry.collection, operations, ordered=False)
            converted += result.matched_count
        except BulkWriteError as error:
            details = error.details or {}
            if details.get("writeConcernErrors") or not is_about_one_document(error):
                raise
            converted += int(details.get("nMatched", 0))
            for refusal in details.get("writeErrors", []):
                yield from _quarantine(run, some[refusal["index"]], str(refusal.get("errmsg")))
    return converted


# -- a dry run -----------------------------------------------------------------------------------


def _dry_run(run: Run) -> Plan[Migrated]:
    """Return how many documents a run would convert, and what would become of some."""
    name, remaining = (
        run.chain.model.__name__,
        (yield from count_documents(run.entry.collection, run.outdated)),
    )
    failures: list[SetAside] = []
    try:
        rows = yield from find(run.entry.collection, run.outdated, sort=[("_id", 1)], limit=SAMPLED_MAX)
    except Unreadable as error:
        rows = error.documents
        failures += [SetAside(name, key, reason) for key, reason in error.failed]
    outcome = yield from _converted(run, rows)
    failures += [SetAside(name, key, str(error)) for key, error in outcome.failed]
    pairs = list(zip(*outcome.pairs, strict=True))[:SAMPLES]
    samples = tuple(Sample(before["_id"], before, after) for before, after in pairs)
    return Migrated(run.entry.model.__name__, run.to, 0, remaining, not remaining, tuple(failures), samples)
