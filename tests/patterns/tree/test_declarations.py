"""Trees of models of any shape: ids, nested fields, kinds, declared order.

Covers: patterns/tree/rule
"""

from __future__ import annotations

from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from treadle import (
    AncestorArray,
    ChildReferences,
    Count,
    DataError,
    Document,
    ParentReference,
    UsageError,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Key(BaseModel):
    site: str
    number: int


KINDS: list[tuple[Any, list[Any]]] = [
    (int, [1, 2, 3]),
    (str, ["$name", "a.b", ""]),
    (UUID, [uuid4(), uuid4(), uuid4()]),
    (Decimal, [Decimal("1.10"), Decimal("-2"), Decimal("3")]),
    (Colour, list(Colour)),
    (Key, [Key(site="a", number=1), Key(site="b", number=1), Key(site="a", number=2)]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_ids_of_any_type(run, kind, values):
    class Node(Document, collection="nodes", tree=AncestorArray(parent="up", ancestors="all_up")):
        id: kind
        up: kind | None = None
        all_up: list[kind] = []

    class Lister(Document, collection="listers", tree=ChildReferences(children="down")):
        id: kind
        down: list[kind] = []

    store = run.store([Node, Lister])
    store.setup()
    one, two, three = values
    for model in (Node, Lister):
        tree = store.tree(model)
        for key, parent in zip(values, [None, one, two], strict=True):
            tree.insert(model(id=key), parent)
        assert [one, two] == [each.id for each in tree.ancestors(three)]
        assert [three] == [each.id for each in tree.descendants(two)]
        tree.move(three, one)
        tree.move(two, three)
        assert [one, three] == [each.id for each in tree.ancestors(two)]
        with pytest.raises(UsageError, match="no cycles"):
            tree.move(three, two)
        assert [] == store.verify()
        assert 3 == tree.remove(one, children="subtree")


def test_siblings_are_read_as_declared(run):
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
    assert [4, 3, 2] == [each.id for each in tree.children(1)]
    assert [4, 3, 2] == [each.node.id for each in tree.nested(1).children]
    assert [2, 3, 4] == [each.id for each in tree.children(1, sort="_id")]


# -- kinds -------------------------------------------------------------------------------------------


class Visit(Document, collection="visits"):
    place: int


class Place(
    Document,
    collection="places",
    discriminator="kind",
    tree=AncestorArray(parent="parent_id", ancestors="ancestors"),
):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []
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
    tree.insert(Town(id=3), parent=1)
    tree.insert(Country(id=4, code="es"))
    store.insert(Visit(place=2))
    assert [Country, Country] == [type(each) for each in tree.roots()]
    assert [Town, Town] == [type(each) for each in tree.children(1)]
    moved = tree.move(2, 4)
    assert (Town, 4, 1) == (type(moved), moved.parent_id, moved.visits)
    assert [3] == [each.id for each in tree.descendants(1)]
    assert {2, 3} == {each.id for each in store.find(Town)}
    with pytest.raises(DataError, match="tree-has-children"):
        store.delete(Country, 4)
    tree.remove(4, children="lift")
    assert [1, 2] == [each.id for each in tree.roots()]
    assert [] == store.verify()
    database["places"].update_one({"_id": 3}, {"$set": {"ancestors": []}})
    assert 1 == store.repair()
    assert [] == store.verify()
