"""The write path: what happens between a call of the Store and its commit.

A write that nothing follows from is one plain command. Any other goes into a
commit: the caller's own transaction, or one that it may share with writes of
other threads and tasks (`Share`, which a runner performs), or one for each
chunk of a bulk write.

A commit applies the writes one after another, propagates their changes to
every target, and records. Fan-outs that are too large for one transaction
leave an intent in it and are finished afterwards. What an earlier commit could
not finish is finished before the next one. A deletion that is too large for
one commit deals with the dependent documents first.

A server without transactions has no derived data (`Graph.check_server`), so
that there each write is done by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine import fan_outs
from treadle.engine.copies import UNBOUNDED, FanOut, copy_sources
from treadle.engine.derive import DerivedValues, recompute
from treadle.engine.index_check import IndexCheck
from treadle.engine.pages import by_ids, next_ids
from treadle.engine.propagate import propagate, record
from treadle.engine.salvage import Contended, attempting, salvage
from treadle.engine.version_upgrade import check_lowering
from treadle.errors import PartlyDone, TreadleError, UsageError
from treadle.graph.changes import Changes, load_documents
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import around
from treadle.graph.rule import REVISION, Due, Rule
from treadle.graph.write import ChunkedWrite, CommitNeeded, Write
from treadle.model.lazy_id import publish_ids
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, is_inside, server_facts, share, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import DuplicateKey, is_about_one_document, is_bug, surely_not_committed
from treadle.query.keys import freeze

# How often a write is tried that meets a concurrent upsert.
ATTEMPTS_MAX = 20

R = TypeVar("R")

log = get_logger(__name__)


class WritePath:
    """The writes of one Store, and what they left unfinished."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index_check = IndexCheck(graph)
        # What the server can do; asked when it is first needed.
        self._server: Capabilities | None = None
        # Whether a write left something for recovery.
        self.unfinished = False

    # -- one write -------------------------------------------------------------------------------

    def execute(self, write: Write[R], *, alone: bool = False) -> Plan[R]:
        """Perform a write with all that follows from it; `alone`, in a commit that it does not share."""
        yield from self._require_indexes(write)
        for _ in range(ATTEMPTS_MAX):
            try:
                return (yield from self._execute(write, alone))
            except DuplicateKey as error:
                # An archived document is not updated.
                again = write.races and "archive" not in (error.details or {})
                # The server has ended a transaction of the caller.
                if not again or (yield from is_inside()):
                    raise
        return (yield from self._execute(write, alone))

    def _require_indexes(self, write: Write[Any]) -> Plan[None]:
        """Refuse a write that relies on a missing unique index, before anything is sent."""
        if self.index_check.pending:
            yield from self.index_check.require(part.entry for part in write.parts or [write])

    def _execute(self, write: Write[R], alone: bool) -> Plan[R]:
        try:
            return write.result((yield from self._outcome(write, alone)))
        except UsageError as error:
            if error.code != "cascade-too-large" or (yield from is_inside()):
                raise
            smaller = yield from write.smaller()
            if not smaller:
                raise
        for each in smaller:
            yield from self.execute_chunks(each)
        return write.result((yield from self._outcome(write, alone)))

    def _outcome(self, write: Write[Any], alone: bool) -> Plan[Any]:
        """What a write comes to, as a plain command or committed."""
        if self._server is None and not write.entry.effects.is_plain:
            # The first write that others follow also recovers what a crash left.
            yield from self._capabilities()
        if self.unfinished and not (yield from is_inside()):
            # What still cannot be finished is left to the next write.
            with contextlib.suppress(PyMongoError):
                yield from self.recover()
        command = write.command()
        if command is not None:
            with contextlib.suppress(CommitNeeded):
                outcome = yield from command
                return (yield from self._published(write, outcome))
        # Without transactions none is undone with the others.
        alone = alone or not (yield from self._capabilities()).transactions
        return (yield from self._published(write, (yield from share(write, alone=alone))))

    def _published(self, write: Write[Any], outcome: Any) -> Plan[Any]:
        """The outcome, when the write's new ids are visible to others."""
        for part in write.parts or [write]:
            known = publish_ids(part.reserved_ids)
            if known and not (yield from is_inside()):
                outcome = yield from self._catch_up(part.entry, known, outcome, write.shows_document)
        return outcome

    def _catch_up(self, entry: ModelEntry, ids: Sequence[Any], outcome: Any, shown: bool) -> Plan[Any]:
        """Propagate to documents written concurrently that refer to these new ones; the outcome now."""

        try:
            yield from repair(self.graph, entry, ids)
            yield from commit_changes(self.graph, partial(copy_sources, entry, ids))
            return (yield from _read_again(entry, outcome)) if shown else outcome
        except Exception as error:
            # The write is committed; it must not seem to have failed.
            text = "%s: new documents may miss others that refer to them: %s"
            log.warning(text, entry.model.__name__, error, exc_info=is_bug(error))
            return outcome

    # -- bulk writes -----------------------------------------------------------------------------

    def execute_chunks(self, write: ChunkedWrite) -> Plan[int]:
        """Perform a bulk write, one commit per chunk of documents. Returns their number."""
        if write.is_indivisible or (yield from is_inside()):
            return (yield from self.execute(write))
        yield from self._require_indexes(write)
        command = write.command()
        if command is not None:
            with contextlib.suppress(CommitNeeded):
                return write.result((yield from command))
        done = 0
        last: Any = None
        while ids := (yield from _next_ids(write, last)):
            try:
                done += yield from self.execute(write.within(ids), alone=True)
            except (TreadleError, OperationFailure) as error:
                # It is not known whether the last chunk was written.
                if not done or not surely_not_committed(error):
                    raise
                raise PartlyDone(write.entry.model.__name__, done, error) from error
            last = ids[-1]
        return done

    # -- commits ---------------------------------------------------------------------------------

    def commit(
        self, writes: Sequence[Write[Any]], *, inside: bool = False, attempts_max: int | None = None
    ) -> Plan[list[Any]]:
        """Return the outcomes of writes that share one commit; or of one write `inside` the caller's.

        Raises `Contended` after `attempts_max` attempts.
        """
        server = yield from self._capabilities()
        if inside:
            (write,) = writes
            changes = Changes(joined=True)
            outcome = yield from write.apply(changes)
            yield from propagate(self.graph, changes, copies_max=UNBOUNDED)
            return (yield from _final([write], [outcome]))
        if not server.transactions:
            (write,) = writes
            check_lowering(write.entry, server)
            return [(yield from write.apply(Changes(transactional=False)))]
        merged = merge(writes)
        attempt = _Attempt(self.graph, server, [write for write, _ in merged], attempts_max)
        try:
            outcomes, pending = yield from transact(attempt.perform)
        except Exception as error:
            if not attempt.is_applied or not is_about_one_document(error):
                raise
            # One copy cannot be written. Make the copies afterwards, where it can be quarantined.
            outcomes, pending = yield from transact(lambda: attempt.perform(copies_max=0))
        yield from self._finish(server, pending)
        return split(merged, outcomes)

    def _finish(self, server: Capabilities, pending: Sequence[tuple[FanOut, Raw]]) -> Plan[None]:
        """Carry out the fan-outs of a commit; those that fail are left to recovery."""
        for fan_out, intent in pending:
            try:
                yield from fan_outs.finish(self.graph, fan_out, intent)
            except Exception as error:
                # The writes are committed and the intent with them; they must not seem to have failed.
                label = fan_out.rule.place.label
                log.warning("%s: copies are pending: %s", label, error, exc_info=is_bug(error))
                self.unfinished = True

    def _capabilities(self) -> Plan[Capabilities]:
        """What this server can do, which is asked once."""
        if self._server is None:
            self._server = yield from server_facts()
        return self._server

    def forget_server(self) -> None:
        """Ask again what the server can do."""
        self._server = None

    # -- recovery --------------------------------------------------------------------------------

    def recover(self) -> Plan[int]:
        """Finish what a crash interrupted, in any process. Returns the number of such things."""
        if not self.graph.derives:
            return 0
        done = 0
        self.unfinished = False
        try:
            for rule in self.graph.rules:
                recovering = rule.run_due(Due("recover"))
                label, collection = rule.place.label, rule.target.collection
                done += (yield from around(label, collection, None, recovering)) or 0
            return done + (yield from fan_outs.recover(self.graph))
        except BaseException:
            self.unfinished = True
            raise


# -- one commit ----------------------------------------------------------------------------------


class _Attempt:
    """The body of a commit, which runs again after a conflict."""

    def __init__(
        self,
        graph: Graph,
        server: Capabilities,
        writes: Sequence[Write[Any]],
        attempts_max: int | None,
    ) -> None:
        self._graph = graph
        self._server = server
        self._writes = writes
        self._attempts = 0
        self._attempts_max = attempts_max
        # Whether the writes themselves have been applied, so that an error is about what follows.
        self.is_applied = False

    def perform(self, copies_max: int | None = None) -> Plan[tuple[list[Any], list[tuple[FanOut, Raw]]]]:
        """Apply the writes and propagate. Returns their outcomes, and the fan-outs that are left."""
        graph = self._graph
        self._attempts += 1
        if self._attempts_max is not None and self._attempts > self._attempts_max:
            raise Contended
        self.is_applied, changes, outcomes = False, Changes(), []
        for write in self._writes:
            outcomes.append((yield from write.apply(changes)))
            if len(self._writes) > 1:
                # Each is a write of its own, though they share a commit.
                yield from record(changes, [*graph.spreading, *graph.recording])
        self.is_applied = True
        later = yield from propagate(graph, changes, copies_max=copies_max)
        intents = (yield from fan_outs.record(later)) if later else []
        return (yield from _final(self._writes, outcomes)), list(zip(later, intents, strict=True))


def _final(writes: Sequence[Write[Any]], outcomes: Sequence[Any]) -> Plan[list[Any]]:
    """Read documents again that a write may have reached by way of others."""
    final = []
    for write, outcome in zip(writes, outcomes, strict=True):
        if (
            write.shows_document
            and write.entry.effects.may_affect_itself
            and isinstance(outcome, (dict, list))
        ):
            outcome = yield from _read_again(write.entry, outcome)
        final.append(outcome)
    return final


def _read_again(entry: ModelEntry, outcome: Any) -> Plan[Any]:
    """The documents of an outcome as they are now; one that is gone as it was."""
    documents = [outcome] if isinstance(outcome, dict) else outcome
    rows = yield from by_ids(entry.collection, [each["_id"] for each in documents])
    stored = [rows.get(freeze(each["_id"]), each) for each in documents]
    now = yield from load_documents(entry, stored)
    return now[0] if isinstance(outcome, dict) else now


def merge(writes: Sequence[Write[Any]]) -> list[tuple[Write[Any], list[Write[Any]]]]:
    """Each write with its parts: neighbours that can be one, such as inserts of one model, become one."""
    if len(writes) == 1:
        return [(writes[0], list(writes))]
    groups: list[tuple[Write[Any], list[Write[Any]]]] = []
    for write in writes:
        last, parts = groups[-1] if groups else (write, [])
        if parts and last.merges(write):
            groups[-1] = last.merged(write), [*parts, write]
        else:
            groups.append((write, [write]))
    return groups


def split(merged: Sequence[tuple[Write[Any], list[Write[Any]]]], outcomes: Sequence[Any]) -> list[Any]:
    """The outcome of each part, from those of merged writes."""
    shares: list[Any] = []
    for (write, parts), outcome in zip(merged, outcomes, strict=True):
        shares += [outcome] if len(parts) == 1 else write.shares(parts, outcome)
    return shares


def _next_ids(write: ChunkedWrite, last: Any) -> Plan[list[Any]]:
    """The ids of the next chunk of a bulk write, after the last one."""
    entry, chosen = write.entry, write.selector.filter
    divided = entry.versions.divide(chosen)
    condition = chosen if divided is None else entry.versions.candidates(divided)
    return (yield from next_ids(entry, condition, last, entry.limits.write_chunk))


# -- commits without a Store's call ----------------------------------------------------------------


def commit_changes(graph: Graph, body: Callable[[Changes], Plan[R]]) -> Plan[R]:
    """Run a body that writes documents and adds their changes, propagate these, and commit."""

    def attempt() -> Plan[R]:
        changes = Changes()
        outcome = yield from body(changes)
        yield from propagate(graph, changes, copies_max=UNBOUNDED)
        return outcome

    return (yield from transact(attempt))


def repair(
    graph: Graph, entry: ModelEntry, ids: Sequence[Any], without: frozenset[Rule] = frozenset()
) -> Plan[list[Any]]:
    """Recompute what these documents derive, and propagate it; returns the ids of those that changed.

    `without` some rules, whose values stay as they are.
    """
    chosen = DerivedValues.of(entry, None, without)

    def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
        def hold() -> Plan[None]:
            held = {**entry.filter_for_keys(some), **entry.targets.exact.filter()}
            yield from update_many(entry.collection, held, {"$inc": {REVISION: 1}})

        def body() -> Plan[list[Any]]:
            changes = Changes()
            changed = yield from recompute(chosen, some, changes, exact=True)
            yield from propagate(graph, changes, copies_max=UNBOUNDED)
            return changed

        return (yield from transact(attempting(body, hold, len(some))))

    return (yield from salvage(entry.model.__name__, entry.collection, ids, attempt))
