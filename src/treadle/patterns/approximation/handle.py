"""The calls on one counter; the events that wait in memory are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.write_path import WritePath
from treadle.errors import UsageError
from treadle.graph.calls import Flushed, Sums, Waiting
from treadle.patterns.approximation.add_amounts import (
    BATCHES,
    AddAmounts,
    Added,
    AddSample,
    claim_batch,
    find_refused,
    is_refusal,
    read_number,
    was_added,
)
from treadle.patterns.approximation.counter_field import CounterField, fit_one_command
from treadle.patterns.approximation.durable_buffer import flush_events, read_buffered, store_events
from treadle.plan import Plan, delete_one, server_facts, transact

# Keys in one batch after a refusal: each further refusal is a new attempt.
COUNTER_AGAIN_CHUNK = 200


class CounterHandle:
    """The counter of a model."""

    def __init__(self, rule: CounterField, write_path: WritePath) -> None:
        self._rule = rule
        self._write_path = write_path
        entry = rule.target
        others = [each for each in entry.rules if not isinstance(each, CounterField)]
        if rule.declared.upsert and (others or entry.effects.on_write):
            raise UsageError(
                f"{rule.place.label} has upsert=True, but {entry.model.__name__} takes part in other "
                "patterns, which a document made by a counter would go past; insert the documents first, "
                "without upsert=",
                code="upsert-incomplete",
            )

    # -- adding --------------------------------------------------------------------------------

    def amounts(self, counts: Sums) -> dict[Any, Any]:
        """Return validated amounts by validated keys; raises `UsageError`."""
        return self._rule.add_up({self._rule.key(id): self._rule.amount(n)} for id, n in counts.items())

    def record(self, waiting: Waiting, group: Sequence[Sums]) -> Plan[None]:
        """Store the amounts of several callers as durable events."""
        # First, because it refuses a server where durable counters cannot be kept.
        yield from server_facts()
        yield from store_events(self._rule, self._rule.add_up(group), waiting)

    def sample(self, key: Any, n: Any) -> Plan[Sums]:
        """Add one sampled event. Returns its amount where it could not be added."""
        try:
            added = yield from self._write_path.execute(AddSample(self._rule, key, n))
        except (OperationFailure, OverflowError) as error:
            if not is_refusal(error):
                raise
            return {key: n}
        return added.refused

    # -- flushing ------------------------------------------------------------------------------

    def flush(self, waiting: Waiting, done: Flushed) -> Plan[None]:
        """Write everything that is pending; `done` gets what became of it."""
        waiting.take()
        if self._rule.declared.buffer == "durable":
            # Only the number of the events was kept in memory.
            waiting.unfinished.clear()
            commit = partial(self._write_path.execute, alone=True)
            yield from flush_events(self._rule, commit, partial(self._note, done))
        while waiting.unfinished:
            yield from self._flush_batch(waiting, done)

    def _flush_batch(self, waiting: Waiting, done: Flushed) -> Plan[None]:
        """Write the first batch, or what is left of it without the amounts that are refused."""
        rule, batch = self._rule, waiting.unfinished[0]
        if len(batch.sums) > COUNTER_AGAIN_CHUNK and not fit_one_command(batch.sums):
            # It was never sent: as a whole it cannot be.
            waiting.divide(COUNTER_AGAIN_CHUNK)
            return
        claim = partial(claim_batch, batch.sums, waiting.writer, batch.number)
        try:
            added = yield from self._write_path.execute(AddAmounts(rule, claim), alone=True)
        except (OperationFailure, OverflowError) as error:
            refused = find_refused(rule, batch.sums, error)
            if not refused:
                raise
            self._note(done, Added({}, refused, 0))
            # Another dict, because a reader may be using this one.
            batch.sums = {key: n for key, n in batch.sums.items() if key not in refused}
            if len(batch.sums) > COUNTER_AGAIN_CHUNK:
                waiting.divide(COUNTER_AGAIN_CHUNK)
            return
        self._note(done, added)
        waiting.unfinished.popleft()

    def _note(self, done: Flushed, added: Added) -> None:
        done.documents += len(added.amounts) - len(added.refused.keys() & added.amounts.keys())
        done.unknown = self._rule.add_up([done.unknown, added.refused])

    def close(self, waiting: Waiting) -> Plan[None]:
        """Delete the note of a writer that has ended in order: its batches are not asked for again."""
        if self._rule.declared.buffer == "memory":
            yield from delete_one(BATCHES, {"_id": waiting.writer})

    # -- reading -------------------------------------------------------------------------------

    def pending(self) -> Plan[dict[Any, Any]]:
        """Return what all writers have buffered."""
        return read_buffered(self._rule)

    def read(self, id: Any, exact: bool, waiting: Waiting) -> Plan[Any]:
        """Return the stored number, or an exact one with what is pending; nothing of it twice."""
        rule, key = self._rule, self._rule.key(id)
        if exact and rule.declared.buffer == "durable":
            value, n = yield from transact(partial(self._read_with_buffered, key))
        elif exact and rule.declared.buffer == "memory":
            value, n = yield from self._read_with_waiting(key, waiting)
        else:
            value, n = (yield from read_number(rule, key)), 0
        if value is None and not rule.declared.upsert:
            return None
        return rule.plus(rule.number(value or 0), rule.number(n))

    def _read_with_buffered(self, key: Any) -> Plan[tuple[Any, Any]]:
        """Runs in a transaction, so that number and events are of one moment."""
        value = yield from read_number(self._rule, key)
        buffered = yield from read_buffered(self._rule, key)
        return value, buffered.get(key, 0)

    def _read_with_waiting(self, key: Any, waiting: Waiting) -> Plan[tuple[Any, Any]]:
        n = waiting.pending().get(key, 0)
        value = yield from read_number(self._rule, key)
        for batch in [each for each in waiting.unfinished if key in each.sums]:
            if (yield from was_added(waiting.writer, batch.number)):
                added = batch.sums[key]
                # Python's own minus would cut a long decimal.
                n = self._rule.plus(n, added.copy_negate() if isinstance(added, Decimal) else -added)
        return value, n
