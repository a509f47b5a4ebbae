"""Races on trees: two transactions in every order that matters, then threads and tasks.

A permutation runs two writes in two sessions: the first so many commands, the
second so many, then each to its end. Whoever meets a conflict starts again
when the other is done, as `with_transaction` would. Whatever the order, the
tree must be one afterwards.

Covers: patterns/tree/writes
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.kit.tiers import IS_FULL
from tests.patterns.tree.forest import (
    FOUR,
    Array,
    Counted,
    Listed,
    Parented,
    Pathed,
    PathedUp,
    plant,
    tree_of,
)
from treadle import AsyncStore, DataError, Document, Store, UsageError
from treadle.engine.deletes import Delete
from treadle.engine.inserts import Insert
from treadle.graph.calls import HierarchyRule, rule_of
from treadle.graph.write import Write
from treadle.patterns.tree import inserts, writes
from treadle.patterns.tree.inserts import Stated
from treadle.patterns.tree.moves import Move
from treadle.patterns.tree.removes import Remove, RemoveAndLift, RemoveSubtree
from treadle.plan import unwind
from treadle.store import common

SHAPE = {"r": {"a": {"a1": {"a2": {}}}, "b": {"b1": {}}, "leaf": {}}}
STEPS_MAX = 60
REFUSALS = {
    "tree-cycle", "tree-parent-missing", "tree-node-missing", "tree-has-children", "tree-segment-taken",
}  # fmt: skip


class Side:
    """One of two writers: its plan in a transaction of its own."""

    def __init__(self, store: Store, work: Write[Any]) -> None:
        self.store, self.work = store, work
        self.session = store.runner.database.client.start_session()
        self.session.start_transaction(**common.TRANSACTION_OPTIONS)
        self.plan = store.write_path.commit([work], inside=True)
        self.command: Any = None
        self.begun = self.ended = self.conflicted = False
        self.refused: str | None = None

    def step(self) -> None:
        """One command, and what the plan makes of its result."""
        if self.ended:
            return
        try:
            if not self.begun:
                self.begun, self.command = True, next(self.plan)
            else:
                self.command = self.plan.send(self.perform())
        except StopIteration:
            self.end(commit=True)
        except PyMongoError as error:
            assert error.has_error_label("TransientTransactionError"), error
            self.conflicted = True
            self.end(commit=False)
        except (DataError, UsageError) as error:
            assert error.code in REFUSALS, error
            self.refused = error.code
            self.end(commit=False)

    def perform(self) -> Any:
        try:
            return self.store.runner._perform(self.command, self.session)
        except PyMongoError as error:
            unwind(self.plan, error)

    def end(self, *, commit: bool) -> None:
        self.ended = True
        self.plan.close()
        if not commit:
            with contextlib.suppress(PyMongoError):
                self.session.abort_transaction()
            return
        try:
            self.session.commit_transaction()
        except PyMongoError as error:
            assert error.has_error_label("TransientTransactionError"), error
            self.conflicted = True

    def finish(self) -> None:
        for _ in range(STEPS_MAX):
            self.step()
        assert self.ended

    def again(self) -> None:
        """What `with_transaction` does after a conflict."""
        self.session.end_session()
        if self.conflicted:
            try:
                self.store.runner.run(self.store.write_path.execute(self.work))
            except (DataError, UsageError) as error:
                assert error.code in REFUSALS, error
                self.refused = error.code


def permute(
    client: Any,
    database: Any,
    model: type[Document],
    pair: Callable[[Any, Any], list[Write[Any]]],
    stride: int = 1,
) -> list[tuple[Any, list[str | None]]]:
    """Run a pair of writes in many orders; the trees that came of it, with who was refused."""
    store = Store(database, [model])
    store.setup()
    outcomes = []
    lengths = [STEPS_MAX, STEPS_MAX]
    for first in range(0, STEPS_MAX, stride):
        for second in range(0, STEPS_MAX, stride):
            if first > lengths[0] or second > lengths[1]:
                break
            database[model.__treadle__.collection].delete_many({})
            ids = plant(store, model, SHAPE)
            sides = [Side(store, work) for work in pair(store.graph.entry(model), ids)]
            for side, steps in zip(sides, (first, second), strict=True):
                for _ in range(steps):
                    side.step()
            lengths = [
                min(length, steps) if side.ended else length
                for side, steps, length in zip(sides, (first, second), lengths, strict=True)
            ]
            for side in sides:
                side.finish()
            for side in sides:
                side.again()
            outcomes.append((store.verify(), [side.refused for side in sides]))
    return outcomes


def placed(entry: Any, name: str, parent: Any) -> Insert[Any]:
    """The insert of a node below a parent."""
    return Insert(entry, [entry.model(name=name)], {rule_of(entry, HierarchyRule): [Stated(parent)]})


def moves_into_each_other(entry: Any, ids: Any) -> list[Write[Any]]:
    return [Move(tree_of(entry), ids["a"], ids["b1"]), Move(tree_of(entry), ids["b"], ids["a2"])]


def insert_and_remove(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "new", ids["leaf"]), Remove(tree_of(entry), ids["leaf"])]


def insert_and_delete(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "new", ids["leaf"]), Delete(entry, ids["leaf"])]


def insert_and_remove_subtree(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "new", ids["a2"]), RemoveSubtree(tree_of(entry), ids["a"])]


def insert_below_what_moves(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "new", ids["a2"]), Move(tree_of(entry), ids["a"], ids["b"])]


def insert_below_what_is_lifted(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "new", ids["a1"]), RemoveAndLift(tree_of(entry), ids["a1"])]


def move_out_of_what_goes(entry: Any, ids: Any) -> list[Write[Any]]:
    return [Move(tree_of(entry), ids["a1"], ids["b"]), RemoveSubtree(tree_of(entry), ids["a"])]


def move_below_what_is_deleted(entry: Any, ids: Any) -> list[Write[Any]]:
    return [Move(tree_of(entry), ids["a"], ids["leaf"]), Delete(entry, ids["leaf"])]


def same_segment_twice(entry: Any, ids: Any) -> list[Write[Any]]:
    return [placed(entry, "a1", ids["b"]), Move(tree_of(entry), ids["a1"], ids["b"])]


PAIRS = [
    moves_into_each_other,
    insert_and_remove,
    insert_and_delete,
    insert_and_remove_subtree,
    insert_below_what_moves,
    insert_below_what_is_lifted,
    move_out_of_what_goes,
    move_below_what_is_deleted,
    same_segment_twice,
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_two_writes_in_any_order_leave_a_tree(client, database, model, pair):
    short = pair in (insert_and_remove, insert_and_delete)
    outcomes = permute(
        client, database, model, pair, stride=(2 if short else 4) if IS_FULL else (3 if short else 6)
    )
    assert len(outcomes) >= 4
    assert [] == [findings for findings, _ in outcomes if findings]
    if pair is moves_into_each_other:
        # One of the two always has to give way.
        assert {1} == {sum(code == "tree-cycle" for code in refused) for _, refused in outcomes}


@pytest.mark.parametrize(
    "pair", [insert_below_what_moves, moves_into_each_other], ids=lambda pair: pair.__name__
)
@pytest.mark.parametrize("model", [PathedUp, Counted], ids=lambda model: model.__name__)
def test_two_writes_with_several_representations_or_patterns(client, database, model, pair):
    outcomes = permute(client, database, model, pair, stride=7)
    assert [] == [findings for findings, _ in outcomes if findings]


# -- the naive versions, put back ------------------------------------------------------------


def test_without_a_shared_write_two_moves_make_a_cycle(client, database, monkeypatch):
    """In snapshot isolation both commit: they write different documents."""
    monkeypatch.setattr(writes, "lock", lambda tree: iter(()))
    outcomes = permute(client, database, Parented, moves_into_each_other, stride=2)
    assert any(findings for findings, _ in outcomes)


@pytest.mark.parametrize("model", [Array, Parented], ids=lambda model: model.__name__)
def test_without_a_write_of_the_parent_an_insert_is_orphaned(client, database, model, monkeypatch):
    def only_look(tree, keys):
        parents = yield from tree.find({"_id": {"$in": list(keys)}}, tree.projection)
        return writes.require_parents(tree, keys, parents)

    monkeypatch.setattr(inserts, "lock_parents", only_look)
    outcomes = permute(client, database, model, insert_and_delete, stride=2)
    assert any(findings for findings, _ in outcomes)


# -- threads and tasks ---------------------------------------------------------------------------


WRITERS = 4
ROUNDS = 6
NAMES = [f"n{number}" for number in range(8)]


def history(chance: random.Random, ids: list[Any], model: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Some writes that go criss-cross through a tree."""
    chosen: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(ROUNDS):
        kind = chance.choice(["move", "move", "move", "insert", "remove", "lift"])
        node, other = chance.sample(ids, 2)
        if kind == "move":
            chosen.append(("move", (node, chance.choice([other, other, None]))))
        elif kind == "insert":
            chosen.append(("insert", (model(name=f"x{chance.random()}"), node)))
        elif kind == "remove":
            chosen.append(("remove", (node, chance.choice(["refuse", "subtree"]))))
        else:
            chosen.append(("remove", (node, "lift")))
    return chosen


def check(store: Store, model: type[Document], inserted: int, removed: int) -> None:
    assert [] == store.verify()
    assert len(NAMES) + inserted - removed == store.count(model)
    tree = store.tree(model)
    # Every node leads up to a root, which those of a cycle do not.
    reached = sum(1 + tree.count(root.id) for root in tree.roots())
    assert store.count(model) == reached


@pytest.mark.parametrize("model", [*FOUR, PathedUp], ids=lambda model: model.__name__)
def test_threads_that_move_insert_and_remove_leave_a_tree(server, database, model, constants):
    """Each thread has a store of its own, as processes would; subtrees are removed in steps."""
    constants(tree_remove_step=2)
    store = Store(database, [model])
    store.setup()
    tree = store.tree(model)
    ids: list[Any] = []
    for number, name in enumerate(NAMES):
        ids.append(tree.insert(model(name=name), ids[(number - 1) // 2] if number else None).id)
    totals = [0, 0]
    errors: list[BaseException] = []
    barrier = threading.Barrier(WRITERS)

    def write(seed: int) -> None:
        with MongoClient[Any](server.uri) as own:
            mine = Store(own[database.name], [model]).tree(model)
            barrier.wait()
            for call, arguments in history(random.Random(seed), ids, model):
                try:
                    result = getattr(mine, call)(*arguments)
                except (DataError, UsageError) as error:
                    if error.code not in REFUSALS:
                        errors.append(error)
                except BaseException as error:
                    errors.append(error)
                else:
                    totals[0] += call == "insert"
                    totals[1] += result if call == "remove" else 0

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    check(store, model, *totals)


@pytest.mark.parametrize("model", [Array, Listed, Pathed], ids=lambda model: model.__name__)
def test_tasks_of_one_store_leave_a_tree(server, database, model):
    store = Store(database, [model])
    store.setup()
    ids = [store.insert(model(name=name)).id for name in NAMES]

    async def write() -> list[int]:
        from pymongo import AsyncMongoClient

        totals = [0, 0]
        async with AsyncMongoClient[Any](server.uri) as own:
            tree = AsyncStore(own[database.name], [model]).tree(model)

            async def go(seed: int) -> None:
                for call, arguments in history(random.Random(seed + 50), ids, model):
                    try:
                        result: Any = await getattr(tree, call)(*arguments)
                    except (DataError, UsageError) as error:
                        assert error.code in REFUSALS, error
                    else:
                        totals[0] += call == "insert"
                        totals[1] += result if call == "remove" else 0

            await asyncio.gather(*(go(seed) for seed in range(WRITERS)))
        return totals

    check(store, model, *asyncio.run(write()))


def test_inserts_that_share_a_commit_keep_their_own_parents(database):
    """One says its parent in the call, the other in its field."""
    store = Store(database, [Parented])
    store.setup()
    root = store.insert(Parented(name="root"))
    entry = store.graph.entry(Parented)
    works = [placed(entry, "said", root.id), Insert(entry, [Parented(name="held", parent_id=root.id)])]
    store.runner.run(store.write_path.commit(works))
    assert {"said", "held"} == {each.name for each in store.tree(Parented).children(root.id)}


@pytest.mark.parametrize("model", [Array, PathedUp], ids=lambda model: model.__name__)
def test_writers_continue_while_a_tree_gets_its_lines(database, model):
    """Parents that Treadle never saw get arrays or paths, while threads insert and move."""
    nodes = [{"_id": ObjectId(), "name": str(number)} for number in range(80)]
    for number, node in enumerate(nodes):
        node["parent_id"] = nodes[(number - 1) // 3]["_id"] if number else None
    database[model.__treadle__.collection].insert_many(nodes)
    store = Store(database, [model])
    store.setup()
    done = threading.Event()
    errors: list[BaseException] = []

    def write(start: int) -> None:
        tree = Store(database, [model]).tree(model)
        number = start
        while not done.is_set() or number < start + 200:
            number += 50
            try:
                tree.insert(model(name=f"new {number}"), nodes[number % 80]["_id"])
                tree.move(nodes[60 + number % 20]["_id"], nodes[number % 7]["_id"])
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=write, args=(start,)) for start in (1, 2)]
    for thread in threads:
        thread.start()
    store.rebuild(model)
    done.set()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert [] == store.verify()
