"""Migrating whole collections in the background, up or down, while readers and writers go on.

One run at a time per collection, under a lease. It goes through the documents
in batches, in the order of `_id`, and notes after each batch how far it came,
in the lease itself: a run that was stopped or killed is taken up from there.
Nothing depends on that note: a document that was migrated is not migrated
again, and what old writers left behind is found in another pass.

Functions work on documents that are fetched, and write them back guarded
(`engine/convert.py`). Pipelines run on the server, by ranges of `_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bson
from pymongo.errors import OperationFailure

from treadle.engine import follow, lease
from treadle.engine.contention import in_pieces
from treadle.engine.convert import Converted, convert, encodable, guarded_write, stops_others, store_alone
from treadle.engine.pages import matching, readable_page
from treadle.engine.set_aside import SET_ASIDE
from treadle.errors import DataError, UsageError
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Progress, resting
from treadle.graph.pattern import Entry
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.encodable import ENCODING_ERRORS
from treadle.plan import Plan, Raw, count_documents, delete_many, find, find_one, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import is_about_one_document, message_of, translate
from treadle.upkeep.jobs import Job
from treadle.upkeep.migrations.ranges import migrate_range
from treadle.upkeep.migrations.run import (
    Migrated,
    Options,
    Run,
    Sample,
    SetAside,
    forget_settled,
    put_aside,
    runs,
    set_aside,
    write_each,
)

# Documents at a time where others follow.
MIGRATION_FOLLOWED_BATCH = 100
# Passes over a collection that is written meanwhile.
MIGRATION_PASSES_MAX = 20
# Attempts at a batch that others keep changing.
MIGRATION_ROUNDS_MAX = 10
# Documents that a dry run shows.
MIGRATION_SAMPLES = 3
# Documents among which it looks for them.
MIGRATION_SAMPLED_MAX = 100
# The pause after a conflict.
MIGRATION_PAUSE_SECONDS = 0.005
# Larger documents are sent alone after a refusal.
MIGRATION_LARGE_BYTES = 4 * 1024 * 1024

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
    mine = tuple(each for each in listed if each.model == run.lineage.model.__name__)
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
    ways = run.lineage.steps.values()
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
    lowers = run.to < run.lineage.current
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
    migrate_all = _migrate_followed if run.followed else _migrate
    yield from migrate_all(run, (yield from _without_set_aside(run, fresh)))
    return reached, len(fresh)


def _without_set_aside(run: Run, documents: Sequence[Raw]) -> Plan[list[Raw]]:
    if not run.aside:
        return list(documents)
    keys = [{"rule": run.label, "collection": run.entry.collection, "key": each["_id"]} for each in documents]
    rows = yield from find(SET_ASIDE, {"_id": {"$in": keys}}, {"_id": 1})
    known = {freeze(row["_id"]["key"]) for row in rows}
    return [each for each in documents if freeze(each["_id"]) not in known]


def _migrate(run: Run, documents: Sequence[Raw]) -> Plan[None]:
    """Convert documents and write them back; those that changed meanwhile again, a few times."""
    pending = list(documents)
    checked = False
    for attempt in range(MIGRATION_ROUNDS_MAX):
        converted = yield from _convertible(run, pending, checked)
        writes = [
            (each.before["_id"], write) for each in converted if (write := guarded_write(each)) is not None
        ]
        if not writes:
            return
        try:
            matched, refused = yield from write_each(run, writes)
        except (OperationFailure, *ENCODING_ERRORS) as error:
            # One of them is no BSON as it is, or too large; the whole batch was refused because of it.
            if checked or not stops_others(error):
                raise
            checked = True
            continue
        run.done += matched
        if matched + refused == len(writes):
            return
        keys = [each.before["_id"] for each in converted]
        pending = yield from find(run.entry.collection, {"$and": [{"_id": {"$in": keys}}, run.stale]})
        pending = yield from _without_set_aside(run, pending)
        yield from wait(MIGRATION_PAUSE_SECONDS * attempt)
    # Left for the next pass: somebody writes them all the time.


def _convertible(run: Run, documents: Sequence[Raw], checked: bool) -> Plan[list[Converted]]:
    """The documents that could be converted; the others are set aside."""
    converted: list[Converted] = []
    outcomes = yield from convert(run.entry, documents, run.to)
    for raw, outcome in zip(documents, outcomes, strict=True):
        if isinstance(outcome, DataError):
            yield from put_aside(run, raw["_id"], str(outcome))
        elif not checked or _plain(outcome, MIGRATION_LARGE_BYTES):
            converted.append(outcome)
        else:
            yield from _alone(run, outcome)
    return converted


def _plain(outcome: Converted, most: int) -> bool:
    """Whether a result can be sent with others."""
    try:
        sizes = [
            len(bson.encode(each, codec_options=CODEC_OPTIONS)) for each in (outcome.before, outcome.after)
        ]
    except ENCODING_ERRORS:
        return False
    return max(sizes) < most


def _alone(run: Run, outcome: Converted) -> Plan[None]:
    """Migrate a document by itself; it is set aside if that cannot be done either."""
    identity = outcome.before["_id"]
    try:
        run.done += yield from store_alone(run.entry, outcome, run.to)
    except DataError as error:
        yield from put_aside(run, identity, str(error))
    except (UsageError, OperationFailure, *ENCODING_ERRORS) as error:
        if isinstance(error, OperationFailure) and not is_about_one_document(error):
            raise
        reason = message_of(translate(error, run.lineage.model.__name__, [outcome.after]))
        yield from put_aside(run, identity, reason)


def _migrate_followed(run: Run, documents: Sequence[Raw]) -> Plan[None]:
    """The same where other documents follow: in a transaction, with all that follows from it.

    A document that cannot be written undoes the whole transaction. The batch
    is halved until it stands alone, and is set aside.
    """

    def attempt(some: Sequence[Raw], checked: bool = False) -> Plan[list[None]]:
        keys = [each["_id"] for each in some]
        try:
            failures, changed = yield from follow.perform(
                run.graph, run.server, run.entry, lambda: _followed_writes(run, keys, checked)
            )
        except ENCODING_ERRORS:
            if checked:
                raise
            return (yield from attempt(some, checked=True))
        run.done += changed
        for key in keys:
            if freeze(key) in failures:
                yield from put_aside(run, key, failures[freeze(key)])
        return []

    def alone(raw: Raw, error: Exception) -> Plan[list[None]]:
        reason = message_of(translate(error, run.lineage.model.__name__))
        yield from put_aside(run, raw["_id"], reason)
        return []

    yield from in_pieces(documents, attempt, alone)


def _followed_writes(
    run: Run, keys: list[Any], checked: bool
) -> Plan[tuple[list[Raw], list[Any], dict[Any, str]]]:
    """The documents that are to be migrated, their writes, and what cannot be written."""
    befores = yield from find(run.entry.collection, {"$and": [{"_id": {"$in": keys}}, run.stale]})
    writes, failures, changing = [], {}, []
    for raw, outcome in zip(befores, (yield from convert(run.entry, befores, run.to)), strict=True):
        try:
            if isinstance(outcome, DataError):
                raise outcome
            if checked:
                outcome.after = encodable(outcome.after, run.lineage.model)
        except (DataError, UsageError) as error:
            failures[freeze(raw["_id"])] = str(error)
            continue
        # A transaction notices other writers by itself.
        write = guarded_write(outcome, compare=False)
        if write is not None:
            writes.append(write)
            changing.append(raw)
    return changing, writes, failures


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
        aside += [SetAside(run.lineage.model.__name__, key, reason) for key, reason in error.failed]
    for raw, outcome in zip(rows, (yield from convert(run.entry, rows, run.to)), strict=True):
        if isinstance(outcome, DataError):
            aside.append(SetAside(run.lineage.model.__name__, raw["_id"], str(outcome)))
        elif len(samples) < MIGRATION_SAMPLES:
            samples.append(Sample(raw["_id"], raw, outcome.after))
    return Migrated(
        run.entry.model.__name__, run.to, 0, remaining, not remaining, tuple(aside), tuple(samples)
    )


def perform(
    graph: Graph, server: Capabilities, entry: Entry[Any], to: int | None, dry_run: bool, options: Options
) -> Plan[Migrated]:
    """Migrate a model, or say what that would do."""
    server.require_transactions(f"migrate({entry.model.__name__})")
    results: list[Migrated] = []
    for run in runs(graph, server, entry, to, options):
        results.append((yield from (rehearse(run) if dry_run else migrate(run))))
        if not results[-1].finished and not dry_run:
            break
    # Several runs of one model are shown as one.
    return Migrated(
        results[0].model,
        results[0].to,
        sum(each.migrated for each in results),
        sum(each.remaining for each in results),
        all(each.finished for each in results),
        tuple(one for each in results for one in each.set_aside),
        tuple(one for each in results for one in each.samples)[:MIGRATION_SAMPLES],
    )
