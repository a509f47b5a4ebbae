"""Counters against plain integers, on both shells."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from treadle import Approximate, Document

NEVER = timedelta(hours=1)
KEYS = st.integers(1, 4)
# The fifth has no document.
KNOWN = (1, 2, 3)


class Score(Document, collection="scores"):
    id: int
    memory: Annotated[int, Approximate(every=7, within=NEVER, keys_max=3)] = 0
    durable: Annotated[int, Approximate(every=7, within=NEVER, buffer="durable")] = 0


class Counting(RuleBasedStateMachine):
    """One counter, and the integers that it should be."""

    given: ClassVar[tuple[Any, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.store, self.database, self.field = self.given
        self.store.delete_many(Score, {})
        self.store.insert_many([Score(id=key) for key in KNOWN])
        self.counter = self.store.counter(Score, self.field)
        self.counter.unknown.clear()
        self.expected = dict.fromkeys((*KNOWN, 4), 0)

    @rule(key=KEYS)
    def add(self, key: int) -> None:
        self.counter.add(key)
        self.expected[key] += 1

    @rule(key=KEYS, n=st.integers(-3, 9))
    def add_some(self, key: int, n: int) -> None:
        self.counter.add(key, n)
        self.expected[key] += n

    @rule(counts=st.dictionaries(KEYS, st.integers(0, 5)))
    def add_many(self, counts: dict[int, int]) -> None:
        self.counter.add_many(counts)
        for key, n in counts.items():
            self.expected[key] += n

    @rule()
    def flush(self) -> None:
        self.counter.flush()
        assert {} == self.counter.pending()
        assert [self.expected[key] for key in KNOWN] == [self.counter.read(key) for key in KNOWN]

    @rule(key=st.sampled_from(KNOWN))
    def replace(self, key: int) -> None:
        self.store.replace(Score(id=key, memory=1000, durable=1000))

    @invariant()
    def stored_and_pending_are_the_truth(self) -> None:
        pending = self.counter.pending()
        for key in KNOWN:
            assert self.expected[key] == self.counter.read(key, exact=True)
            assert self.expected[key] == self.counter.read(key) + pending.get(key, 0)
        assert self.expected[4] == self.counter.unknown.get(4, 0) + pending.get(4, 0)

    def teardown(self) -> None:
        self.counter.flush()
        assert [] == self.store.verify()


@pytest.mark.heavy
@pytest.mark.parametrize("field", ["memory", "durable"])
def test_a_counter_behaves_like_an_integer(run, database, field):
    store = run.store([Score])
    store.setup()

    class Machine(Counting):
        given = (store, database, field)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=6, stateful_step_count=20, deadline=None)
    )
