"""Migrating whole collections in the background, up or down, while readers and writers go on.

One run at a time per collection, under a lease. It goes through the documents
in batches, in the order of `_id`, and notes after each batch how far it came,
in the lease itself: a run that was stopped or killed is taken up from there.
Nothing depends on that note: a document that was migrated is not migrated
again, and what old writers left behind is found in another pass.

Functions work on documents that are fetched and stored in one transaction.
Pipelines run on the server, by ranges of `_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from treadle.engine import lease
from treadle.engine.pages import by_ids
from treadle.engine.references import follow_own
from treadle.engine.salvage import divide
from treadle.engine.version_upgrade import store_converted
from treadle.engine.write_path import commit_changes
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Progress, resting
from treadle.graph.quarantine import SET_ASIDE
from treadle.graph.stored_pages import matching, readable_page
from treadle.graph.versions import Upgraded
from treadle.plan import Plan, Raw, count_documents, delete_many, find, find_one, transact, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import message_of, translate
from treadle.query.keys import freeze
from treadle.upkeep.jobs import Job
from treadle.upkeep.migrations.ranges import migrate_range
from treadle.upkeep.migrations.run import (
    Migrated,
    Options,
    Run,
    Sample,
    SetAside,
    forget_settled,
    make_run,
    put_aside,
    set_aside,
)

# Documents at a time where others follow.
MIGRATION_FOLLOWED_BATCH = 100
# Passes over a collection that is written meanwhile.
MIGRATION_PASSES_MAX = 20
# Documents that a dry run shows.
MIGRATION_SAMPLES = 3
# Documents among which it looks for them.
MIGRATION_SAMPLED_MAX = 100
# The pause after a conflict.
MIGRATION_PAUSE_SECONDS = 0.005

# -- the run ------------------------------------------------------------------------------------


def migrate(run: Run) -> Plan[Migrated]:
    """Bring every document to the version asked for; what was done."""
    if not (yield from run.lease.take()):
        held = yield from find_one(lease.COLLECTION, {"_id": run.lease.name})
        raise DataError(
            f"{run.entry.collection} is being migrated already, by {(held or {}).get('owner', 'somebody')}; "
            "wait for that run, or stop it",
            code="migration-running",
        )
    if isinstance(run.options.report, Job):
        run.options.report.tending = run.lease.renew
        run.options.report.stopping = run.options.stop
    try:
        finished = yield from _passes(run)
    except Exception:
        yield from run.lease.release()
        raise
    yield from run.lease.release()
    remaining = run.left
    if remaining is None:
        remaining = yield from count_documents(run.entry.collection, run.stale)
    yield from forget_settled(run)
    listed = yield from set_aside(run.entry)
    mine = tuple(each for each in listed if each.model == run.chain.model.__name__)
    return Migrated(run.entry.model.__name__, run.to, run.done, remaining, finished, mine)


def _passes(run: Run) -> Plan[bool]:
    """Go through the documents until none is left; whether that is so."""
    # Of a document that has no name, only going over all of them tells whether it is still there.
    yield from delete_many(SET_ASIDE, run.noted if run.options.retry else {**run.noted, "as_text": True})
    yield from forget_settled(run)
    run.aside = yield from count_documents(SET_ASIDE, run.noted)
    row = yield from find_one(lease.COLLECTION, {"_id": run.lease.name})
    noted = (row or {}).get("progress") or {}
    last = noted.get("after") if noted.get("key") == run.key and not run.options.retry else None
    if run.options.report and not run.total:
        run.total = yield from count_documents(run.entry.collection, run.stale)
    for _ in range(MIGRATION_PASSES_MAX):
        before = run.done
        if not (yield from _pass(run, last)):
            return False
        last = None
        yield from _note(run, None)
        left = yield from count_documents(run.entry.collection, run.stale, limit=run.aside + 1)
        if left <= run.aside:
            run.left = left
            return True
        if run.done == before:
            # Writers of the other version were quicker everywhere; give them a moment.
            yield from wait(MIGRATION_PAUSE_SECONDS * 10)
    return False


def _pass(run: Run, last: list[Any] | None) -> Plan[bool]:
    """Once through the documents after `last`; False if it was to stop on the way."""
    ways = run.chain.steps.values()
    server_side = not run.followed and all(_is_pipeline(run, step) for step in ways)
    while True:
        if run.options.stop is not None and run.options.stop():
            return False
        reached = yield from _next(run, last, server_side)
        if reached is None:
            return True
        last, number = reached
        yield from _note(run, last)
        if run.options.report:
            done = min(run.done, run.total)
            run.options.report(Progress(run.entry.model.__name__, done, max(run.total, 1)))
        yield from resting(run.options.report, number)


def _next(run: Run, last: list[Any] | None, server_side: bool) -> Plan[tuple[list[Any], int] | None]:
    """Migrate the documents after `last`; on the server if that is possible."""
    if server_side and not (last is not None and isinstance(last[0], UndecodableId)):
        try:
            return (yield from migrate_range(run, last))
        except Unreadable:
            # An id that cannot be decoded is no end of a range.
            pass
    return (yield from _batch(run, last))


def _is_pipeline(run: Run, step: Any) -> bool:
    lowers = run.to < run.chain.current
    needed = step.from_version < run.to or lowers
    return not needed or (not callable(step.up) and (not lowers or isinstance(step.back, list)))


def _note(run: Run, last: list[Any] | None) -> Plan[None]:
    """Hold the lease for longer, and note how far the run has come; both in one write."""
    progress = {"key": run.key, "after": last, "done": run.done}
    yield from run.lease.renew({"progress": {"$literal": progress}})
    if not run.lease.held:
        raise DataError(
            f"the lease of the migration of {run.entry.collection} was lost to another run, which goes on "
            "from here; this one has stopped",
            code="migration-running",
        )


# -- batches of documents ------------------------------------------------------------------------


def _batch(run: Run, last: list[Any] | None) -> Plan[tuple[list[Any], int] | None]:
    """Migrate the next documents; the last id and their number, None where there are no more."""
    batch = run.options.batch
    size = run.options.sized(min(batch, MIGRATION_FOLLOWED_BATCH) if run.followed else batch)
    page = matching(run.entry.collection, run.stale, last, size)
    unread: list[Unreadable] = []
    fresh, reached = yield from readable_page(run.label, page, last, unread.append)
    if unread:
        run.aside = yield from count_documents(SET_ASIDE, run.noted)
    if reached is None:
        return None
    yield from _migrate(run, (yield from _without_set_aside(run, fresh)))
    return reached, len(fresh)


def _without_set_aside(run: Run, documents: Sequence[Raw]) -> Plan[list[Raw]]:
    if not run.aside:
        return list(documents)
    keys = [{"rule": run.label, "collection": run.entry.collection, "key": each["_id"]} for each in documents]
    rows = yield from find(SET_ASIDE, {"_id": {"$in": keys}}, {"_id": 1})
    known = {freeze(row["_id"]["key"]) for row in rows}
    return [each for each in documents if freeze(each["_id"]) not in known]


def _migrate(run: Run, documents: Sequence[Raw]) -> Plan[None]:
    """Convert documents and store them, in transactions; where others follow, with all that follows.

    A document that cannot be written undoes the whole transaction. The batch
    is halved until it stands alone, and is set aside.
    """

    def attempt(some: Sequence[Raw]) -> Plan[list[None]]:
        failures, changed = yield from _migrate_together(run, [each["_id"] for each in some])
        run.done += changed
        for key, reason in failures:
            yield from put_aside(run, key, reason)
        return []

    def alone(raw: Raw, error: Exception) -> Plan[list[None]]:
        reason = message_of(translate(error, run.chain.model.__name__))
        yield from put_aside(run, raw["_id"], reason)
        return []

    yield from divide(documents, attempt, alone)


def _migrate_together(run: Run, keys: Sequence[Any]) -> Plan[tuple[list[tuple[Any, str]], int]]:
    """Migrate documents in one transaction; those that cannot be, with the reasons, and how many were."""
    failures: list[tuple[Any, str]] = []

    def store() -> Plan[list[Raw]]:
        befores = yield from find(run.entry.collection, {"$and": [{"_id": {"$in": list(keys)}}, run.stale]})
        outcome = yield from _converted(run, befores)
        failures[:] = [(key, error.message) for key, error in outcome.failed]
        ready, converted = outcome.pairs
        yield from store_converted(run.entry, ready, converted)
        return ready

    if run.followed and run.to == run.chain.current:
        body = partial(_followed, run.entry, store)
        return failures, (yield from commit_changes(run.graph, body))
    # A document of an older version is the same as a source: nothing follows from the way down.
    return failures, len((yield from transact(store)))


def _followed(entry: ModelEntry, store: Callable[[], Plan[list[Raw]]], changes: Changes) -> Plan[int]:
    """Store documents in the current version, and add their changes. Returns their number."""
    befores = yield from store()
    if not befores:
        return 0
    now = yield from by_ids(entry.collection, [each["_id"] for each in befores])
    current = [now[freeze(each["_id"])] for each in befores]
    # The upgrade changed nothing that its own rules follow: values of a moment stay.
    afters = yield from follow_own(entry.kinds.root, list(zip(current, current, strict=True)))
    yield from changes.add(entry, zip(befores, afters, strict=True))
    return len(befores)


def _converted(run: Run, documents: Sequence[Raw]) -> Plan[Upgraded]:
    if run.to == run.chain.current:
        return (yield from run.chain.upgrade(documents))
    return (yield from run.chain.convert(documents, run.to))


# -- a look ahead ---------------------------------------------------------------------------------


def rehearse(run: Run) -> Plan[Migrated]:
    """What a run would do: how many documents, and what becomes of some of them."""
    remaining = yield from count_documents(run.entry.collection, run.stale)
    most = MIGRATION_SAMPLED_MAX
    samples: list[Sample] = []
    aside: list[SetAside] = []
    try:
        rows = yield from find(run.entry.collection, run.stale, sort=[("_id", 1)], limit=most)
    except Unreadable as error:
        rows = error.documents
        aside += [SetAside(run.chain.model.__name__, key, reason) for key, reason in error.failed]
    for raw, outcome in zip(rows, (yield from _converted(run, rows)).outcomes, strict=True):
        if isinstance(outcome, DataError):
            aside.append(SetAside(run.chain.model.__name__, raw["_id"], str(outcome)))
        elif len(samples) < MIGRATION_SAMPLES:
            samples.append(Sample(raw["_id"], raw, outcome))
    return Migrated(
        run.entry.model.__name__, run.to, 0, remaining, not remaining, tuple(aside), tuple(samples)
    )


def perform(
    graph: Graph,
    server: Capabilities,
    entry: ModelEntry,
    to: int | None,
    dry_run: bool,
    options: Options,
) -> Plan[Migrated]:
    """Migrate a model, or say what that would do."""
    server.require_transactions(f"migrate({entry.model.__name__})")
    run = make_run(graph, server, entry, to, options)
    return (yield from (rehearse(run) if dry_run else migrate(run)))
