"""`verify` as it is called: whole, by sample, since a moment, or on from where another one ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bson import Timestamp
from pymongo.errors import OperationFailure

from treadle.engine.pages import projection_of
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.rule import Rule
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, find
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import HISTORY_LOST
from treadle.query.keys import freeze
from treadle.upkeep import findings, jobs, validation
from treadle.upkeep.change_stream import (
    BEATS,
    CONTROLS,
    ChangeStream,
    operation_time,
)
from treadle.upkeep.closed_windows import NOT_YET, scheduled_bounds
from treadle.upkeep.dirty import Dirty, mark_targets
from treadle.upkeep.events import Watch
from treadle.upkeep.jobs import Job
from treadle.upkeep.verify import confirm, verify, within

# Events read at a time.
STATUS_EVENTS_PAGE = 10_000
# How long a read waits for events.
STATUS_AWAIT_MILLISECONDS = 100


def check(sample: float | None, since: datetime | None, resume: bool) -> None:
    """Refuse what cannot be meant."""
    numeric = isinstance(sample, (int, float)) and not isinstance(sample, bool)
    if sample is not None and not (numeric and 0 < sample <= 1):
        raise UsageError(f"sample={sample!r} is no part; 0.01 is one percent", code="verify-option")
    if since is not None and not isinstance(since, datetime):
        raise UsageError(f"since={since!r} is no datetime", code="verify-option")
    if (sample is not None) + (since is not None) + bool(resume) > 1:
        raise UsageError(
            "sample=, since= and resume= are three ways to verify; choose one", code="verify-option"
        )


def prove(
    graph: Graph,
    server: Capabilities,
    entries: Sequence[ModelEntry],
    job: Job,
    *,
    sample: float | None = None,
    since: datetime | None = None,
    resume: bool = False,
    is_dead: Callable[[str], bool],
) -> Plan[list[Finding]]:
    """The findings in these models; where they were is remembered."""
    found: list[Finding] = []
    whole = sample is None and since is None
    if resume:
        found = yield from _resume(graph, server, entries, job, is_dead)
    job.keeping = lambda some: findings.keep(graph, job.identity, some)
    yield from job.begin()
    try:
        if since is not None:
            found += yield from _verify_since(graph, server, entries, since)
        for entry in entries if since is None else ():
            if entry.model.__name__ not in job.finished:
                found += yield from verify(graph, server, [entry], job, sample)
                yield from job.model_done(entry.model.__name__)
        if since is None:
            found += yield from validation.findings(entries, sample)
    except Exception as error:
        if isinstance(error, jobs.Stopped):
            yield from job.end("stopped")
        else:
            yield from job.end_quietly(type(error).__name__)
        raise
    if resume:
        # The page at which the other one ended was looked at twice.
        found = list({(each.model, freeze(each.document_id), each.path): each for each in found}.values())
    # A user who may only read can verify all the same.
    with contextlib.suppress(OperationFailure):
        yield from findings.keep(graph, job.identity, found)
        counted: list[Raw] = []
        if whole:
            counted = yield from findings.note(entries, found)
            yield from findings.forget_older([entry.model.__name__ for entry in entries], job.identity)
        yield from job.end("done", _summary(found, sample, since), findings=counted)
    return found


def _summary(found: Sequence[Finding], sample: float | None, since: datetime | None) -> str:
    of = "" if sample is None else f" in a sample of {sample:g}"
    of += "" if since is None else f" since {since.isoformat()}"
    return f"{len(found)} finding{'' if len(found) == 1 else 's'}{of}"


def _resume(
    graph: Graph,
    server: Capabilities,
    entries: Sequence[ModelEntry],
    job: Job,
    is_dead: Callable[[str], bool],
) -> Plan[list[Finding]]:
    """Take over the row of the last verify that did not end; what it found and is still wrong."""
    if not (yield from jobs.take_over(job, is_dead)):
        return []
    begun = [entry for entry in entries if entry.model.__name__ in {*job.finished, *job.begun}]
    return (yield from findings.look_again(graph, server, begun, job=job.identity))


# -- since a moment -------------------------------------------------------------------------------


def _verify_since(
    graph: Graph, server: Capabilities, entries: Sequence[ModelEntry], since: datetime
) -> Plan[list[Finding]]:
    """The findings in what changed since a moment, and in what follows from that.

    The server's history tells it. Where it does not tell what a source fed
    before, everything that its rule maintains is looked at.
    """
    what = "verify(since=) reads the server's history and"
    server.require_transactions(what, code="streams-unavailable")
    if not server.streams:
        raise UsageError(
            f"{what} needs change streams, which this server does not have; verify everything, or a sample",
            code="streams-unavailable",
        )
    rules = [rule for entry in entries for rule in entry.rules]
    dirty = yield from _changed_since(graph, rules, server.pre_images, since)
    unknown = {rule.target for rule in [*dirty.upset, *dirty.blind]}
    found: list[Finding] = []
    targets, chosen = dirty.targets(), set(entries)
    for entry in entries:
        if entry in unknown:
            found += yield from verify(graph, server, [entry])
            continue
        bounds = yield from scheduled_bounds(entry)
        if bounds is NOT_YET:
            continue
        keys = [mark.key for mark in targets.get(entry, ())]
        for some in chunks(keys, entry.limits.verify_page):
            images = yield from entry.targets.find(
                entry.filter_for_keys(list(some)), projection=projection_of(entry)
            )
            documents = [image.document for image in images]
            computed = [each for each in documents if within(entry, each, bounds)]
            for exact, own in entry.kinds.split(computed):
                if exact in chosen:
                    found += yield from confirm(graph, server, exact, own)
    return found


def _changed_since(graph: Graph, rules: Sequence[Rule], pre_images: bool, since: datetime) -> Plan[Dirty]:
    """What the history since a moment makes dirty."""
    moment = since if since.tzinfo is not None else since.replace(tzinfo=UTC)
    watch, dirty, stream = Watch(graph, pre_images, only=rules), Dirty(), ChangeStream()
    until = yield from operation_time()
    place = {"token": None, "start": Timestamp(min(int(moment.timestamp()), until.time), 0)}
    try:
        yield from stream.open(watch.pipeline(place))
        while stream.cursor is not None:
            wait_seconds = STATUS_AWAIT_MILLISECONDS / 1000
            events = yield from stream.read(STATUS_EVENTS_PAGE, wait_seconds, raw=True)
            batch = [event for event in events if event["clusterTime"] <= until]
            for event in batch:
                if (event.get("ns") or {}).get("coll") not in (BEATS, CONTROLS):
                    watch.note(event, dirty)
            if not batch or len(batch) < len(events):
                break
    except OperationFailure as error:
        if error.code not in HISTORY_LOST:
            raise
        raise UsageError(
            f"the server's history does not reach back to {moment.isoformat()}; verify everything, or a "
            "shorter time",
            code="history-too-short",
        ) from None
    yield from stream.close()
    yield from mark_targets(dirty)
    for rule, changed in dirty.copies.items():
        for each in (yield from find(rule.target.collection, rule.targets_of(changed), {"_id": 1})):
            dirty.mark(rule.target, each["_id"])
    return dirty
