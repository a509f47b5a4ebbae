"""Random histories of writes: after each step every maintained value is what a naive recomputation says.

The oracle is plain Python over the raw collections, and shares nothing with
Treadle. Each machine runs on the blocking and on the asyncio shell, on one
database, which is emptied between examples.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from bson import ObjectId
from bson.decimal128 import Decimal128
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from tests.kit.tiers import IS_FULL
from treadle import DataError, Document

# A failing history is short as it is; shrinking it takes minutes, so it must be asked for.
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("TREADLE_SHRINK") else [Phase.generate]

WIDE = os.environ.get("TREADLE_HYPOTHESIS") == "wide"


def bounds(examples: int) -> settings:
    """How far a machine looks: the same histories each time, unless TREADLE_HYPOTHESIS=wide."""
    return settings(
        phases=PHASES,
        derandomize=not WIDE,
        database=None,
        deadline=None,
        max_examples=300 if WIDE else examples if IS_FULL else 2,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
    )


POOL = [ObjectId(f"{number:024x}") for number in range(1, 6)]
Raw = dict[str, Any]
State = dict[str, dict[Any, Raw]]
ids = st.sampled_from(POOL[:3])
maybe_ids = st.sampled_from([*POOL[:4], None])

# The last two are values that a pipeline would take for a path and for code.
names = st.sampled_from(["ann", "bob", "", None, "$secret", {"$function": "x"}.__repr__()])


def simple(value: Any) -> Any:
    """A stored value in Python's types; null and missing are one."""
    if isinstance(value, Decimal128):
        return value.to_decimal()
    if isinstance(value, dict):
        return {key: simple(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [simple(item) for item in value]
    return value


@dataclass(frozen=True)
class World:
    """Where a machine runs. Hypothesis looks at a machine's attributes, and a database has them all."""

    store: Any
    database: Any


class Machine(RuleBasedStateMachine):
    """What all machines share: a store, the raw state, and the two checks after each step."""

    models: ClassVar[list[type[Document]]] = []
    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.store, self.database = self.world.store, self.world.database
        for model in self.models:
            self.database[model.__treadle__.collection].delete_many({})
        self.kept: list[Document] = []
        self.state: State = self.read()

    def read(self) -> State:
        return {
            model.__treadle__.collection: {
                each["_id"]: each for each in self.database[model.__treadle__.collection].find()
            }
            for model in self.models
        }

    def has(self, model: type[Document], identity: Any) -> bool:
        return identity in self.state[model.__treadle__.collection]

    def add(self, document: Document) -> None:
        """Insert, under another id where it is taken; what is returned is what is stored."""
        if self.has(type(document), document.id):
            document = document.model_copy(update={"id": ObjectId()})
        returned = self.store.insert(document)
        assert self.store.get(type(document), document.id) == returned

    def keep(self, model: type[Document], identity: Any) -> None:
        found = self.store.get(model, identity)
        if found is not None:
            self.kept = [*self.kept[-3:], found]

    def replace_kept(self, model: type[Document], which: int, **changes: Any) -> None:
        """Write back a document that was read some steps ago."""
        stale = [each for each in self.kept if type(each) is model]
        if not stale:
            return
        document = copy.deepcopy(stale[which % len(stale)])
        for name, value in changes.items():
            setattr(document, name, value)
        try:
            self.store.replace(document)
        except DataError as error:
            assert "document-gone" == error.code

    @invariant()
    def all_is_right(self) -> None:
        self.check()
        assert [] == self.store.verify()

    def check(self) -> None:
        raise NotImplementedError


def play(machine: type[Machine], run: Any, database: Any, examples: int) -> None:
    """Run a machine on one shell and one database."""
    store = run.store(machine.models)
    store.setup()
    bound = type(machine.__name__, (machine,), {"world": World(store, database)})
    run_state_machine_as_test(bound, settings=bounds(examples))


@dataclass(frozen=True)
class Copy:
    """One copying declaration, said again in the oracle's own words."""

    target: str
    arrays: tuple[str, ...]
    reference: tuple[str, ...]
    card: str
    source: str
    fields: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    flat: bool = False
    on_delete: str = "keep"

    def places(self, raw: Raw) -> Iterator[tuple[Any, Raw]]:
        """Each sub-document that holds a reference, under a name that survives reordering."""
        level: list[tuple[Any, Raw]] = [((), raw)]
        for array in self.arrays:
            level = [
                ((*name, array, element.get("number", index)), element)
                for name, holder in level
                for index, element in enumerate(holder.get(array) or [])
            ]
        yield from level

    def referred(self, holder: Raw) -> Any:
        for part in self.reference:
            holder = (holder or {}).get(part)  # type: ignore[assignment]
        return holder

    def stored(self, holder: Raw) -> Any:
        """The card as stored, without the reference that it may hold."""
        card = holder.get(self.card)
        if self.flat or card is None:
            return card
        parts = {key: value for key, value in simple(card).items() if key in (*self.fields, *self.frozen)}
        return self.filled(parts)

    def filled(self, parts: Raw) -> Raw | None:
        """A card that holds its reference is there with nothing in it too; that is no card."""
        return None if not parts and len(self.reference) > 1 else parts

    def fresh(self, source: Raw, previous: Any) -> Any:
        if self.flat:
            return source.get(self.fields[0])
        card = {name: source.get(name) for name in self.fields}
        old = previous if previous is not None else source
        return self.filled(simple({**card, **{name: old.get(name) for name in self.frozen}}))


def check_copies(copies: list[Copy], before: State, after: State) -> None:
    """Each card is what the step from one state to the next should have made of it."""
    for copied in copies:
        for identity, raw in after[copied.target].items():
            check_cards(copied, before, after, before[copied.target].get(identity), raw)
        check_deletions(copied, before, after)


def check_cards(copied: Copy, before: State, after: State, old: Raw | None, raw: Raw) -> None:
    held = dict(copied.places(old)) if old else {}
    here = dict(copied.places(raw))
    was = {name: copied.referred(holder) for name, holder in held.items()}
    now = {name: copied.referred(holder) for name, holder in here.items()}
    left = {reference for name, reference in was.items() if now.get(name) != reference}
    came = {reference for name, reference in now.items() if was.get(name) != reference}
    for name, holder in here.items():
        reference = now[name]
        previous = [copied.stored(held[name]) if name in was and was[name] == reference else None]
        if reference in left & came:
            # One element went and another came with the same reference: which is which, nobody can
            # tell but this test, so any of the old cards will do.
            previous += [copied.stored(other) for at, other in held.items() if was[at] == reference]
        source = after[copied.source].get(reference)
        allowed = []
        for card in previous:
            if reference is None:
                allowed.append(None)
            elif source is not None:
                allowed.append(copied.fresh(source, card))
            else:
                allowed.append(card if copied.on_delete == "keep" else None)
        actual = copied.stored(holder)
        expected = actual if actual in allowed else allowed[0]
        assert (copied.target, copied.card, name, expected) == (copied.target, copied.card, name, actual)


def check_deletions(copied: Copy, before: State, after: State) -> None:
    gone = before[copied.source].keys() - after[copied.source].keys()
    for raw in after[copied.target].values():
        left = [copied.referred(holder) for _, holder in copied.places(raw)]
        old = before[copied.target].get(raw["_id"])
        referred = {copied.referred(holder) for _, holder in copied.places(old)} if old else set()
        if copied.on_delete != "keep":
            assert [] == [each for each in left if each in gone and each in referred]


def known(values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def near(expected: Any, actual: Any) -> Any:
    """The actual value, if it differs from the expected one by no more than rounding."""
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return actual if math.isclose(expected, actual, rel_tol=1e-9, abs_tol=1e-9) else expected
    if isinstance(expected, Decimal) and isinstance(actual, Decimal):
        return actual if abs(expected - actual) <= Decimal("1e-24") else expected
    return expected


def check_values(expected: Raw, stored: Raw) -> None:
    actual = {path: at(stored, path) for path in expected}
    assert {path: near(value, actual[path]) for path, value in expected.items()} == actual


def at(raw: Any, path: str) -> Any:
    for part in path.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


ratings = st.sampled_from([None, -1, 0, 2, 2, 3, 5])


def rank(value: int | None, direction: int) -> tuple[int, int]:
    """MongoDB's order: null before all numbers, or after them when descending."""
    if value is None:
        return (0, 0) if direction > 0 else (1, 0)
    return (1, value) if direction > 0 else (0, -value)


def first(comments: list[Raw], keys: list[tuple[str, int]], size: int, fields: list[str]) -> list[Raw]:
    ordered = sorted(
        comments, key=lambda each: (*(rank(each.get(name), way) for name, way in keys), each["_id"])
    )
    return [simple({name: each.get(name) for name in ["_id", *fields]}) for each in ordered[:size]]
