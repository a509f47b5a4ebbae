"""Moving and renaming: cost, bounds, what follows from a place, faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import Field
from pymongo import MongoClient

from tests.kit.fault_sweep import Stores, Write
from tests.kit.faults import LOST_REPLIES_OF_WRITES
from tests.kit.tiers import IS_FULL
from tests.patterns.tree.forest import FOUR, Array, Counted, Listed, Parented, Pathed, PathedUp, names, plant
from treadle import (
    AncestorArray,
    Count,
    DataError,
    Document,
    ExtendedReference,
    History,
    Id,
    Limits,
    Store,
    UsageError,
)

SHAPE = {
    "r": {
        "old": {"x": {"x1": {"x11": {}, "x12": {}}, "x2": {"x21": {"x211": {}}}, "x3": {}}},
        "new": {"n1": {}},
    }
}


def planted(run: Any, *models: Any, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    store = run.store(list(models), **options)
    store.setup()
    return store, store.tree(models[-1]), plant(store, models[-1], SHAPE)


# -- one transaction ---------------------------------------------------------------------------------


def test_a_move_by_parents_writes_one_node(heard):
    database, listener = heard
    store = Store(database, [Parented])
    store.setup()
    ids = plant(store, Parented, SHAPE)
    listener.clear()
    store.tree(Parented).move(ids["x"], ids["new"])
    # The lock, the node, the line of the new parent; the parent and the node are written.
    expected = ["update", "find", "aggregate", "findAndModify", "findAndModify", "commitTransaction"]
    assert expected == listener.names
    assert ["r", "new", "x", "x1"] == names(store.tree(Parented).ancestors(ids["x11"]))


@pytest.mark.parametrize("model", [Array, Pathed, PathedUp], ids=lambda model: model.__name__)
def test_more_nodes_than_one_transaction_takes_are_refused(run, database, model):
    """Seven below x; with parents alone no other node is written, so that there is no bound."""
    store, tree, ids = planted(run, model, limits=Limits(tree_move_max=6))
    before = list(database[model.__treadle__.collection].find())
    acts = [lambda: tree.move(ids["x"], ids["new"]), lambda: tree.remove(ids["x"], children="lift")]
    if model is not Array:
        acts.append(lambda: tree.rename(ids["x"], "other"))
    for act in acts:
        with pytest.raises(DataError, match="more than 6 nodes") as caught:
            act()
        assert "tree-move-too-large" == caught.value.code
    assert before == list(database[model.__treadle__.collection].find())
    for child in ("x1", "x2", "x3"):
        tree.move(ids[child], ids["new"])
    tree.move(ids["x"], ids["new"])
    assert [] == store.verify()


def test_fewer_nodes_move_at_once_where_something_follows_from_each(run, constants):
    constants(followed_move_max=6)
    _, tree, ids = planted(run, Counted)
    with pytest.raises(DataError, match="more than 6 nodes"):
        tree.move(ids["x"], ids["new"])
    # Nothing follows from the arrays of these, although their parents are counted.
    store, tree, ids = planted(run, ByParentCounted)
    tree.move(ids["x"], ids["new"])
    assert (1, 2) == (
        store.get(ByParentCounted, ids["old"]).children + 1,
        store.get(ByParentCounted, ids["new"]).children,
    )
    assert [] == store.verify()


class ByParentCounted(Document, collection="by_parent", tree=AncestorArray("parent_id", "ancestors")):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []
    children: Annotated[int, Count("ByParentCounted", by="parent_id")] = 0


def test_a_caller_s_own_transaction_moves_all_at_once(run):
    """When it is aborted nothing has happened."""
    store, tree, ids = planted(run, Array)
    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        tree.move(ids["x"], ids["new"], session=session)
        assert 8 == tree.count(ids["new"], session=session) - 1
        raise ZeroDivisionError
    assert 1 == tree.count(ids["new"])
    with store.transaction() as session:
        tree.move(ids["x"], ids["new"], session=session)
        tree.remove(ids["old"], session=session)
    assert ([], 9) == (store.verify(), tree.count(ids["new"]))


# -- what follows from a place -----------------------------------------------------------------------


def test_other_patterns_follow_the_tree_s_own_fields(run):
    store, tree, ids = planted(run, Counted)
    tree.move(ids["x"], ids["new"])
    seen = {
        each.name: (each.children, each.below, each.parent_name, each.depth) for each in store.find(Counted)
    }
    assert ((0, 0, "r", 1), (2, 9, "r", 1)) == (seen["old"], seen["new"])
    assert (0, 0, "x21", 5) == seen["x211"]
    store.update(Counted, ids["x21"], {"$set": {"name": "renamed"}})
    assert "renamed" == store.get(Counted, ids["x211"]).parent_name
    tree.remove(ids["x21"], children="lift")
    lifted = store.get(Counted, ids["x211"])
    assert ("x2", 4) == (lifted.parent_name, lifted.depth)
    assert [] == store.verify()


class Part(Document, collection="parts", discriminator="kind", tree=AncestorArray("parent_id", "ancestors")):
    name: str = ""
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Box(Part, kind="box"):
    pass


class Label(Part, kind="label"):
    parent_name: Annotated[str | None, ExtendedReference("Part", by="parent_id", field="name")] = None


def test_a_copy_that_only_one_kind_has_follows_a_lift(run):
    """It hangs on the parent's id, which the tree changes in nodes of all kinds."""
    store = run.store([Part, Box, Label])
    store.setup()
    tree = store.tree(Part)
    outer = tree.insert(Box(name="outer"))
    inner = tree.insert(Box(name="inner"), outer.id)
    label = tree.insert(Label(name="label"), inner.id)
    tree.remove(inner.id, children="lift")
    assert "outer" == store.get(Label, label.id).parent_name
    assert [] == store.verify()


class Kept(Document, collection="kept", history=History(), tree=AncestorArray("parent_id", "ancestors")):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


def test_a_new_line_is_a_state_of_each_node_below(run):
    store, tree, ids = planted(run, Kept)
    tree.move(ids["x"], ids["new"])
    states = [state.document.ancestors for state in store.history(Kept, ids["x3"])]
    assert [[ids["r"], ids["new"], ids["x"]], [ids["r"], ids["old"], ids["x"]]] == states
    assert [] == store.verify()


# -- names and cycles --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
def test_a_new_name_reaches_all_paths_below(run, model):
    store, tree, ids = planted(run, model)
    assert "Företag" == tree.rename(ids["r"], "Företag").name
    tree.rename(ids["r"], "ü")
    assert ",ü,old,x,x1," == store.get(model, ids["x1"]).path
    with pytest.raises(UsageError, match=r"rename\(id, segment\)"):
        store.update(model, ids["x"], {"$set": {"name": "other"}})
    stale = store.get(model, ids["x"])
    stale.name = "other"
    with pytest.raises(UsageError, match="rename"):
        store.replace(stale)
    with pytest.raises(DataError, match="siblings"):
        tree.rename(ids["x2"], "x1")
    assert [] == store.verify()


def test_a_move_into_a_cycle_that_was_there_before_is_refused(run, database):
    """Another program's cycle stops no read upwards and no other move."""
    _, tree, ids = planted(run, Parented)
    database["parents"].update_one({"name": "r"}, {"$set": {"parent_id": ids["x11"]}})
    with pytest.raises(UsageError, match="no cycles"):
        tree.move(ids["x"], ids["x11"])
    lone = tree.insert(Parented(name="lone"))
    assert ids["x"] == tree.move(lone.id, ids["x"]).parent_id


@pytest.mark.parametrize("model", [Array, PathedUp], ids=lambda model: model.__name__)
def test_a_parent_without_its_line_yet_is_completed(run, database, model):
    """As before the first rebuild; with paths alone only a rebuild can tell."""
    store, tree, ids = planted(run, model)
    raw = database[model.__treadle__.collection]
    raw.update_many({}, {"$unset": {"ancestors": 1, "path": 1}})
    tree.insert(model(name="late"), ids["x21"])
    tree.move(ids["n1"], ids["x3"])
    store.rebuild(model)
    assert ["r", "old", "x", "x3"] == names(tree.ancestors(ids["n1"]))
    assert [] == store.verify()
    lone = raw.insert_one({"name": "lone", "parent_id": ids["x"]}).inserted_id
    with pytest.raises(DataError) as caught:
        tree.path(lone)
    assert "tree-not-rebuilt" == caught.value.code


class Shallow(
    Document, collection="shallow", validation="strict", tree=AncestorArray("parent_id", "ancestors")
):
    name: str
    parent_id: Id | None = None
    ancestors: Annotated[list[Id], Field(max_length=5)] = []


def test_a_refused_move_changes_nothing(run, database):
    """A node below would be deeper than its validator allows."""
    store, tree, ids = planted(run, Shallow)
    before = list(database["shallow"].find())
    with pytest.raises(Exception, match=r"valid|Shallow"):
        tree.move(ids["old"], ids["n1"])
    assert before == list(database["shallow"].find({}))
    tree.move(ids["x3"], ids["n1"])
    assert [] == store.verify()


def test_ids_that_are_missing(run):
    _, tree, ids = planted(run, Listed)
    for act, code in (
        (lambda: tree.move(ObjectId(), None), "tree-node-missing"),
        (lambda: tree.move(ids["x"], ObjectId()), "tree-parent-missing"),
        (lambda: tree.remove(ObjectId()), "tree-node-missing"),
    ):
        with pytest.raises(DataError) as caught:
            act()
        assert code == caught.value.code


# -- kill -9 and lost replies ------------------------------------------------------------------------

SCENARIOS = {
    "move": lambda store, model, ids: store.tree(model).move(ids["x"], ids["new"]),
    "rename": lambda store, model, ids: store.tree(model).rename(ids["old"], "older"),
    "subtree": lambda store, model, ids: store.tree(model).remove(ids["old"], children="subtree"),
    "lift": lambda store, model, ids: store.tree(model).remove(ids["x"], children="lift"),
    "insert": lambda store, model, ids: store.tree(model).insert(model(name="late"), ids["x2"]),
}
MODELS = {model.__name__: model for model in FOUR}
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
    store = Store(client[database], [MODELS[model]])
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
        """The tree is one, and the next write takes place."""
        fresh = stores.again().sound
        assert [] == fresh.verify()
        fresh.tree(model).insert(model(name="next"), fresh.tree(model).roots().to_list()[0].id)

    return Write(
        f"{model.__name__} {scenario}",
        lambda own: act(own, model, scenario),
        reset=reset,
        check=check,
        read=lambda: outline(store, model),
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "scenario"), CASES if IS_FULL else CASES[::3])
def test_kill_9_at_any_point_leaves_the_tree_as_before_or_after(fault_sweep, model, scenario, record_points):
    stores = fault_sweep.stores("trees", [MODELS[model]])
    write = write_of(stores, MODELS[model], scenario)
    record_points(fault_sweep.kill(stores, write, killed, "trees", model, scenario))


@pytest.mark.heavy
@pytest.mark.parametrize("scenario", ["move", pytest.param("subtree", marks=pytest.mark.all), "insert"])
@pytest.mark.parametrize(
    "model", [Array, pytest.param(Listed, marks=pytest.mark.all)], ids=lambda model: model.__name__
)
def test_a_lost_reply_leaves_a_tree(fault_sweep, model, scenario, record_points):
    """What was acknowledged is there; what raised is there or not."""
    stores = fault_sweep.stores("trees", [model])
    record_points(fault_sweep.strike(stores, write_of(stores, model, scenario), LOST_REPLIES_OF_WRITES))
