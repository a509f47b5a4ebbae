"""Siblings in an order of their own, sorted by a field; stored depth; nodes of several kinds."""

from __future__ import annotations

import random
import threading
from typing import Annotated, Any

import pytest
from bson import Decimal128

from treadle import (
    AncestorArray,
    ChildReferences,
    Count,
    DataError,
    DeclarationError,
    Document,
    MaterializedPath,
    ParentReference,
    Store,
    UsageError,
)

STEPS = 70
RACES = 8


class Step(
    Document,
    collection="steps",
    tree=AncestorArray(parent="parent_id", ancestors="ancestors", order="position", depth="depth"),
):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []
    position: int = 0
    depth: int | None = None


class Chapter(
    Document,
    collection="chapters",
    tree=MaterializedPath(path="path", segment="name", parent="parent_id", order="position", depth="depth"),
):
    id: int
    name: str = ""
    path: str = ""
    parent_id: int | None = None
    position: int = 0
    depth: int | None = None


class Plain(Document, collection="plain", tree=ParentReference(parent="parent_id", order="position")):
    id: int
    parent_id: int | None = None
    position: int = 0


MODELS: list[Any] = [Step, Chapter, Plain]


def new(model: Any, number: int) -> Any:
    return model(id=number, **({"name": f"n{number}"} if model is Chapter else {}))


def shape(store: Any, model: Any, key: Any = None) -> Any:
    """The tree as nested lists of ids, in the order in which siblings are read."""
    tree = store.tree(model)
    below = tree.roots() if key is None else tree.children(key)
    return [(each.id, shape(store, model, each.id)) for each in list(below)]


def check(store: Any, database: Any, model: Any, expected: Any) -> None:
    assert expected == shape(store, model)
    rows = list(database[model.__treadle__.collection].find())
    assert len(rows) == len({(row.get("parent_id"), row["position"]) for row in rows})
    walked = [each.id for each in list(store.tree(model).walk())]
    assert walked == flat(expected)
    assert [] == store.verify(model)


def flat(nodes: Any) -> list[int]:
    return [each for key, below in nodes for each in [key, *flat(below)]]


class Model:
    """The same tree in plain Python: a list of children per node, in their order."""

    def __init__(self) -> None:
        self.children: dict[Any, list[int]] = {None: []}

    def parent(self, key: int) -> Any:
        return next(parent for parent, listed in self.children.items() if key in listed)

    def put(self, key: int, parent: Any, at: str, beside: Any) -> None:
        listed = self.children[parent]
        number = {"first": 0, "last": len(listed)}.get(at)
        if number is None:
            number = listed.index(beside) + (at == "after")
        listed.insert(number, key)
        self.children.setdefault(key, [])

    def below(self, key: Any) -> set[int]:
        return {each for child in self.children[key] for each in (child, *self.below(child))}

    def shape(self, key: Any = None) -> Any:
        return [(child, self.shape(child)) for child in self.children[key]]


@pytest.mark.parametrize("model", MODELS)
def test_a_random_history_keeps_the_order(run, database, model):
    """Inserts and moves to all places, removals that lift; against plain Python."""
    store = run.store([model])
    store.setup()
    tree, known, chance, number = store.tree(model), Model(), random.Random(9), 0
    for _ in range(STEPS):
        nodes = [each for each in known.children if each is not None]
        act = chance.choice(["insert", "insert", "move", "move", "lift"]) if len(nodes) > 3 else "insert"
        at = chance.choice(["first", "last", "before", "after"])
        if act == "lift":
            key = chance.choice(nodes)
            parent, listed = known.parent(key), known.children.pop(key)
            known.children[parent].remove(key)
            known.children[parent] += listed
            tree.remove(key, children="lift")
            continue
        moved = chance.choice(nodes) if act == "move" else None
        out = {None} if moved is None else {None, moved, *known.below(moved)}
        parents = [each for each in known.children if each is None or each not in out]
        parent = chance.choice(parents)
        others = [each for each in known.children[parent] if each != moved]
        if at in ("before", "after") and not others:
            at = "last"
        beside = chance.choice(others) if at in ("before", "after") else None
        where = {"at": at} if beside is None else {at: beside}
        if moved is None:
            number += 1
            tree.insert(new(model, number), parent=parent, **where)
            known.put(number, parent, at, beside)
        else:
            known.children[known.parent(moved)].remove(moved)
            known.put(moved, parent, at, beside)
            tree.move(moved, parent, **where)
    check(store, database, model, known.shape())
    if model is not Plain:
        for each in list(tree.walk()):
            assert tree.depth(each.id) == each.depth


def test_a_gap_that_is_used_up_is_made_again(run, database):
    store = run.store([Step])
    store.setup()
    tree = store.tree(Step)
    tree.insert(Step(id=1))
    tree.insert(Step(id=2))
    for number in range(3, 20):
        tree.insert(Step(id=number), before=2)
    check(store, database, Step, [(key, []) for key in [1, *range(3, 20), 2]])


def test_a_node_is_moved_without_its_parent_being_named(run, database):
    store = run.store([Step])
    store.setup()
    tree = store.tree(Step)
    for number in (1, 2, 3):
        tree.insert(Step(id=number))
    tree.insert(Step(id=4), parent=3)
    assert 3 == tree.move(1, after=4).parent_id
    tree.move(3, at="first")
    check(store, database, Step, [(3, [(4, []), (1, [])]), (2, [])])
    assert [4] == [each.id for each in list(tree.siblings(1))]


def test_racing_moves_never_give_two_the_same_place(server, database):
    uri = server.uri.replace("/?", f"/{database.name}?")
    stores = [Store.open(uri, [Step]) for _ in range(3)]
    stores[0].setup()
    tree = stores[0].tree(Step)
    for number in range(1, 7):
        tree.insert(Step(id=number), parent=None if number < 4 else 1)

    def work(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for count in range(RACES):
            where: Any = chance.choice([{"at": "first"}, {"at": "last"}, {"before": 2}, {"after": 2}])
            if chance.random() < 0.5:
                store.tree(Step).insert(Step(id=100 * seed + count), **where)
            else:
                key = chance.choice([3, 4, 5, 6])
                store.tree(Step).move(key, None, **where)

    threads = [threading.Thread(target=work, args=(store, seed + 1)) for seed, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = list(database["steps"].find())
    assert 0 < len(rows) == len({(row["parent_id"], row["position"]) for row in rows})
    assert [] == stores[0].verify()
    for store in stores:
        store.close()


def test_tampering_and_old_data_are_found_and_numbered(run, database):
    database["steps"].insert_many(
        [{"_id": 1, "parent_id": None}, *({"_id": key, "parent_id": 1} for key in (4, 2, 3))]
    )
    store = run.store([Step])
    store.setup()
    store.rebuild()
    check(store, database, Step, [(1, [(2, []), (3, []), (4, [])])])
    database["steps"].update_one({"_id": 4}, {"$set": {"position": 1024}})
    assert [("position", 1024)] == [(each.path, each.stored) for each in store.verify()]
    store.repair()
    assert [] == store.verify()
    with pytest.raises(UsageError, match="field-maintained"):
        store.update(Step, 4, {"$set": {"position": 7}})


@pytest.mark.parametrize("number", [float("nan"), 0.5, True, Decimal128("7"), 2**63 - 1, -(2**63)])
def test_a_number_that_is_none_stops_nobody(run, database, number):
    store = run.store([Step])
    store.setup()
    tree = store.tree(Step)
    for key in (1, 2, 3):
        tree.insert(Step(id=key))
    tampered = {"$set": {"position": number}}
    database["steps"].update_one({"_id": 2}, tampered, bypass_document_validation=True)
    tree.insert(Step(id=4))
    tree.insert(Step(id=5), at="first")
    tree.insert(Step(id=6), before=3)
    store.repair()
    assert [] == store.verify()
    tree.insert(Step(id=7), before=2)
    tree.insert(Step(id=8), after=2)
    order = [node.id for node in tree.roots()]
    assert [7, 2, 8] == order[order.index(2) - 1 : order.index(2) + 2]
    assert order.index(5) < order.index(1) < order.index(6) < order.index(3)
    assert [] == store.verify()


def test_siblings_can_be_sorted_by_a_field(run):
    class Tag(
        Document, collection="tags", tree=ParentReference(parent="parent_id", sort=["-weight", "name"])
    ):
        id: int
        name: str
        weight: int = 0
        parent_id: int | None = None

    store = run.store([Tag])
    store.setup()
    tree = store.tree(Tag)
    tree.insert(Tag(id=1, name="root"))
    for key, name, weight in ((2, "b", 1), (3, "a", 1), (4, "c", 5)):
        tree.insert(Tag(id=key, name=name, weight=weight), parent=1)
    assert [4, 3, 2] == [each.id for each in list(tree.children(1))]
    assert [1, 4, 3, 2] == [each.id for each in list(tree.walk())]
    assert [2, 3, 4] == [each.id for each in list(tree.children(1, sort="_id"))]
    with pytest.raises(UsageError, match="tree-order"):
        tree.move(2, at="first")


class Visit(Document, collection="visits"):
    place: int


class Place(
    Document,
    collection="places",
    discriminator="kind",
    tree=AncestorArray(parent="parent_id", ancestors="ancestors", order="position"),
):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []
    position: int = 0
    visits: Annotated[int, Count(Visit, by="place")] = 0


class Country(Place, kind="country"):
    code: str


class Town(Place, kind="town"):
    people: int = 0


def test_nodes_of_several_kinds_are_one_tree(run, database):
    store = run.store([Visit, Place, Country, Town])
    store.setup()
    tree = store.tree(Place)
    tree.insert(Country(id=1, code="pt"))
    tree.insert(Town(id=2, people=5), parent=1)
    tree.insert(Town(id=3), parent=1, at="first")
    tree.insert(Country(id=4, code="es"))
    store.insert(Visit(place=2))
    assert [Country, Town, Town, Country] == [type(each) for each in list(tree.walk())]
    moved = tree.move(2, 4)
    assert (Town, 4, 1) == (type(moved), moved.parent_id, moved.visits)
    assert [3] == [each.id for each in list(tree.descendants(1))]
    assert {2, 3} == {each.id for each in store.find(Town)}
    with pytest.raises(DataError, match="tree-has-children"):
        store.delete(Country, 4)
    tree.remove(4, children="lift")
    assert [(1, [(3, [])]), (2, [])] == shape(store, Place)
    assert [] == store.verify()
    database["places"].update_one({"_id": 3}, {"$set": {"ancestors": []}})
    assert 1 == store.repair()
    assert [] == store.verify()


@pytest.mark.parametrize(
    "declared",
    [
        AncestorArray(parent="parent_id", ancestors="ancestors", order="name"),
        AncestorArray(parent="parent_id", ancestors="ancestors", order="position", sort="name"),
        AncestorArray(parent="parent_id", ancestors="ancestors", depth="name"),
        AncestorArray(parent="parent_id", ancestors="ancestors", depth="deep"),
        ParentReference(parent="parent_id", depth="position"),
        MaterializedPath(path="path", segment="name", order="position"),
        ChildReferences(children="ancestors", order="position"),
    ],
)
def test_what_cannot_be_kept_is_refused(run, declared):
    class Node(Document, collection="nodes", tree=declared):
        id: int
        name: str = ""
        path: str = ""
        parent_id: int | None = None
        ancestors: list[int] = []
        position: int = 0

    with pytest.raises(DeclarationError, match="tree-"):
        run.store([Node])


@pytest.mark.parametrize("where", [{"at": "top"}, {"before": 2, "after": 2}, {"before": 3}, {}])
def test_a_place_that_is_none_is_refused(run, where):
    store = run.store([Step])
    store.setup()
    tree = store.tree(Step)
    tree.insert(Step(id=1))
    tree.insert(Step(id=2))
    tree.insert(Step(id=3), parent=2)
    parent = {"parent": None} if "before" in where else {}
    with pytest.raises(UsageError, match="tree-order"):
        tree.move(1, **parent, **where)
    assert [(1, []), (2, [(3, [])])] == shape(store, Step)
