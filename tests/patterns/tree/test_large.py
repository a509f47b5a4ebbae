"""Subtrees that are too large for one transaction: what readers, inserts and a crash meet on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field
from pymongo import MongoClient

from tests.kit.fault_sweep import Stores, Write
from tests.kit.faults import LOST_REPLIES_OF_WRITES
from tests.kit.tiers import IS_FULL
from tests.patterns.tree.forest import (
    FOUR,
    SMALL,
    Array,
    Counted,
    Listed,
    Parented,
    Pathed,
    PathedUp,
    Turning,
    limits_of,
    names,
    plant,
    tree_of,
)
from treadle import DataError, Document, ExtendedReference, Id, MaterializedPath, Store, UsageError
from treadle.patterns.tree import state
from treadle.patterns.tree.moves import Move
from treadle.patterns.tree.pace import Pace
from treadle.patterns.tree.removes import Remove
from treadle.patterns.tree.unfinished import chunk, finish

SHAPE = {
    "r": {
        "old": {"x": {"x1": {"x11": {}, "x12": {}}, "x2": {"x21": {"x211": {}}}, "x3": {}}},
        "new": {"n1": {}},
    }
}
MOVED = ["x1", "x11", "x12", "x2", "x21", "x211", "x3"]
# With these a move of x goes in chunks; the others write x alone.
REWRITING = [Array, Pathed, PathedUp, Turning, Counted]


def begun(store: Any, model: type[Document], node: Any, parent: Any) -> Any:
    """Only the first transaction of a large move; the token of the pending rest."""
    work = Move(tree_of(store.graph.entry(model)), node, parent)
    store.runner.run(store.write_path.execute(work))
    assert work.token is not None
    return store.runner.run(state.pending(tree_of(store.graph.entry(model))))["token"]


@pytest.mark.parametrize("model", REWRITING, ids=lambda model: model.__name__)
def test_between_chunks_a_node_has_old_or_new_ancestors_and_verify_names_the_old(database, model):
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    tree, inner = store.tree(model), tree_of(store.graph.entry(model))
    token = begun(store, model, ids["x"], ids["new"])
    server = store._capabilities()
    role = "ancestors" if inner.ancestors else "path"
    ended, rounds = False, 0
    while not ended:
        documents = {each["name"]: each for each in database[inner.entry.collection].find()}
        still_old = set()
        for name in MOVED:
            if inner.ancestors:
                above = documents[name]["ancestors"]
                assert (ids["old"] in above) != (ids["new"] in above)
                is_old = ids["old"] in above
            else:
                is_old = documents[name]["path"].startswith(",r,old,x,")
                assert is_old or documents[name]["path"].startswith(",r,new,x,")
            still_old |= {ids[name]} if is_old else set()
        found = {each.document_id for each in store.verify() if each.path == inner.roles[role]}
        if model is not Pathed:
            assert still_old == found
        else:
            # Without parents, only the topmost ones show that their parent is missing.
            assert bool(still_old) == bool(found)
        ended = store.runner.transact(lambda: chunk(inner, store.graph, server, token, Pace(2)))
        rounds += 1
    assert rounds > 3
    assert ["r", "new", "x", "x2", "x21"] == names(tree.ancestors(ids["x211"]))
    assert [] == store.verify()
    assert None is store.runner.run(state.pending(inner))


@pytest.mark.parametrize("model", REWRITING, ids=lambda model: model.__name__)
def test_what_is_inserted_meanwhile_moves_along(database, model):
    """Below a node that has been moved, below one that has not, and below the moved one itself."""
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    tree, inner = store.tree(model), tree_of(store.graph.entry(model))
    token = begun(store, model, ids["x"], ids["new"])
    server = store._capabilities()
    count = 0
    while True:
        for name in ("x", "x11", "x211", "x3", "n1", "old"):
            # Also at places that the chunks have passed already.
            if count < 3:
                tree.insert(model(name=f"new {name} {count}"), ids[name])
        count += 1
        if store.runner.transact(lambda: chunk(inner, store.graph, server, token, Pace(2))):
            break
    assert [] == store.verify()
    assert 3 * 4 == sum(name.startswith("new x") for name in names(tree.descendants(ids["new"])))
    assert 3 == tree.count(ids["old"])


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
@pytest.mark.parametrize("root", [False, True], ids=["inner", "root"])
def test_nobody_takes_the_old_path_while_descendants_still_have_it(database, model, root):
    """A new node there would seem to have them, and would be moved with them."""
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE if not root else {**SHAPE["r"]["old"], "new": {}, "old": {}})
    tree = store.tree(model)
    begun(store, model, ids["x"], ids["new"])
    place = None if root else ids["old"]
    stranger = model(name="x")
    if not root:
        setattr(stranger, *(("path", ",r,old,x,") if model is Pathed else ("parent_id", place)))
    with pytest.raises(DataError) as caught, store.transaction() as session:
        store.insert(stranger, session=session)
    assert "tree-busy" == caught.value.code
    if not root:
        with pytest.raises(DataError, match="in progress"), store.transaction() as session:
            store.delete(model, ids["old"], session=session)
    # Outside of a transaction a write ends the move first: whoever began it may be dead.
    store.insert(stranger)
    assert [] == store.verify()
    assert len(MOVED) == tree.count(ids["x"])


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
def test_the_old_parent_of_a_move_that_nobody_ends_can_be_deleted(run, database, model):
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    mine = run.store([model], limits=SMALL)
    begun(store, model, ids["x"], ids["new"])
    assert "old" == mine.delete(model, ids["old"]).name
    assert [] == mine.verify()


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
@pytest.mark.parametrize("parent", ["x", "x2"])
def test_a_segment_is_taken_also_while_its_owner_has_not_moved_yet(database, model, parent):
    """Else the owner could never be moved, and no other move could ever begin."""
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    tree, inner = store.tree(model), tree_of(store.graph.entry(model))
    token = begun(store, model, ids["x"], ids["new"])
    child = "x1" if parent == "x" else "x21"
    ended = False
    while not ended:
        with pytest.raises(DataError) as caught:
            tree.insert(model(name=child), ids[parent])
        assert "tree-segment-taken" == caught.value.code
        ended = store.runner.transact(
            lambda: chunk(inner, store.graph, store._capabilities(), token, Pace(2))
        )
    tree.move(ids["n1"], ids["x1"])
    assert [] == store.verify()


@pytest.mark.parametrize("model", REWRITING, ids=lambda model: model.__name__)
def test_repair_ends_a_large_move_before_it_derives_anything(run, database, model):
    """Where paths are all there is, what has not moved yet would seem to have lost its parent."""
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    mine = run.store([model], limits=SMALL)
    begun(store, model, ids["x"], ids["new"])
    mine.repair()
    assert [] == mine.verify()
    assert ["r", "new", "x", "x2", "x21"] == names(store.tree(model).ancestors(ids["x211"]))
    assert len(MOVED) == store.tree(model).count(ids["x"])


class Heavy(
    Document,
    collection="heavy",
    validation="strict",
    tree=MaterializedPath(path="path", segment="name", parent="parent_id"),
):
    name: str
    weight: Annotated[int, Field(le=10)] = 1
    parent_id: Id | None = None
    path: str = ""


def test_a_node_that_cannot_be_written_does_not_stop_a_large_move(server):
    """It is named by verify and set aside; the others move, and so does the tree afterwards."""
    with MongoClient[Any](server.uri) as client:
        client.drop_database("trees_heavy")
        store = Store(client["trees_heavy"], [Heavy], limits=SMALL)
        store.setup()
        ids = plant(store, Heavy, SHAPE)
        raw = client["trees_heavy"].command
        raw("update", "heavy", bypassDocumentValidation=True,
            updates=[{"q": {"name": "x12"}, "u": {"$set": {"weight": 11}}}])  # fmt: skip
        tree = store.tree(Heavy)
        tree.move(ids["x"], ids["new"])
        assert [ids["x12"]] == [each.document_id for each in store.verify() if each.path == "path"]
        assert 1 == client["trees_heavy"]["treadle.set_aside"].count_documents({})
        tree.move(ids["n1"], ids["old"])
        tree.insert(Heavy(name="x4"), ids["x"])
        raw("update", "heavy", updates=[{"q": {"name": "x12"}, "u": {"$set": {"weight": 1}}}])
        store.repair()
        assert [] == store.verify()
        assert ["r", "new", "x", "x1"] == names(tree.ancestors(ids["x12"]))
        client.drop_database("trees_heavy")


# -- large removals that cannot be ended ------------------------------------------------------


class Shop(Document, collection="shops"):
    node_id: Id
    name: Annotated[
        str | None, ExtendedReference("Parented", by="node_id", field="name", on_delete="restrict")
    ] = None


@pytest.mark.parametrize("late", [False, True], ids=["before", "meanwhile"])
def test_a_node_that_must_stay_stops_a_large_removal_and_nothing_else(server, late, monkeypatch):
    """Before the first chunk, or, where the reference came later, as soon as it is met."""
    if late:
        monkeypatch.setattr(Remove, "_refuse_restricted", lambda self: iter(()))
    with MongoClient[Any](server.uri) as client:
        client.drop_database("trees_kept")
        store = Store(client["trees_kept"], [Parented, Shop], limits=SMALL)
        store.setup()
        ids = plant(store, Parented, SHAPE)
        shop = store.insert(Shop(node_id=ids["x2"]))
        tree = store.tree(Parented)
        with pytest.raises(DataError, match="refers to it"):
            tree.remove(ids["old"], children="subtree")
        kept = {"r", "old", "x", "x2", "new", "n1"}
        assert (kept if late else {*kept, *MOVED}) <= set(names(store.find(Parented)))
        assert [] == store.verify()
        tree.move(ids["n1"], ids["r"])
        store.delete(Shop, shop.id)
        tree.remove(ids["old"], children="subtree")
        assert {"r", "new", "n1"} == set(names(store.find(Parented)))
        client.drop_database("trees_kept")


@pytest.mark.parametrize("bound", [2, 1000], ids=["chunked", "whole"])
@pytest.mark.parametrize("model", [Parented, Listed, Array], ids=lambda model: model.__name__)
def test_a_cycle_of_raw_writes_brings_a_removal_to_no_endless_loop(server, model, bound):
    with MongoClient[Any](server.uri) as client:
        client.drop_database("trees_cycle")
        store = Store(client["trees_cycle"], [model], limits=limits_of(bound))
        store.setup()
        ids = plant(store, model, {"r": {"a": {"b": {"c": {"d": {}}}}}})
        nodes = store.collection(model)
        if model is Listed:
            nodes.update_one({"_id": ids["r"]}, {"$set": {"children": []}})
            nodes.update_one({"_id": ids["d"]}, {"$set": {"children": [ids["a"]]}})
        else:
            nodes.update_one({"_id": ids["a"]}, {"$set": {"parent_id": ids["d"]}})
        tree = store.tree(model)
        if bound > 2:
            assert 4 == tree.remove(ids["a"], children="subtree")
            assert [] == store.verify()
        else:
            with pytest.raises(DataError, match=r"each other's ancestors.*repair"):
                tree.remove(ids["a"], children="subtree")
        tree.insert(model(name="late"), ids["r"])
        store.repair()
        assert [] == store.verify()
        client.drop_database("trees_cycle")


@pytest.mark.parametrize("model", REWRITING, ids=lambda model: model.__name__)
def test_a_second_move_ends_the_first(database, model):
    """Or its check for cycles would use ancestors that are no longer true."""
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    begun(store, model, ids["x"], ids["n1"])
    with pytest.raises(UsageError) as caught:
        store.tree(model).move(ids["new"], ids["x211"])
    assert "tree-cycle" == caught.value.code
    store.tree(model).move(ids["x2"], ids["old"])
    assert [] == store.verify()


@pytest.mark.parametrize("model", REWRITING, ids=lambda model: model.__name__)
def test_a_new_store_ends_what_another_left(run, database, model):
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    begun(store, model, ids["x"], ids["new"])
    assert store.verify()
    fresh = run.store([model], limits=SMALL)
    assert [] == fresh.verify()
    assert 0 == fresh.recover()


def test_a_caller_s_own_transaction_moves_all_at_once(run, database):
    """Nothing can be left for later there; and when it is aborted nothing has happened."""
    store = run.store([Array], limits=SMALL)
    store.setup()
    ids = plant(store, Array, SHAPE)
    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        store.tree(Array).move(ids["x"], ids["new"], session=session)
        assert 8 == store.tree(Array).count(ids["new"], session=session) - 1
        raise ZeroDivisionError
    assert 1 == store.tree(Array).count(ids["new"])
    with store.transaction() as session:
        store.tree(Array).move(ids["x"], ids["new"], session=session)
        store.tree(Array).remove(ids["old"], session=session)
    assert [] == store.verify()
    assert 9 == store.tree(Array).count(ids["new"])


# -- large lifts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*REWRITING, Parented], ids=lambda model: model.__name__)
def test_a_large_lift_goes_in_chunks_with_what_is_inserted_meanwhile(database, model):
    store = Store(database, [model], limits=SMALL)
    store.setup()
    ids = plant(store, model, SHAPE)
    tree, inner = store.tree(model), tree_of(store.graph.entry(model))
    work = Remove(tree_of(store.graph.entry(model)), ids["x"], "lift")
    store.runner.run(store.write_path.execute(work))
    assert work.token is not None
    count, pace, ended = 0, Pace(2), False
    while not ended:
        if count < 3:
            for name in ("x", "x1", "x211"):
                tree.insert(model(name=f"new {name} {count}"), ids[name])
        count += 1
        ended = store.runner.transact(
            lambda: chunk(inner, store.graph, store._capabilities(), work.token, pace)
        )
    assert count > 3
    assert [] == store.verify()
    assert 1 == store.runner.run(state.outcome(inner, work.token))
    assert {"x1", "x2", "x3", "new x 0", "new x 1", "new x 2"} == set(names(tree.children(ids["old"])))
    assert ["r", "old", "x2", "x21"] == names(tree.ancestors(ids["x211"]))
    assert len(MOVED) + 9 == tree.count(ids["old"])
    if model is Turning:
        assert ["x1", "x2", "x3"] == names(tree.children(ids["old"]))[:3]


@pytest.mark.parametrize("other", ["x2", "x"], ids=["sibling", "self"])
@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
def test_a_large_lift_that_would_meet_another_segment_changes_nothing(run, database, model, other):
    store = run.store([model], limits=SMALL)
    store.setup()
    ids = plant(Store(database, [model], limits=SMALL), model, SHAPE)
    store.tree(model).insert(model(name=other), ids["old"] if other == "x2" else ids["x"])
    before = list(database[model.__treadle__.collection].find())
    with pytest.raises(DataError) as caught:
        store.tree(model).remove(ids["x"], children="lift")
    assert "tree-segment-taken" == caught.value.code
    assert [each["path"] for each in before] == [
        each["path"] for each in database[model.__treadle__.collection].find()
    ]
    store.tree(model).move(ids["x"], ids["new"])


# -- kill -9 ---------------------------------------------------------------------------------------

SCENARIOS = {
    "move": lambda store, model, ids: store.tree(model).move(ids["x"], ids["new"]),
    "rename": lambda store, model, ids: store.tree(model).rename(ids["old"], "older"),
    "subtree": lambda store, model, ids: store.tree(model).remove(ids["old"], children="subtree"),
    "lift": lambda store, model, ids: store.tree(model).remove(ids["x"], children="lift"),
    "insert": lambda store, model, ids: store.tree(model).insert(model(name="late"), ids["x2"]),
    "delete": lambda store, model, ids: store.delete(model, ids["x3"]),
}
MODELS = {model.__name__: model for model in [*FOUR, Turning]}
CASES = [
    (model.__name__, scenario)
    for model in FOUR
    for scenario in SCENARIOS
    if scenario != "rename" or model is Pathed
]


def act(store: Store, model: type[Document], scenario: str) -> None:
    """One write on the tree of SHAPE, found by its names."""
    ids = {each["name"]: each["_id"] for each in store.collection(model).find()}
    SCENARIOS[scenario](store, model, ids)


def killed(client: MongoClient[Any], database: str, model: str, scenario: str) -> Callable[[], Any]:
    """In a process of its own: one write."""
    store = Store(client[database], [MODELS[model]], limits=SMALL)
    store.recover()
    return lambda: act(store, MODELS[model], scenario)


def outline(store: Store, model: type[Document]) -> set[tuple[str, ...]]:
    """The tree, as the names on the way to each node."""
    tree = store.tree(model)
    return {tuple(names(tree.path(each["_id"]))) for each in store.collection(model).find({}, {"_id": 1})}


def write_of(stores: Stores, model: type[Document], scenario: str) -> Write:
    store = stores.sound
    plant(store, model, SHAPE)
    documents = list(store.collection(model).find())

    def reset() -> None:
        store.collection(model).delete_many({})
        store.collection(model).insert_many(documents)

    def check(acknowledged: bool) -> None:
        """There is no work left, and the next write goes on from here."""
        fresh = stores.again().sound
        assert [] == fresh.verify()
        assert None is fresh.runner.run(state.pending(tree_of(fresh.graph.entry(model))))
        fresh.tree(model).insert(model(name="next"), fresh.tree(model).roots().to_list()[0].id)

    return Write(
        f"{model.__name__} {scenario}",
        lambda own: act(own, model, scenario),
        reset=reset,
        check=check,
        read=lambda: outline(store, model),
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "scenario"), CASES if IS_FULL else CASES[::2])
def test_kill_9_at_any_point_and_recovery_ends_it(fault_sweep, model, scenario, record_points):
    """Afterwards the tree is as before the write or as after it; nothing is in between or pending."""
    stores = fault_sweep.stores("trees", [MODELS[model]], SMALL)
    write = write_of(stores, MODELS[model], scenario)
    record_points(fault_sweep.kill(stores, write, killed, "trees", model, scenario))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "scenario", ["move", pytest.param("subtree", marks=pytest.mark.all), "insert", "delete"]
)
@pytest.mark.parametrize(
    "model", [Array, pytest.param(Listed, marks=pytest.mark.all)], ids=lambda model: model.__name__
)
def test_a_lost_reply_leaves_a_tree(fault_sweep, model, scenario, record_points):
    """What was acknowledged is there; what raised is there or not; the next write finishes what is pending."""
    stores = fault_sweep.stores("trees", [model], SMALL)
    record_points(fault_sweep.strike(stores, write_of(stores, model, scenario), LOST_REPLIES_OF_WRITES))


def test_finishing_twice_changes_nothing(database):
    store = Store(database, [Array], limits=SMALL)
    store.setup()
    ids = plant(store, Array, SHAPE)
    begun(store, Array, ids["x"], ids["new"])
    tree = tree_of(store.graph.entry(Array))
    store.runner.run(finish(tree, store.graph, store._capabilities()))
    documents = list(store.collection(Array).find())
    store.runner.run(finish(tree, store.graph, store._capabilities()))
    assert documents == list(store.collection(Array).find())
    assert Listed not in REWRITING
