"""Several trees in one collection, kept apart by a field."""

from __future__ import annotations

import os
import random
import threading
from datetime import datetime
from typing import Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.patterns.tree.forest import SMALL, Oracle
from treadle import (
    AncestorArray,
    ChildReferences,
    DataError,
    DeclarationError,
    Document,
    Id,
    Limits,
    MaterializedPath,
    ParentReference,
    Store,
    UsageError,
)

WIDE = os.environ.get("TREADLE_HYPOTHESIS") == "wide"
STEPS = 5_000 if WIDE else 40
RACERS = 16
# Trees stay about so large.
NODES = 30


class Array(
    Document,
    collection="arrays",
    tree=AncestorArray(
        parent="parent_id", ancestors="ancestors", order="position", depth="level", within="tenant"
    ),
):
    name: str
    tenant: str | None = None
    parent_id: Id | None = None
    ancestors: list[Id] = []
    position: int = 0
    level: int | None = None


class Pathed(
    Document, collection="paths", tree=MaterializedPath(path="path", segment="name", within="tenant")
):
    name: str
    tenant: str | None = None
    path: str = ""


class PathedUp(
    Document,
    collection="paths_up",
    tree=MaterializedPath(path="path", segment="name", parent="parent_id", order="position", within="tenant"),
):
    name: str
    tenant: str | None = None
    parent_id: Id | None = None
    position: int = 0
    path: str = ""


class Parented(Document, collection="parents", tree=ParentReference(parent="parent_id", within="tenant")):
    name: str
    tenant: str | None = None
    parent_id: Id | None = None


class Listed(Document, collection="lists", tree=ChildReferences(children="children", within="tenant")):
    name: str
    tenant: str | None = None
    children: list[Id] = []


class Turning(
    Document,
    collection="turning",
    tree=[
        ChildReferences(children="children", within="tenant"),
        AncestorArray(parent="parent_id", ancestors="ancestors"),
    ],
):
    name: str
    tenant: str | None = None
    children: list[Id] = []
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Owner(BaseModel):
    number: int | None = None


class Kept(
    Document,
    collection="kept",
    naming="camel",
    soft_delete="deleted_at",
    tree=MaterializedPath(path="path", segment="name", within="owned_by.number"),
):
    """Deleted nodes are kept, and the trees have numbers in a nested field."""

    id: int
    name: str
    path: str = ""
    owned_by: Owner = Owner()
    deleted_at: datetime | None = None


FOUR = [Array, Pathed, Parented, Listed]
ALL = [*FOUR, PathedUp, Turning]
PATHED = (Pathed, PathedUp)
TENANTS = ["acme", "globex"]
NAMES = ["a", "ab", "a.b", "^"]


def of(documents: list[dict[str, Any]], tenant: str) -> dict[Any, dict[str, Any]]:
    return {each["_id"]: each for each in documents if each.get("tenant") == tenant}


def check(store: Any, database: Any, model: Any, oracles: dict[str, Oracle]) -> None:
    """Each tree is what its oracle says, in what is stored and in what is read."""
    documents = list(database[model.__treadle__.collection].find())
    assert len(documents) == sum(len(each.parents) for each in oracles.values())
    for tenant, oracle in oracles.items():
        stored = of(documents, tenant)
        assert oracle.parents.keys() == stored.keys()
        for key, row in stored.items():
            right = {
                "parent_id": oracle.parents[key],
                "ancestors": oracle.above(key),
                "path": oracle.path(key),
                "children": oracle.order[key],
                "level": len(oracle.above(key)),
            }
            shown = {name: value for name, value in right.items() if name in model.model_fields}
            if model is Turning:
                shown["children"] = row["children"]
                assert set(oracle.order[key]) == set(row["children"])
            assert shown == {name: row.get(name) for name in shown}
        if "position" in model.model_fields:
            numbers = [(row["parent_id"], row["position"]) for row in stored.values()]
            assert len(numbers) == len(set(numbers))
        tree = store.tree(model, within=tenant)
        assert set(oracle.order[None]) == {each.id for each in tree.roots()}
        assert oracle.parents.keys() == {each.id for each in tree.walk()}
        assert len(oracle.parents) == tree.count()
    assert [] == store.verify(model)


def pick(chance: random.Random, oracle: Oracle) -> Any:
    return chance.choice([None, *oracle.parents])


def take_step(store: Any, model: Any, chance: random.Random, oracles: dict[str, Oracle]) -> None:
    here, there = chance.sample(TENANTS, 2)
    oracle, other = oracles[here], oracles[there]
    tree = store.tree(model) if chance.random() < 0.5 else store.tree(model, within=here)
    name, parent = chance.choice(NAMES), pick(chance, oracle)
    how = chance.choice(["insert", "insert", "insert", "many", "move", "move", "cross", "remove", "path"])
    if len(oracle.parents) > NODES:
        how = "remove"
    if how == "insert":
        node = model(name=name, tenant=here if parent is None or chance.random() < 0.5 else None)
        if model in PATHED and oracle.taken(parent, name):
            with pytest.raises(DataError, match="tree-segment-taken"):
                tree.insert(node, parent)
            return
        stored = tree.insert(node, parent)
        assert here == stored.tenant
        oracle.add(stored.id, name, parent)
    elif how == "many":
        nodes = [model(name=f"{each}{ObjectId()}", tenant=each) for each in chance.choices(TENANTS, k=4)]
        store.insert_many(nodes)
        for node in nodes:
            oracles[node.tenant].add(node.id, node.name)
    elif how == "cross" and other.parents:
        far = chance.choice(list(other.parents))
        with pytest.raises(UsageError, match="tree-apart"):
            store.tree(model).insert(model(name="x", tenant=here), far)
        if (own := pick(chance, oracle)) is not None:
            with pytest.raises(UsageError, match="tree-apart"):
                store.tree(model).move(own, far)
            with pytest.raises(UsageError, match="tree-apart"):
                store.tree(model, within=there).move(own, None)
    elif how == "move" and (own := pick(chance, oracle)) is not None:
        if parent is not None and (parent == own or own in oracle.above(parent)):
            with pytest.raises(UsageError, match="tree-cycle"):
                tree.move(own, parent)
        elif model in PATHED and oracle.taken(parent, oracle.names[own], own):
            with pytest.raises(DataError, match="tree-segment-taken"):
                tree.move(own, parent)
        else:
            tree.move(own, parent)
            oracle.move(own, parent)
    elif how == "remove" and (own := pick(chance, oracle)) is not None and len(oracle.parents) > 6:
        for each in sorted(oracle.below(own), key=lambda node: -len(oracle.above(node))):
            oracle.drop(each)
        oracle.drop(own)
        tree.remove(own, children="subtree")
    elif how == "path":
        names = [f"p{chance.randrange(3)}", "q"]
        found = tree.find_or_create_path([model(name=each, tenant=here) for each in names], by="name")
        above = None
        for node in found:
            if node.id not in oracle.parents:
                oracle.add(node.id, node.name, above)
            assert here == node.tenant
            assert oracle.parents[node.id] == above
            above = node.id


@pytest.mark.parametrize("model", ALL)
def test_any_history_keeps_each_tree_as_its_oracle_says(database, model):
    """Moves, removals and paths of one tree go in chunks too, and never reach into the other."""
    chance = random.Random(19)
    stores = [Store(database, [model], limits=limits) for limits in (Limits(), SMALL)]
    stores[0].setup()
    oracles = {tenant: Oracle() for tenant in TENANTS}
    for number in range(STEPS):
        take_step(chance.choice(stores), model, chance, oracles)
        if number % 12 == 0:
            check(stores[0], database, model, oracles)
    check(stores[0], database, model, oracles)
    assert all(len(oracle.parents) > 3 for oracle in oracles.values())


@pytest.mark.parametrize("model", FOUR)
def test_calls_see_one_tree(run, database, model):
    """Reads of a handle with `within` end where the tree ends; one without sees all trees."""
    store = run.store([model])
    store.setup()
    tops, subs = {}, {}
    for tenant in TENANTS:
        tree = store.tree(model, within=tenant)
        tops[tenant] = tree.insert(model(name="top"))
        subs[tenant] = tree.insert(model(name="sub"), tops[tenant].id)
        assert tenant == tops[tenant].tenant == subs[tenant].tenant
    acme, globex = TENANTS
    both, tree = store.tree(model), store.tree(model, within=acme)
    assert {each.id for each in tops.values()} == {each.id for each in list(both.roots())}
    assert {tops[acme].id} == {each.id for each in list(tree.roots())}
    assert [tops[acme].id, subs[acme].id] == [each.id for each in list(tree.walk())]
    assert 4 == len(list(both.walk()))
    assert 4 == both.count()
    assert 2 == tree.count()
    assert [subs[acme].id] == [each.id for each in list(tree.leaves())]
    assert [] == list(both.siblings(tops[acme].id))
    assert [] == list(tree.children(tops[globex].id))
    assert [subs[globex].id] == [each.id for each in list(both.descendants(tops[globex].id))]
    assert ["top"] == [each.name for each in both.ancestors(subs[globex].id)]
    assert subs[globex].id == both.nested(tops[globex].id).children[0].node.id
    assert both.common_ancestor(subs[acme].id, subs[globex].id) is None
    with pytest.raises(DataError, match="tree-node-missing"):
        tree.path(subs[globex].id)
    with pytest.raises(UsageError, match="tree-apart"):
        tree.remove(tops[globex].id, children="subtree")
    with pytest.raises(UsageError, match="tree-apart"):
        tree.insert(model(name="x", tenant=globex))
    same = tree.find_or_create_path([model(name="top"), model(name="sub"), model(name="new")], by="name")
    assert [tops[acme].id, subs[acme].id] == [each.id for each in same[:2]]
    assert acme == same[2].tenant
    with pytest.raises(UsageError, match="tree-apart"):
        both.find_or_create_path([model(name="n", tenant=globex)], parent=tops[acme].id, by="name")
    assert [] == store.verify(model)


@pytest.mark.parametrize("model", FOUR)
def test_nobody_moves_a_node_into_another_tree_by_a_plain_write(run, database, model):
    store = run.store([model])
    store.setup()
    own = store.tree(model).insert(model(name="own", tenant="acme"))
    with pytest.raises(UsageError, match="stays in its tree"):
        store.update(model, own.id, {"$set": {"tenant": "globex"}})
    with pytest.raises(UsageError, match="stays in its tree"):
        store.update_many(model, {}, {"$set": {"tenant": "globex"}})
    with pytest.raises(UsageError, match="tree-replace-moves"):
        store.replace(own.model_copy(update={"tenant": "globex"}))
    store.replace(own)
    assert "acme" == store.get(model, own.id).tenant


def test_a_batch_finds_its_trees(database):
    """Nodes of a batch take their tree from each other, or from a parent that is stored, in any order."""
    store = Store(database, [Array], limits=Limits(tree_flat_max=2))
    store.setup()
    stored = store.insert(Array(name="stored", tenant="globex"))
    top = Array(name="top", tenant="acme")
    sub = Array(name="sub", parent_id=top.id)
    low = Array(name="low", parent_id=sub.id)
    far = Array(name="far", parent_id=stored.id)
    none = Array(name="none")
    store.insert_many([low, far, none, sub, top])
    tenants = {each.name: each.tenant for each in store.find(Array)}
    assert {
        "stored": "globex",
        "top": "acme",
        "sub": "acme",
        "low": "acme",
        "far": "globex",
        "none": None,
    } == tenants
    with pytest.raises(UsageError, match="tree-apart"):
        store.insert_many(
            [top := Array(name="t", tenant="acme"), Array(name="s", tenant="x", parent_id=top.id)]
        )
    with pytest.raises(UsageError, match="tree-apart"):
        store.insert(Array(name="s", tenant="acme", parent_id=stored.id))
    assert 6 == store.count(Array)
    assert [] == store.verify(Array)


@pytest.mark.parametrize("model", FOUR)
def test_a_parent_in_another_tree_is_a_finding(database, model):
    """Whatever another writer mixed up is named; `repair` makes such a node a root of its own tree."""
    store = Store(database, [model])
    store.setup()
    tree = store.tree(model)
    tops = {each: tree.insert(model(name=each, tenant=each)) for each in TENANTS}
    sub = tree.insert(model(name="sub", tenant="acme"), tops["acme"].id)
    leaf = tree.insert(model(name="leaf"), sub.id)
    database[model.__treadle__.collection].update_one({"_id": sub.id}, {"$set": {"tenant": "globex"}})
    found = store.verify(model)
    # With child lists it is the list that names a stranger; otherwise the node, and what is below it.
    assert found
    assert {each.model for each in found} == {model.__name__}
    assert {sub.id, leaf.id, tops["acme"].id} >= {each.document_id for each in found}
    store.repair(model)
    assert [] == store.verify(model)
    if model is not Listed:
        assert {tops["globex"].id, sub.id} == {each.id for each in store.tree(model, within="globex").roots()}
    assert "globex" == store.get(model, sub.id).tenant
    assert "acme" == store.get(model, leaf.id).tenant
    store.rebuild(model)
    assert [] == store.verify(model)


@pytest.mark.parametrize("model", [Array, Pathed, Parented, Listed])
def test_moves_of_two_trees_do_not_meet(database, model):
    """Sixteen racers, half in each tree: each tree is a tree, and no lock is shared."""
    store = Store(database, [model])
    store.setup()
    tree = store.tree(model)
    nodes = {
        tenant: [tree.insert(model(name=f"n{number}", tenant=tenant)).id for number in range(5)]
        for tenant in TENANTS
    }
    failures: list[Exception] = []

    def race(number: int) -> None:
        chance, own = random.Random(number), nodes[TENANTS[number % 2]]
        for _ in range(3):
            one, other = chance.sample(own, 2)
            try:
                tree.move(one, other)
            except UsageError as error:
                if error.code != "tree-cycle":
                    failures.append(error)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(RACERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [] == failures
    assert [] == store.verify(model)
    for tenant in TENANTS:
        assert set(nodes[tenant]) == {each.id for each in store.tree(model, within=tenant).walk()}
    locks = {each["_id"]["tree"] for each in database["treadle.trees"].find()}
    assert set(TENANTS) == locks


def test_a_move_waits_for_no_move_in_another_tree(database):
    """A transaction that holds the lock of one tree is in nobody's way in the other."""
    store = Store(database, [Parented])
    store.setup()
    tree = store.tree(Parented)
    acme = [tree.insert(Parented(name=str(each), tenant="acme")).id for each in range(2)]
    globex = [tree.insert(Parented(name=str(each), tenant="globex")).id for each in range(2)]
    for one, other in (acme, globex):
        # Each has a lock.
        tree.move(one, other)
        tree.move(one, None)
    with store.transaction() as session:
        tree.move(acme[0], acme[1], session=session)
        done: list[Any] = []
        other = threading.Thread(target=lambda: done.append(tree.move(globex[0], globex[1])))
        other.start()
        other.join(60)
        assert [globex[1]] == [each.parent_id for each in done]
    assert acme[1] == store.get(Parented, acme[0]).parent_id


def test_a_large_move_is_finished_in_its_own_tree(database):
    """What a killed process left of a move in one tree stops nobody in another, and `recover` ends it."""
    store = Store(database, [Pathed], limits=SMALL)
    store.setup()
    trees = {tenant: store.tree(Pathed, within=tenant) for tenant in TENANTS}
    tops = {}
    for tenant, tree in trees.items():
        tops[tenant] = tree.insert(Pathed(name="top")).id
        for number in range(6):
            tree.insert(Pathed(name=f"n{number}"), tops[tenant])
        tree.insert(Pathed(name="other"))
    # As after the first transaction of a move: the node has its new path, all below it the old one.
    database["paths"].update_one({"_id": tops["acme"]}, {"$set": {"path": ",new,", "name": "new"}})
    owed = {"kind": "move", "node": tops["acme"], "from": None, "to": None, "path_from": ",top,"}
    owed |= {"segment": "new", "token": ObjectId(), "done": 0}
    lock = {"collection": "paths", "tree": "acme"}
    database["treadle.trees"].update_one({"_id": lock}, {"$set": {"owed": owed}}, upsert=True)
    trees["globex"].rename(tops["globex"], "top2")
    assert owed["token"] == database["treadle.trees"].find_one({"_id": lock})["owed"]["token"]
    with pytest.raises(DataError, match="tree-busy"), store.transaction():
        trees["acme"].insert(Pathed(name="top"))
    assert 1 == Store(database, [Pathed], limits=SMALL).recover()
    assert "owed" not in database["treadle.trees"].find_one({"_id": lock})
    paths = {each.path for each in trees["acme"].walk()}
    assert {",new,", ",other,", *(f",new,n{number}," for number in range(6))} == paths
    assert [] == store.verify(Pathed)


def test_paths_are_unique_per_tree_and_among_the_living(run, database):
    store = run.store([Kept])
    store.setup()
    for number in (1, 2):
        tree = store.tree(Kept, within=number)
        tree.insert(Kept(id=number * 10, name="top"))
        tree.insert(Kept(id=number * 10 + 1, name="sub"), number * 10)
        with pytest.raises(DataError, match="tree-segment-taken"):
            tree.insert(Kept(id=number * 10 + 2, name="sub"), number * 10)
    store.delete(Kept, 11)
    store.tree(Kept).move(21, None)
    assert ",top,sub," == store.restore(Kept, 11).path
    assert [10, 11] == [each.id for each in list(store.tree(Kept, within=1).walk())]
    assert {"ownedBy.number", "path"} <= {
        key for index in database["kept"].list_indexes() for key in index["key"] if index.get("unique")
    }
    assert [] == store.verify(Kept)


def test_an_order_of_siblings_is_each_trees_own(database):
    store = Store(database, [Array])
    store.setup()
    both = store.tree(Array)
    acme = both.insert(Array(name="1", tenant="acme"))
    globex = both.insert(Array(name="1", tenant="globex"))
    assert acme.position == globex.position
    zero = both.insert(Array(name="0"), before=acme.id)
    assert "acme" == zero.tenant
    assert zero.position < acme.position
    with pytest.raises(UsageError, match="tree-apart"):
        both.insert(Array(name="0", tenant="globex"), before=acme.id)
    with pytest.raises(UsageError, match="tree-apart"):
        both.move(globex.id, after=acme.id)
    database["arrays"].update_many({}, {"$set": {"position": 7}})
    (finding,) = store.verify(Array)
    assert finding.document_id in (zero.id, acme.id)
    store.repair(Array)
    assert [] == store.verify(Array)


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (ParentReference(parent="parent_id", within="tenent"), "tree-field-missing"),
        (ParentReference(parent="parent_id", within=3), "tree-field-missing"),  # type: ignore[arg-type]
        (ParentReference(parent="parent_id", within="id"), "tree-field-type"),
        (ParentReference(parent="parent_id", within="tags"), "tree-field-type"),
        (ParentReference(parent="parent_id", within="parent_id"), "tree-field-type"),
    ],
)
def test_a_field_that_cannot_keep_trees_apart_is_refused(database, pattern, code):
    class Node(Document, collection="nodes", tree=pattern):
        parent_id: Id | None = None
        tenant: str = ""
        tags: list[str] = []

    with pytest.raises(DeclarationError) as caught:
        Store(database, [Node])
    assert code == caught.value.code


@pytest.mark.parametrize("value", [["acme"], {"$gt": ""}, 3])
def test_a_tree_is_named_as_its_field_stores_it(run, value):
    with pytest.raises(UsageError, match="tree-apart"):
        run.store([Array]).tree(Array, within=value)


@pytest.mark.parametrize("nodes", [None, "a", 3])
def test_a_path_is_a_list_of_nodes(run, nodes):
    with pytest.raises(UsageError, match="model-unknown"):
        run.store([Array]).tree(Array).find_or_create_path(nodes, by="name")


def test_one_tree_takes_no_within(run, database):
    class Node(Document, collection="nodes", tree=ParentReference(parent="parent_id")):
        parent_id: Id | None = None

    with pytest.raises(UsageError, match="tree-apart"):
        run.store([Node]).tree(Node, within="acme")
