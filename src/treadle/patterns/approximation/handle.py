"""The calls on one counter; the events that wait in memory are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from pymongo.errors import DuplicateKeyError, OperationFailure

from treadle.engine.write_path import WritePath
from treadle.errors import UsageError
from treadle.graph.calls import Flushed, Sums, Waiting
from treadle.patterns.approximation import events
from treadle.patterns.approximation.events import COUNTER_ATTEMPTS_MAX
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import (
    LEDGER,
    Flush,
    Sample,
    culprits,
    is_refusal,
    stored,
    was_added,
)
from treadle.plan import Plan, delete_one, server_facts, transact

# Keys in one batch after a refusal.
COUNTER_AGAIN_CHUNK = 200


class CounterHandle:
    """The counter of a model."""

    def __init__(self, rule: CounterFields, write_path: WritePath) -> None:
        self._rule = rule
        self._write_path = write_path
        entry = rule.target
        others = [each for each in entry.rules if not isinstance(each, CounterFields)]
        if rule.declared.upsert and (others or entry.effects.on_write):
            raise UsageError(
                f"{rule.place.label} has upsert=True, but {entry.model.__name__} takes part in other "
                "patterns, which a document made by a counter would go past; insert the documents first, "
                "without upsert=",
                code="upsert-incomplete",
            )

    # -- adding --------------------------------------------------------------------------------------

    def amounts(self, counts: Sums) -> dict[Any, Any]:
        return self._rule.joined({self._rule.key(id): self._rule.amount(n)} for id, n in counts.items())

    def record(self, waiting: Waiting, group: Sequence[Sums]) -> Plan[None]:
        # First, because it refuses a server where durable counters cannot be kept.
        yield from server_facts()
        yield from events.record(self._rule, self._rule.joined(group), waiting)

    def sample(self, key: Any, n: Any) -> Plan[dict[Any, Any]]:
        work = Sample(self._rule, key, n)
        try:
            added = yield from self._write_path.execute(work)
        except (OperationFailure, OverflowError) as error:
            if not is_refusal(error):
                raise
            added = False
        return {} if added else work.sums

    # -- flushing ------------------------------------------------------------------------------------

    def flush(self, waiting: Waiting, done: Flushed) -> Plan[None]:
        waiting.take()
        if self._rule.declared.buffer == "durable":
            # Only the number of the events was kept in memory.
            waiting.unfinished.clear()
            commit = partial(self._write_path.execute, alone=True)
            yield from events.drain(self._rule, commit, partial(self._note, done))
            return
        collisions = 0
        while waiting.unfinished:
            chunk = waiting.unfinished[0]
            fit, together = self._rule.fit(chunk.sums)
            if len(fit) < len(chunk.sums):
                self._note(done, {}, {key: n for key, n in chunk.sums.items() if key not in fit})
                chunk.sums = fit
            if not together and len(fit) > COUNTER_AGAIN_CHUNK:
                # None of it was ever sent: as a whole it cannot be.
                waiting.divide(COUNTER_AGAIN_CHUNK)
                continue
            work = Flush(self._rule, chunk.sums, waiting.writer, chunk.number)
            try:
                missing = yield from self._write_path.execute(work, alone=True)
            except DuplicateKeyError:
                # Another writer made the same document; the next attempt finds it.
                collisions += 1
                if collisions == COUNTER_ATTEMPTS_MAX:
                    raise
                continue
            except (OperationFailure, OverflowError) as error:
                bad = yield from culprits(self._rule, chunk.sums, error)
                if not bad:
                    raise
                self._note(done, {}, bad)
                # Another dict, because others may be reading this one.
                chunk.sums = {key: n for key, n in chunk.sums.items() if key not in bad}
                # In smaller ones, because each further refusal is a new attempt.
                if len(chunk.sums) > COUNTER_AGAIN_CHUNK:
                    waiting.divide(COUNTER_AGAIN_CHUNK)
                continue
            self._note(done, chunk.sums, missing)
            waiting.unfinished.popleft()

    def _note(self, done: Flushed, sums: Sums, refused: Sums) -> None:
        done.documents += len(sums) - len(refused.keys() & sums.keys())
        done.unknown = self._rule.joined([done.unknown, refused])

    def close(self, waiting: Waiting) -> Plan[None]:
        """Forget a writer that has ended in order: nobody will ask for its batches."""
        if self._rule.declared.buffer == "memory":
            yield from delete_one(LEDGER, {"_id": waiting.writer})

    # -- reading -------------------------------------------------------------------------------------

    def pending(self) -> Plan[dict[Any, Any]]:
        return events.buffered(self._rule)

    def read(self, id: Any, exact: bool, waiting: Waiting) -> Plan[Any]:
        """The stored number, or with what waits; nothing of it twice."""
        rule, key = self._rule, self._rule.key(id)
        if exact and rule.declared.buffer == "durable":
            value, n = yield from transact(lambda: self._stored_and_buffered(key))
        else:
            exact = exact and rule.declared.buffer == "memory"
            n = waiting.pending().get(key, 0) if exact else 0
            value = yield from stored(rule, key)
            for chunk in [each for each in waiting.unfinished if exact and key in each.sums]:
                if (yield from was_added(waiting.writer, chunk.number)):
                    added = chunk.sums[key]
                    # Python's own minus would cut a long decimal.
                    n = rule.plus(n, added.copy_negate() if isinstance(added, Decimal) else -added)
        if value is None and not rule.declared.upsert:
            return None
        return rule.plus(rule.number(value or 0), rule.number(n))

    def _stored_and_buffered(self, key: Any) -> Plan[tuple[Any, Any]]:
        """Both at one moment, where the caller provides one."""
        value = yield from stored(self._rule, key)
        buffered = yield from events.buffered(self._rule, key)
        return value, buffered.get(key, 0)
