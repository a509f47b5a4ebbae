"""Committing by transaction: several writes in one, with what they do to other documents done once.

The bodies of the works run one after another, then every affected target
follows, then the transaction commits. Fan-outs that are too large for one
transaction leave an intent in it and are finished afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from bson.errors import BSONError
from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine import intents
from treadle.engine.contention import Contended, attempting, pieces
from treadle.engine.groups import Arranged, arrange
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids
from treadle.engine.react import UNBOUNDED, FanOut, react
from treadle.engine.recompute import Recomputation
from treadle.engine.set_aside import set_aside
from treadle.engine.work import Commit, Work, Writer, as_they_are_now
from treadle.graph.change import Change
from treadle.graph.pattern import REVISION, Entry
from treadle.plan import Plan, Raw, bulk_write, by_id, find, transact, update_many
from treadle.plan.server_errors import is_about_one_document, is_poison, is_transient
from treadle.query.keys import freeze

R = TypeVar("R")

log = logging.getLogger("treadle")


class ByTransaction(Commit):
    """Everything in one transaction."""

    def perform(self, works: Sequence[Work[Any]], writer: Writer) -> Plan[list[Any]]:
        merged = merge(works)
        grouped = [work for work, _ in merged]

        def attempt(copies_max: int | None = None) -> Plan[tuple[list[Any], list[tuple[FanOut, Raw]]]]:
            ledger = Ledger()
            outcomes = []
            for work in grouped:
                outcomes.append((yield from work.body(self.graph, self.server, ledger)))
            later = yield from react(self.graph, self.server, ledger, copies_max=copies_max)
            pending = (yield from intents.record(later, writer.owner)) if later else []
            return (yield from _final(grouped, outcomes)), list(zip(later, pending, strict=True))

        try:
            outcomes, pending = yield from transact(attempt)
        except OperationFailure as error:
            if not is_poison(error):
                raise
            # One copy cannot be written. Make the copies afterwards, where it can be set aside.
            outcomes, pending = yield from transact(lambda: attempt(0))
        for fan_out, intent in pending:
            try:
                yield from intents.finish(self.graph, self.server, fan_out, intent)
            except Exception as error:
                # The writes are committed and the intent with them; they must not seem to have failed.
                log.warning("%s: copies are pending: %s", fan_out.rule.place.label, error)
                writer.left()
        pairs = zip(merged, outcomes, strict=True)
        return [each for (_, parts), outcome in pairs for each in split(parts, outcome)]

    def inside(self, work: Work[Any]) -> Plan[Any]:
        """One work inside the caller's own transaction, with nothing left for later."""
        ledger = Ledger()
        outcome = yield from work.body(self.graph, self.server, ledger)
        yield from react(self.graph, self.server, ledger, copies_max=UNBOUNDED)
        return (yield from _final([work], [outcome]))[0]

    def follow(self, body: Callable[[Ledger], Plan[R]], writer: Writer) -> Plan[R]:
        def attempt() -> Plan[R]:
            ledger = Ledger()
            outcome = yield from body(ledger)
            yield from react(self.graph, self.server, ledger, copies_max=UNBOUNDED)
            return outcome

        return (yield from transact(attempt))

    def look(self, look: Callable[[], Plan[R]]) -> Plan[R]:
        return (yield from transact(look))

    def recover(self, writer: Writer) -> Plan[int]:
        return (yield from intents.recover(self.graph, self.server))

    # -- repair --------------------------------------------------------------------------------

    def mend(self, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
        def hold() -> Plan[None]:
            held = {**entry.at_any(keys), **entry.exactly}
            yield from update_many(entry.collection, held, {"$inc": {REVISION: 1}})

        attempt = attempting(entry.limits, lambda: self._mend(entry, keys), hold, len(keys))
        try:
            return (yield from transact(attempt))
        except (OperationFailure, BSONError, Contended) as error:
            if isinstance(error, OperationFailure) and (
                is_transient(error) or not is_about_one_document(error)
            ):
                raise
            if len(keys) == 1:
                yield from set_aside(entry.model.__name__, entry.collection, keys[0], error)
                return []
            changed: list[Any] = []
            for start, end in pieces(entry.limits, len(keys), error):
                changed += yield from self.mend(entry, keys[start:end])
            return changed

    def _mend(self, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
        ledger = Ledger()
        recomputation = Recomputation(entry)
        arranged = Arranged([], [])
        if entry.group is not None:
            arranged = yield from arrange(self.server, entry, keys, ledger)
        made = {freeze(each) for each in arranged.made}
        documents = yield from find(entry.collection, {**entry.at_any(keys), **entry.exactly})
        present = [each["_id"] for each in documents]
        yield from ledger.note_before(entry, [each for each in present if freeze(each) not in made])
        # Really writes the sources of copies; of the worker's too, which finds a copy right and leaves it,
        # while this transaction still holds an older value for it.
        expected = yield from recomputation.expected(self.server, documents, guarded=True)
        operations = []
        changed = [*arranged.removed]
        for document, right in zip(documents, expected, strict=True):
            wrong = recomputation.differs(document, right) or freeze(document["_id"]) in made
            if wrong:
                changed.append(entry.key_of(document))
            pipeline = recomputation.rewrite(recomputation.sets(document, right), stamped=wrong)
            operations.append(UpdateOne(by_id(document["_id"]), pipeline))
        if operations:
            yield from bulk_write(entry.collection, operations, ordered=False)
        if changed and entry.feeds:
            afters = yield from by_ids(entry.collection, present)
            for document in documents:
                frozen = freeze(document["_id"])
                before = None if frozen in made else document
                ledger.add(Change(entry.collection, document["_id"], before, afters[frozen]))
            yield from react(self.graph, self.server, ledger, copies_max=UNBOUNDED)
        return changed


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
