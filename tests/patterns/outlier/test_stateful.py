"""Outlier arrays against a plain Python list, on both shells."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.kit.tiers import IS_FULL
from tests.members import MODELS, Unique, UniqueRows, items, wrong

EXAMPLES = 5 if IS_FULL else 2
STEPS = 20
MEMBERS = st.integers(0, 30)


class Members(RuleBasedStateMachine):
    """One array of one document, and the list that it should be."""

    # Hypothesis looks at class attributes, and a PyMongo database has every attribute one asks for.
    given: ClassVar[tuple[Any, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.store, self.database, self.model, numbers = self.given
        self.key = next(numbers)
        self.expected: list[int] = []
        self.unique = self.model in (Unique, UniqueRows)
        self.store.insert(self.model(id=self.key))
        self.array = self.store.array(self.model, "members", self.key)

    def _add(self, new: list[int]) -> int:
        before = len(self.expected)
        for each in new:
            if not (self.unique and each in self.expected):
                self.expected.append(each)
        return len(self.expected) - before

    @rule(item=MEMBERS)
    def append(self, item: int) -> None:
        assert (self._add([item]) == 1) is self.array.append(item)

    @rule(new=st.lists(MEMBERS, max_size=12))
    def extend(self, new: list[int]) -> None:
        assert self._add(new) == self.array.extend(new)

    @rule(item=MEMBERS)
    def remove(self, item: int) -> None:
        assert self.expected.count(item) == self.array.remove(item)
        self.expected = [each for each in self.expected if each != item]

    @rule(data=st.data())
    def remove_some(self, data: st.DataObject) -> None:
        """Removals that meet something; the overflow comes back at times."""
        for _ in range(data.draw(st.integers(1, 6))):
            if self.expected:
                self.remove(data.draw(st.sampled_from(self.expected)))

    @rule(item=MEMBERS)
    def contains(self, item: int) -> None:
        assert (item in self.expected) is self.array.contains(item)

    @rule(number=st.integers(1, 5), size=st.integers(1, 7))
    def page(self, number: int, size: int) -> None:
        assert self.expected[(number - 1) * size : number * size] == self.array.page(number, size)

    @rule(given=st.lists(MEMBERS, max_size=8))
    def replace(self, given: list[int]) -> None:
        self.store.replace(self.model(id=self.key, members=given))

    @rule(given=st.lists(MEMBERS, max_size=16))
    def insert_anew(self, given: list[int]) -> None:
        self.store.delete(self.model, self.key)
        self.store.insert(self.model(id=self.key, members=given))
        self.expected = []
        self._add(given)

    @rule()
    def forget(self) -> None:
        """What an older document lacks; the next write adopts it."""
        lost = {"_treadle": "", "member_count": "", "has_overflow": ""}
        everything = items(self.database, self.model, self.key)
        self.database[f"{self.model.__treadle__.collection}_overflow"].delete_many({})
        self.database[self.model.__treadle__.collection].update_one(
            {"_id": self.key}, {"$set": {"members": everything}, "$unset": lost}
        )
        self.store.rebuild(self.model)

    def teardown(self) -> None:
        assert [] == self.store.verify()
        self.store.delete(self.model, self.key)

    @invariant()
    def is_the_list(self) -> None:
        assert self.expected == items(self.database, self.model, self.key)
        assert self.expected == list(self.array)
        assert len(self.expected) == self.array.count()
        assert [] == wrong(self.database, self.model, self.key)


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_an_array_behaves_like_a_list(run, database, model):
    store = run.store([model])
    store.setup()

    class Machine(Members):
        given = (store, database, model, iter(range(1, 10**6)))

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
    )
