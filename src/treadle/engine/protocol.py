"""The write protocol: what happens between a call of the Store and the commit.

A write that nothing follows is one plain command. Any other goes into a
commit: the caller's own transaction, or one that it may share with writes of
other threads and tasks (`Share`, which a runner performs), or one for each
chunk of a bulk write. A write that something larger stands in the way of lets
that finish first; a deletion that is too large for one commit does the
dependent documents first. What an earlier write could not finish is finished
before the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine import fan_outs
from treadle.engine.commit import Commit
from treadle.engine.index_check import IndexCheck
from treadle.engine.propagate import copy_to, feeds_beyond
from treadle.engine.work import Busy, ChunkedWork, Failed, NotAlone, Work, as_they_are_now
from treadle.errors import PartlyDone, TreadleError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.derived import CopyRule
from treadle.graph.graph import Graph
from treadle.graph.quarantine import around
from treadle.graph.rule import Due, ModelEntry
from treadle.model.text import get_logger
from treadle.plan import Plan, find, is_inside, server_facts, share
from treadle.plan.server_errors import is_bug, surely_not_committed

# How often a write lets something larger finish first.
GIVE_WAY_MAX = 20

R = TypeVar("R")

log = get_logger(__name__)


class WriteProtocol:
    """The writes of one Store, and what they left unfinished."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index_check = IndexCheck(graph)
        self._commit: Commit | None = None
        # Whether a write left something for recovery.
        self.unfinished = False

    # -- writes ----------------------------------------------------------------------------------

    def write(self, work: Work[R], *, combine: bool = True) -> Plan[R]:
        """Perform a write with all that follows from it."""
        yield from self._require_indexes(work)
        try:
            if work.entry.plain and work.alone:
                return work.result((yield from work.direct()))
            return (yield from self._patiently(work, combine))
        except NotAlone:
            if isinstance(work, ChunkedWork) and not (yield from is_inside()):
                raise
            return (yield from self._patiently(work, combine))

    def _require_indexes(self, work: Work[Any]) -> Plan[None]:
        """Refuse a write that relies on a missing unique index, before anything is sent."""
        if self.index_check.pending:
            yield from self.index_check.require(part.entry for part in work.parts)

    def _patiently(self, work: Work[R], combine: bool) -> Plan[R]:
        """The same for a work that may meet something larger, which is then finished first."""
        for _ in range(GIVE_WAY_MAX):
            try:
                return (yield from self._write(work, combine))
            except Busy as busy:
                if (yield from is_inside()):
                    raise
                yield from busy.finish()
        return (yield from self._write(work, combine))

    def _write(self, work: Work[R], combine: bool) -> Plan[R]:
        try:
            return (yield from self._whole(work, combine))
        except UsageError as error:
            if error.code != "cascade-too-large" or (yield from is_inside()):
                raise
            smaller = yield from work.smaller()
            if not smaller:
                raise
        for each in smaller:
            yield from self.write_chunks(each)
        return (yield from self._whole(work, combine))

    def _whole(self, work: Work[R], combine: bool) -> Plan[R]:
        if self._commit is None:
            yield from self._commit_here()
        if self.unfinished and not (yield from is_inside()):
            # What still cannot be finished is left to the next write.
            with contextlib.suppress(PyMongoError):
                yield from self.recover()
        if work.alone:
            outcome = yield from work.direct()
        else:
            outcome = yield from share(work, alone=not combine)
        if isinstance(outcome, Failed):
            raise outcome.error
        for part in work.parts:
            if (exposed := part.reveal()) and not (yield from is_inside()):
                outcome = yield from self._catch_up(part.entry, exposed, outcome, work.shows_document)
        return work.result(outcome)

    def _catch_up(self, entry: ModelEntry[Any], keys: Sequence[Any], outcome: Any, shown: bool) -> Plan[Any]:
        """Let new documents meet those that were made meanwhile and refer to them; the outcome now."""

        def copy(ledger: Changes) -> Plan[None]:
            for source in (yield from find(entry.collection, {"_id": {"$in": list(keys)}})):
                for rule in entry.feeding(CopyRule):
                    if rule.synced and rule.source.holds(source):
                        followed = feeds_beyond(rule.target, rule.level)
                        yield from copy_to(rule, rule.name_of(source), source, {}, followed, ledger)

        try:
            commit = yield from self._commit_here()
            yield from commit.mend(entry, keys)
            yield from commit.follow(copy)
            return (yield from as_they_are_now(entry, outcome)) if shown else outcome
        except Exception as error:
            # The write is committed; it must not seem to have failed.
            text = "%s: new documents may miss others that refer to them: %s"
            log.warning(text, entry.model.__name__, error, exc_info=is_bug(error))
            return outcome

    def write_chunks(self, work: ChunkedWork) -> Plan[int]:
        """Perform a bulk write, one commit per chunk of documents."""
        yield from self._require_indexes(work)
        if work.together or (yield from is_inside()):
            return (yield from self.write(work))
        if work.alone:
            with contextlib.suppress(NotAlone):
                return (yield from self.write(work))
        done = 0
        last: Any = None
        while keys := (yield from work.next_keys(last)):
            try:
                done += yield from self.write(work.within(keys), combine=False)
            except (TreadleError, OperationFailure) as error:
                # Of the last chunk nobody may know whether it was written.
                if not done or not surely_not_committed(error):
                    raise
                raise PartlyDone(work.entry.model.__name__, done, error) from error
            last = keys[-1]
        return done

    def commit(self, works: Sequence[Work[Any]], *, inside: bool = False) -> Plan[list[Any]]:
        """The outcomes of works that share one commit; or of one `inside` a transaction of the caller."""
        commit = self._commit or (yield from self._commit_here())
        if inside:
            (work,) = works
            return [(yield from commit.inside(work))]
        return (yield from commit.perform(works, self._left))

    def _commit_here(self) -> Plan[Commit]:
        """How to commit on this server, which is asked once what it can do."""
        if self._commit is None:
            self._commit = Commit(self.graph, (yield from server_facts()))
        return self._commit

    def forget_server(self) -> None:
        """Ask again what the server can do."""
        self._commit = None

    def _left(self) -> None:
        self.unfinished = True

    # -- recovery --------------------------------------------------------------------------------

    def recover(self) -> Plan[int]:
        """Finish what a crash left half done, in any process; how many such things there were."""
        if not self.graph.derives:
            return 0
        server = yield from server_facts()
        done = 0
        self.unfinished = False
        try:
            for rule in self.graph.rules:
                recovering = rule.run_due(Due("recover"))
                label, collection = rule.place.label, rule.target.collection
                done += (yield from around(label, collection, None, recovering)) or 0
            return done + (yield from fan_outs.recover(self.graph, server))
        except BaseException:
            self.unfinished = True
            raise
