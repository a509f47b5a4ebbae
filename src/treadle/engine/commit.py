"""Committing several writes in one transaction, with what they do to other documents done once.

The bodies of the works run one after another, then every affected target
follows, then the transaction commits. Fan-outs that are too large for one
transaction leave an intent in it and are finished afterwards.

A server without transactions has no derived data (`Graph.check_server`), so
that there each write is done by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from treadle.engine import fan_outs
from treadle.engine.propagate import UNBOUNDED, FanOut, propagate, record
from treadle.engine.recompute import Recomputation
from treadle.engine.rewrite import rewrite
from treadle.engine.salvage import attempting, salvage
from treadle.engine.work import Failed, Work, as_they_are_now
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.rule import REVISION, ModelEntry, Rule
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import is_about_one_document, is_bug

R = TypeVar("R")

log = get_logger(__name__)


class Commit:
    """How writes and what follows from them happen together."""

    def __init__(self, graph: Graph, server: Capabilities) -> None:
        self.graph = graph
        self.server = server

    def perform(self, works: Sequence[Work[Any]], left: Callable[[], None]) -> Plan[list[Any]]:
        """The outcomes of the works, all committed; `left` is called where copies are still pending."""
        if not self.server.transactions:
            return (yield from self._one_by_one(works))
        merged = merge(works)
        grouped = [work for work, _ in merged]
        written = False

        def attempt(copies_max: int | None = None) -> Plan[tuple[list[Any], list[tuple[FanOut, Raw]]]]:
            nonlocal written
            written, ledger, outcomes = False, Changes(), []
            for work in grouped:
                outcomes.append((yield from work.body(self.graph, self.server, ledger)))
                if len(grouped) > 1:
                    # Each is a write of its own, though they share a commit.
                    yield from record(ledger, [*self.graph.spreading, *self.graph.recording])
            written = True
            later = yield from propagate(self.graph, self.server, ledger, copies_max=copies_max)
            pending = (yield from fan_outs.record(later)) if later else []
            return (yield from _final(grouped, outcomes)), list(zip(later, pending, strict=True))

        try:
            outcomes, pending = yield from transact(attempt)
        except Exception as error:
            if not written or not is_about_one_document(error):
                raise
            # One copy cannot be written. Make the copies afterwards, where it can be set aside.
            outcomes, pending = yield from transact(lambda: attempt(0))
        for fan_out, intent in pending:
            try:
                yield from fan_outs.finish(self.graph, self.server, fan_out, intent)
            except Exception as error:
                # The writes are committed and the intent with them; they must not seem to have failed.
                label = fan_out.rule.place.label
                log.warning("%s: copies are pending: %s", label, error, exc_info=is_bug(error))
                left()
        pairs = zip(merged, outcomes, strict=True)
        return [each for (_, parts), outcome in pairs for each in split(parts, outcome)]

    def _one_by_one(self, works: Sequence[Work[Any]]) -> Plan[list[Any]]:
        """The outcomes of works that nothing follows from, without a transaction; one may be `Failed`."""
        outcomes: list[Any] = []
        for work in works:
            try:
                outcomes.append((yield from work.body(self.graph, self.server, Changes(transactional=False))))
            except Exception as error:
                outcomes.append(Failed(error))
        return outcomes

    def inside(self, work: Work[Any]) -> Plan[Any]:
        """One work inside the caller's own transaction, with nothing left for later."""
        body = partial(work.body, self.graph, self.server)
        outcome = yield from self._followed(body, joined=True)
        return (yield from _final([work], [outcome]))[0]

    def follow(self, body: Callable[[Changes], Plan[R]]) -> Plan[R]:
        """Run a body that writes documents and notes it, and let others follow."""
        return (yield from transact(lambda: self._followed(body)))

    def _followed(self, body: Callable[[Changes], Plan[R]], *, joined: bool = False) -> Plan[R]:
        ledger = Changes(whole=True, joined=joined)
        outcome = yield from body(ledger)
        yield from propagate(self.graph, self.server, ledger, copies_max=UNBOUNDED)
        return outcome

    # -- repair --------------------------------------------------------------------------------

    def mend(
        self, entry: ModelEntry[Any], keys: Sequence[Any], without: frozenset[Rule] = frozenset()
    ) -> Plan[list[Any]]:
        """Recompute what these documents derive, and what that feeds; the keys of those that changed.

        `without` some rules, whose values stay as they are.
        """
        recomputation = Recomputation.of(entry, None, without)

        def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
            def hold() -> Plan[None]:
                held = {**entry.at_any(some), **entry.targets.exact.filter()}
                yield from update_many(entry.collection, held, {"$inc": {REVISION: 1}})

            def mend() -> Plan[list[Any]]:
                ledger = Changes()
                changed = yield from rewrite(self.server, recomputation, some, ledger, exact=True)
                yield from propagate(self.graph, self.server, ledger, copies_max=UNBOUNDED)
                return changed

            return (yield from transact(attempting(mend, hold, len(some))))

        return (yield from salvage(entry.model.__name__, entry.collection, keys, attempt))


def _final(works: Sequence[Work[Any]], outcomes: Sequence[Any]) -> Plan[list[Any]]:
    """Read documents again that a write may have reached by way of others."""
    final = []
    for work, outcome in zip(works, outcomes, strict=True):
        if work.shows_document and work.entry.loops and isinstance(outcome, (dict, list)):
            outcome = yield from as_they_are_now(work.entry, outcome)
        final.append(outcome)
    return final


def merge(works: Sequence[Work[Any]]) -> list[tuple[Work[Any], list[Work[Any]]]]:
    """Each work with its parts: works that follow each other, such as inserts of one model, become one."""
    if len(works) == 1:
        return [(works[0], list(works))]
    merged: list[tuple[Work[Any], list[Work[Any]]]] = []
    for work in works:
        last, parts = merged[-1] if merged else (work, [])
        if parts and last.joins(work):
            merged[-1] = last.joined(work), [*parts, work]
        else:
            merged.append((work, [work]))
    return merged


def split(parts: Sequence[Work[Any]], outcome: Any) -> list[Any]:
    """The outcome of each part, from that of the merged work."""
    if len(parts) == 1:
        return [outcome]
    remaining = iter(outcome)
    return [list(islice(remaining, part.size)) for part in parts]
