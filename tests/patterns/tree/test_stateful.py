"""Any history of writes, on every representation, against a dict of parents."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.kit.tiers import IS_FULL
from tests.patterns.tree import forest
from tests.patterns.tree.forest import ALL, Listed, Oracle, Pathed, PathedUp, key, make
from treadle import DataError, Document, UsageError

WIDE = os.environ.get("TREADLE_HYPOTHESIS") == "wide"
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("TREADLE_SHRINK") else [Phase.generate]
NODES = 9

numbers = st.integers(1, NODES)
maybe = st.sampled_from([None, *range(1, NODES + 1)])
# One is the beginning of another, and a pattern would match a third.
segments = st.sampled_from(["a", "ab", "a.b", "aXb", "ü|", "$a", "a b", "^", "%2C"])


@dataclass(frozen=True)
class World:
    """Where a machine runs. Hypothesis looks at a machine's attributes, and a database has them all."""

    store: Any
    database: Any


class TreeMachine(RuleBasedStateMachine):
    model: ClassVar[type[Document]]
    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.collection = self.world.database[self.model.__treadle__.collection]
        self.collection.delete_many({})
        self.oracle = Oracle()
        self.stale: Any = None

    def id(self, number: int | None) -> Any:
        return None if number is None else key(self.model, number)

    @property
    def pathed(self) -> bool:
        return self.model in (Pathed, PathedUp)

    @contextlib.contextmanager
    def refused(self, *codes: str):
        """The call is refused with one of these codes, and nothing has changed."""
        with pytest.raises((DataError, UsageError)) as caught:
            yield
        assert caught.value.code in codes

    @initialize()
    def begin(self):
        self.store = self.world.store
        self.tree = self.store.tree(self.model)
        # Not from nothing: most histories would else be about nodes that are not there.
        for number, parent in ((1, None), (2, 1), (3, 2), (4, 2), (5, 1)):
            self.tree.insert(make(self.model, number, f"n{number}"), self.id(parent))
            self.oracle.add(self.id(number), f"n{number}", self.id(parent))

    # -- writes ----------------------------------------------------------------------------

    @rule(number=numbers, parent=maybe, name=segments, plainly=st.booleans())
    def insert(self, number, parent, name, plainly):
        own, above = self.id(number), self.id(parent)
        if own in self.oracle.parents:
            return
        node = make(self.model, number, name)
        if plainly and forest.state_parent(self.model, node, above):
            act = lambda: self.store.insert(node)  # noqa: E731
        else:
            act = lambda: self.tree.insert(node, above)  # noqa: E731
        if above is not None and above not in self.oracle.parents:
            with self.refused("tree-parent-missing", "tree-cycle"):
                act()
        elif self.pathed and self.oracle.taken(above, name):
            with self.refused("tree-segment-taken"):
                act()
        else:
            stored = act()
            self.oracle.add(own, name, above)
            assert self.store.get(self.model, own) == stored

    @rule(seed=st.integers(0, 10_000), count=st.integers(1, 4))
    def insert_many(self, seed, count):
        """A batch in any order, below each other or below what is there."""
        chance = random.Random(seed)
        free = [number for number in range(1, NODES + 1) if self.id(number) not in self.oracle.parents]
        chosen = free[:count]
        nodes, plan = {}, []
        for at, number in enumerate(chosen):
            among = [self.id(each) for each in chosen[:at]]
            known = [] if self.model is Listed else list(self.oracle.parents)
            parent = chance.choice([None, *among, *known])
            name = f"n{number}"
            nodes[self.id(number)] = make(self.model, number, name)
            plan.append((self.id(number), name, parent))
        for own, name, parent in plan:
            node = nodes[own]
            if self.model is Listed and parent is not None:
                nodes[parent].children = [*nodes[parent].children, own]
            elif self.model is Pathed:
                self.oracle.add(own, name, parent)
                node.path = self.oracle.path(own)
            else:
                assert forest.state_parent(self.model, node, parent)
        for own, name, parent in plan:
            if own not in self.oracle.parents:
                self.oracle.add(own, name, parent)
        listed = list(nodes.values())
        chance.shuffle(listed)
        stored = self.store.insert_many(listed)
        assert [each.id for each in listed] == [each.id for each in stored]

    @rule(number=numbers, parent=maybe)
    def move(self, number, parent):
        own, above = self.id(number), self.id(parent)
        known = self.oracle.parents
        if own not in known:
            with self.refused("tree-node-missing"):
                self.tree.move(own, above)
        elif above is not None and above not in known:
            with self.refused("tree-parent-missing"):
                self.tree.move(own, above)
        elif above is not None and (above == own or own in self.oracle.above(above)):
            with self.refused("tree-cycle"):
                self.tree.move(own, above)
        elif self.pathed and self.oracle.taken(above, self.oracle.names[own], own):
            with self.refused("tree-segment-taken"):
                self.tree.move(own, above)
        else:
            moved = self.tree.move(own, above)
            self.oracle.move(own, above)
            assert self.store.get(self.model, own) == moved

    @rule(number=numbers, how=st.sampled_from(["refuse", "subtree", "lift", "delete", "delete_many"]))
    def remove(self, number, how):
        own = self.id(number)
        if own not in self.oracle.parents:
            if not how.startswith("delete"):
                with self.refused("tree-node-missing"):
                    self.tree.remove(own, children=how)
            return
        below = self.oracle.below(own)
        if how == "subtree":
            assert len(below) + 1 == self.tree.remove(own, children="subtree")
            for each in sorted(below, key=lambda node: -len(self.oracle.above(node))):
                self.oracle.drop(each)
            self.oracle.drop(own)
        elif how == "lift":
            self.lift(own)
        elif below:
            with self.refused("tree-has-children"):
                self.plain_removal(own, how)
        else:
            self.plain_removal(own, how)
            self.oracle.drop(own)

    def plain_removal(self, own: Any, how: str) -> None:
        if how == "refuse":
            assert 1 == self.tree.remove(own)
        elif how == "delete":
            assert own == self.store.delete(self.model, own).id
        else:
            assert 1 == self.store.delete_many(self.model, {"_id": own})

    def lift(self, own: Any) -> None:
        parent, children = self.oracle.parents[own], self.oracle.order[own]
        if self.pathed and any(self.oracle.taken(parent, self.oracle.names[each], own) for each in children):
            with self.refused("tree-segment-taken"):
                self.tree.remove(own, children="lift")
            return
        assert 1 == self.tree.remove(own, children="lift")
        self.oracle.lift(own)

    @rule(number=numbers, name=segments)
    def rename(self, number, name):
        own = self.id(number)
        if own not in self.oracle.parents:
            return
        if not self.pathed:
            self.store.update(self.model, own, {"$set": {"name": name}})
        elif self.oracle.taken(self.oracle.parents[own], name, own):
            with self.refused("tree-segment-taken"):
                self.tree.rename(own, name)
            return
        else:
            with self.refused("field-maintained"):
                self.store.update(self.model, own, {"$set": {"name": name}})
            assert name == self.tree.rename(own, name).name
        self.oracle.names[own] = name

    @rule(number=numbers)
    def remember(self, number):
        self.stale = self.store.get(self.model, self.id(number)) or self.stale

    @rule()
    def replace_stale(self):
        """What was read some steps ago is written back, and neither moves nor renames anything."""
        if self.stale is None or self.stale.id not in self.oracle.parents:
            return
        try:
            self.store.replace(self.stale)
        except UsageError as error:
            assert "tree-replace-moves" == error.code
        else:
            self.oracle.names[self.stale.id] = self.stale.name

    # -- what must hold ---------------------------------------------------------------------

    @invariant()
    def stored_as_it_should_be(self):
        documents = list(self.collection.find())
        assert forest.right(self.model, self.oracle) == forest.shown(self.model, documents)
        assert [] == self.store.verify(self.model)

    @rule(number=numbers, depth=st.sampled_from([None, 0, 1, 2, 3]))
    def ask(self, number, depth):
        """Every question has the answer that the dict of parents gives."""
        own, oracle, tree = self.id(number), self.oracle, self.tree
        assert sorted(oracle.order[None]) == [each.id for each in tree.roots(sort="_id")]
        assert len(oracle.parents) == tree.count()
        if own not in oracle.parents:
            assert [] == list(tree.children(own)) == list(tree.descendants(own))
            for call in (tree.ancestors, tree.path, tree.depth):
                with self.refused("tree-node-missing"):
                    call(own)
            return
        above = oracle.above(own)
        assert above == [each.id for each in tree.ancestors(own)]
        assert [*above, own] == [each.id for each in tree.path(own)]
        assert len(above) == tree.depth(own)
        parent = tree.parent(own)
        assert (above[-1] if above else None) == (parent and parent.id)
        assert sorted(oracle.order[own]) == [each.id for each in tree.children(own, sort="_id")]
        if self.model is Listed:
            assert oracle.order[own] == [each.id for each in tree.children(own)]
        below = {
            each
            for each in oracle.below(own)
            if depth is None or len(oracle.above(each)) - len(above) <= depth
        }
        found = [each.id for each in tree.descendants(own, max_depth=depth)]
        assert sorted(below) == sorted(found)
        assert len(below) == tree.count(own, max_depth=depth)
        by_name = sorted((oracle.names[each], each) for each in below)
        assert [each for _, each in by_name] == [
            each.id for each in tree.descendants(own, max_depth=depth, sort="name")
        ]


@pytest.mark.heavy
@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_any_history_leaves_the_tree_of_the_oracle(model, run, database, constants):
    # Small subtrees are removed in several steps, too.
    constants(tree_remove_step=2, tree_batch=2, tree_graph_levels=2)
    store = run.store([model])
    store.setup()
    bound = type(
        f"{model.__name__}Machine", (TreeMachine,), {"model": model, "world": World(store, database)}
    )
    run_state_machine_as_test(
        bound,
        settings=settings(
            phases=PHASES,
            derandomize=not WIDE,
            database=None,
            deadline=None,
            max_examples=100 if WIDE else 10 if IS_FULL else 2,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )
