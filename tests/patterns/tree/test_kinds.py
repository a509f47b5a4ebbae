"""Nodes of several kinds in one tree."""

from __future__ import annotations

from typing import Annotated

import pytest

from treadle import AncestorArray, Count, DataError, Document


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
    assert [Country, Country] == [type(each) for each in list(tree.roots())]
    assert [Town, Town] == [type(each) for each in list(tree.children(1))]
    moved = tree.move(2, 4)
    assert (Town, 4, 1) == (type(moved), moved.parent_id, moved.visits)
    assert [3] == [each.id for each in list(tree.descendants(1))]
    assert {2, 3} == {each.id for each in store.find(Town)}
    with pytest.raises(DataError, match="tree-has-children"):
        store.delete(Country, 4)
    tree.remove(4, children="lift")
    assert [1, 2] == [each.id for each in list(tree.roots())]
    assert [] == store.verify()
    database["places"].update_one({"_id": 3}, {"$set": {"ancestors": []}})
    assert 1 == store.repair()
    assert [] == store.verify()
