"""Child References: the lists are the truth, and agree with each other."""

from __future__ import annotations

import pytest
from bson import ObjectId

from tests.patterns.tree.forest import Listed, Turning, names, plant
from treadle import DataError, Limits, UsageError

SHAPE = {"books": {"programming": {"languages": {}, "databases": {"mongodb": {}, "dbm": {}}}}, "music": {}}


@pytest.fixture
def store(run):
    made = run.store([Listed])
    made.setup()
    return made


@pytest.mark.quick
def test_lists_are_in_the_order_in_which_children_came(store, database):
    ids = plant(store, Listed, SHAPE)
    stored = database["lists"].find_one({"name": "programming"})
    assert [ids["languages"], ids["databases"]] == stored["children"]
    tree = store.tree(Listed)
    tree.move(ids["languages"], None)
    tree.move(ids["languages"], ids["programming"])
    assert ["databases", "languages"] == names(tree.children(ids["programming"]))
    assert ["databases", "languages"] == names(tree.children(ids["programming"], sort="name"))


def test_lifted_children_take_the_place_of_their_parent(store):
    ids = plant(store, Listed, {"r": {"a": {}, "b": {"b1": {}, "b2": {}}, "c": {}}})
    tree = store.tree(Listed)
    tree.remove(ids["b"], children="lift")
    assert ["a", "b1", "b2", "c"] == names(tree.children(ids["r"]))
    assert [] == store.verify()


def test_descendants_are_all_of_them(store):
    """The literature's one query, `_id in children`, finds only the children."""
    ids = plant(store, Listed, SHAPE)
    assert {"programming", "languages", "databases", "mongodb", "dbm"} == set(
        names(store.tree(Listed).descendants(ids["books"]))
    )
    assert ["books", "programming", "databases"] == names(store.tree(Listed).ancestors(ids["mongodb"]))


def test_a_batch_says_its_places_by_its_lists(store):
    one, two, three, four = (Listed(name=name) for name in "abcd")
    one.children, two.children = [three.id, two.id], [four.id]
    stored = store.insert_many([four, three, two, one])
    assert ["d", "c", "b", "a"] == names(stored)
    assert ["c", "b"] == names(store.tree(Listed).children(one.id))
    assert ["a", "b"] == names(store.tree(Listed).ancestors(four.id))
    for bad in (
        [Listed(name="x", children=[one.id])],
        [Listed(name="x", children=[ObjectId()])],
        [
            Listed(name="x", children=[(lone := Listed(name="y")).id]),
            Listed(name="z", children=[lone.id]),
            lone,
        ],
    ):
        with pytest.raises(UsageError) as caught:
            store.insert_many(bad)
        assert "tree-child-unknown" == caught.value.code
    cycle = [Listed(name="1"), Listed(name="2")]
    cycle[0].children, cycle[1].children = [cycle[1].id], [cycle[0].id]
    with pytest.raises(UsageError, match="no cycles"):
        store.insert_many(cycle)
    assert 4 == store.count(Listed)


def test_a_batch_with_lists_and_parents_takes_either(run):
    for most in (10_000, 1):
        store = run.store([Turning], limits=Limits(insert_max=most))
        store.setup()
        one, two, three = (Turning(name=f"{name}{most}") for name in "abc")
        one.children, three.parent_id = [two.id], two.id
        store.insert_many([three, one, two])
        assert [one.id, two.id] == store.get(Turning, three.id).ancestors
        assert [three.id] == store.get(Turning, two.id).children
        other = Turning(name="other", parent_id=one.id)
        with pytest.raises(UsageError, match="correct one of the two"):
            store.insert_many([other, Turning(name="more", children=[other.id])])
    assert [] == store.verify()


def test_a_batch_beyond_one_transaction_keeps_the_order_of_its_lists(run):
    store = run.store([Listed], limits=Limits(insert_max=3))
    store.setup()
    nodes = [Listed(name=str(number)) for number in range(12)]
    for number in range(1, 12):
        parent = nodes[(number - 1) // 4]
        parent.children = [nodes[number].id, *parent.children]
    wanted = {node.name: [str(child) for child in node.children] for node in nodes}
    assert [str(number) for number in range(12)] == names(store.insert_many(nodes))
    assert wanted == {each.name: [str(child) for child in each.children] for each in store.find(Listed)}
    assert [] == store.verify()


def test_the_lists_are_maintained(store):
    ids = plant(store, Listed, SHAPE)
    for update in (
        {"$push": {"children": ids["music"]}},
        {"$set": {"children": []}},
        {"$pull": {"children": 1}},
    ):
        with pytest.raises(UsageError, match="move"):
            store.update(Listed, ids["books"], update)
    stale = store.get(Listed, ids["books"])
    store.tree(Listed).move(ids["music"], ids["books"])
    stale.name = "books and music"
    assert [ids["programming"], ids["music"]] == store.replace(stale).children
    with pytest.raises(DataError, match="children"):
        store.delete(Listed, ids["databases"])
    assert ids["dbm"] == store.delete(Listed, ids["dbm"]).id
    assert ["mongodb"] == names(store.tree(Listed).children(ids["databases"]))
    assert [] == store.verify()


def test_lists_that_disagree_are_found_and_mended(store, database):
    ids = plant(store, Listed, SHAPE)
    raw = database["lists"]
    raw.update_one({"name": "music"}, {"$set": {"children": [ids["languages"], ObjectId("f" * 24)]}})
    raw.update_one({"name": "programming"}, {"$push": {"children": ids["databases"]}})
    raw.update_one({"name": "mongodb"}, {"$set": {"children": [ids["books"]]}})
    found = {(each.document_id, each.path): each.expected for each in store.verify()}
    # In two lists: the one of the lesser id keeps it. Twice in one: once. A cycle is cut at its least id.
    assert [] == found[(ids["music"], "children")]
    assert [ids["languages"], ids["databases"]] == found[(ids["programming"], "children")]
    assert [] == found[(ids["mongodb"], "children")]
    assert 3 == len(found)
    assert {"child-references"} == {each.pattern for each in store.verify()}
    assert 3 == store.repair()
    assert [] == store.verify()
    assert ["books", "music"] == sorted(names(store.tree(Listed).roots()))


def test_nodes_without_a_list_are_leaves(store, database):
    """As somebody else may have written them."""
    key = database["lists"].insert_one({"name": "raw"}).inserted_id
    null = (
        database["lists"]
        .insert_one({"name": "null", "children": None}, bypass_document_validation=True)
        .inserted_id
    )
    tree = store.tree(Listed)
    assert [] == names(tree.children(key)) == names(tree.descendants(key))
    for parent in (key, null):
        child = tree.insert(Listed(name="child"), parent)
        assert ["child"] == names(tree.children(parent))
        assert 1 == tree.remove(child.id)


def test_several_representations_share_a_tree(run):
    store = run.store([Turning])
    store.setup()
    ids = plant(store, Turning, SHAPE)
    store.tree(Turning).move(ids["databases"], ids["music"])
    moved = store.get(Turning, ids["mongodb"])
    assert ([ids["music"], ids["databases"]], ids["databases"]) == (moved.ancestors, moved.parent_id)
    with pytest.raises(UsageError, match="maintains"):
        store.update(Turning, ids["music"], {"$set": {"ancestors": []}})
    assert [] == store.verify()
