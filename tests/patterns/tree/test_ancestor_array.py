"""Ancestor Array: stored as the literature draws it, by plain writes too, and by the index on the array."""

from __future__ import annotations

import threading
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.kit.command_log import CommandLog
from tests.patterns.tree.forest import Array, Counted, Deep, Place, Turning, names, plant
from treadle import (
    AncestorArray,
    DataError,
    Document,
    Limits,
    Store,
    UsageError,
)

SHAPE = {"electronics": {"computers": {"laptops": {"gaming": {}}}, "phones": {}}, "books": {}}


@pytest.fixture
def store(run):
    made = run.store([Array])
    made.setup()
    return made


@pytest.mark.quick
def test_documents_are_those_of_the_literature(store, database):
    ids = plant(store, Array, SHAPE)
    raw = database["arrays"].find_one({"name": "laptops"})
    raw.pop("_treadle", None)
    assert {
        "_id": ids["laptops"],
        "name": "laptops",
        "parent_id": ids["computers"],
        "ancestors": [ids["electronics"], ids["computers"]],
    } == raw
    assert [] == database["arrays"].find_one({"name": "books"})["ancestors"]


def test_a_plain_insert_fills_the_ancestors(store):
    ids = plant(store, Array, SHAPE)
    stored = store.insert(Array(name="tablets", parent_id=ids["computers"], ancestors=[ObjectId()]))
    assert [ids["electronics"], ids["computers"]] == stored.ancestors
    assert stored == store.get(Array, stored.id)
    with pytest.raises(DataError, match="no Array") as caught:
        store.insert(Array(name="lost", parent_id=ObjectId()))
    assert "tree-parent-missing" == caught.value.code
    assert 0 == store.count(Array, {"name": "lost"})


@pytest.mark.parametrize(
    "update",
    [
        {"$set": {"parent_id": None}},
        {"$unset": {"parent_id": 1}},
        {"$set": {"ancestors": []}},
        {"$push": {"ancestors": 1}},
        {"$set": {"ancestors.0": 1}},
        [{"$set": {"parent_id": {"$literal": None}}}],
        [{"$replaceWith": {"name": "x"}}],
    ],
)
def test_an_update_behind_the_tree_s_back_is_refused_with_the_way_to_do_it(store, update):
    ids = plant(store, Array, SHAPE)
    for act in (store.update, store.update_many):
        with pytest.raises(UsageError) as caught:
            act(Array, {"_id": ids["phones"]}, update)
        assert "field-maintained" == caught.value.code
        if isinstance(update, dict):
            assert "store.tree(Array).move(id, parent)" in str(caught.value)
    assert "phones" == store.update(Array, ids["phones"], {"$set": {"name": "phones"}}).name
    assert [] == store.verify()


def test_replace_keeps_the_place_and_refuses_another(store):
    ids = plant(store, Array, SHAPE)
    stale = store.get(Array, ids["gaming"])
    store.tree(Array).move(ids["laptops"], ids["books"])
    stale.name = "games"
    replaced = store.replace(stale)
    assert ("games", [ids["books"], ids["laptops"]]) == (replaced.name, replaced.ancestors)
    stale.parent_id = ids["books"]
    with pytest.raises(UsageError, match="move") as caught:
        store.replace(stale)
    assert "tree-replace-moves" == caught.value.code
    assert [] == store.verify()


def test_delete_refuses_to_leave_children_behind(store):
    ids = plant(store, Array, SHAPE)
    for act in (store.delete, store.delete_many):
        with pytest.raises(DataError, match="children='subtree'") as caught:
            act(Array, {"_id": ids["laptops"]})
        assert "tree-has-children" == caught.value.code
    # All of them together is no harm.
    assert 2 == store.delete_many(Array, {"name": {"$in": ["laptops", "gaming"]}})
    assert 4 == store.delete_many(Array, {})
    assert [] == store.verify()


def test_the_index_on_the_array_is_used(store, database):
    ids = plant(store, Array, SHAPE)
    for condition in (
        {"ancestors": {"$eq": ids["electronics"]}},
        {"parent_id": {"$eq": ids["electronics"]}},
    ):
        plan = database["arrays"].find(condition).explain()["executionStats"]
        assert plan["nReturned"] == plan["totalKeysExamined"] == plan["totalDocsExamined"]
    stage = database["arrays"].find({"ancestors": ids["books"]}).explain()["queryPlanner"]["winningPlan"]
    assert True is stage["inputStage"]["isMultiKey"]


def test_one_insert_costs_the_same_in_a_tree_of_any_size(heard):
    """A bump of the parent, the insert, the commit; nothing that all inserts share."""
    database, listener = heard
    store = Store(database, [Array])
    store.setup()
    ids = plant(store, Array, SHAPE)
    costs = []
    for _ in range(2):
        listener.clear()
        store.tree(Array).insert(Array(name="x"), ids["phones"])
        costs.append(listener.names)
        store.insert_many([Array(name=f"{n}", parent_id=ids["phones"]) for n in range(300)])
    assert [["findAndModify", "insert", "commitTransaction"]] * 2 == costs
    assert isinstance(listener, CommandLog)


# -- bulk loads --------------------------------------------------------------------------------------


def test_a_batch_may_come_in_any_order(store):
    top = store.insert(Array(name="top"))
    nodes = [Array(name="0", parent_id=top.id)]
    for number in range(1, 30):
        nodes.append(Array(name=str(number), parent_id=nodes[(number - 1) // 2].id))
    stored = store.insert_many(nodes[::-1])
    assert [str(number) for number in range(29, -1, -1)] == names(stored)
    assert [] == store.verify()
    assert ["top", "0", "2", "6", "13"] == names(store.tree(Array).ancestors(nodes[28].id))


def test_a_batch_beyond_one_transaction_is_ordered_as_a_whole(run, constants):
    constants(tree_check_max=1)
    store = run.store([Array], limits=Limits(insert_max=4))
    store.setup()
    nodes = [Array(name="0")]
    for number in range(1, 23):
        nodes.append(Array(name=str(number), parent_id=nodes[(number - 1) // 2].id))
    assert [each.id for each in nodes[::-1]] == [each.id for each in store.insert_many(nodes[::-1])]
    assert [] == store.verify()
    # What cannot be is refused before the first chunk.
    bad = [Array(name=str(number)) for number in range(9)]
    bad[8].parent_id = ObjectId()
    with pytest.raises(DataError, match="to be the parent"):
        store.insert_many(bad)
    assert 23 == store.count(Array)


@pytest.mark.parametrize("outside", [False, True])
def test_a_batch_with_a_cycle_changes_nothing(store, outside):
    one, two, three = Array(name="1"), Array(name="2"), Array(name="3")
    one.parent_id, two.parent_id = two.id, one.id
    three.parent_id = three.id if outside else one.id
    with pytest.raises(UsageError, match="no cycles") as caught:
        store.insert_many([three, one, two])
    assert "tree-cycle" == caught.value.code
    assert 0 == store.count(Array)


# -- proof and repair -----------------------------------------------------------------------------


def test_cycles_orphans_and_wrong_arrays_are_found_and_mended(store, database):
    ids = plant(store, Array, SHAPE)
    raw = database["arrays"]
    raw.update_one({"name": "computers"}, {"$set": {"parent_id": ids["gaming"]}})
    raw.update_one({"name": "phones"}, {"$set": {"parent_id": ObjectId("f" * 24)}})
    raw.update_one({"name": "books"}, {"$set": {"ancestors": [ids["phones"]]}})
    found = {(each.document_id, each.path): (each.stored, each.expected) for each in store.verify()}
    # The cycle is cut at its least id, the orphan becomes a root.
    assert (ids["gaming"], None) == found[(ids["computers"], "parent_id")]
    assert (ObjectId("f" * 24), None) == found[(ids["phones"], "parent_id")]
    assert ([ids["phones"]], []) == found[(ids["books"], "ancestors")]
    assert ["ancestor-array"] == sorted({each.pattern for each in store.verify()})
    assert store.repair() >= 3
    assert [] == store.verify()
    assert ["computers", "laptops"] == names(store.tree(Array).ancestors(ids["gaming"]))
    assert 6 == store.count(Array)


def test_numbers_that_are_equal_but_stand_elsewhere_are_findings(store, database):
    """Right parents, arrays in the wrong order."""
    ids = plant(store, Array, SHAPE)
    database["arrays"].update_one(
        {"name": "gaming"}, {"$set": {"ancestors": [ids["laptops"], ids["computers"], ids["electronics"]]}}
    )
    (finding,) = store.verify()
    assert [ids["electronics"], ids["computers"], ids["laptops"]] == finding.expected


# -- ids and names of any kind -----------------------------------------------------------------------


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

    store = run.store([Node])
    store.setup()
    tree = store.tree(Node)
    one, two, three = values
    for key, parent in zip(values, [None, one, two], strict=True):
        tree.insert(Node(id=key), parent)
    assert [one, two] == [each.id for each in tree.ancestors(three)] == store.get(Node, three).all_up
    assert [three] == [each.id for each in tree.descendants(two)]
    tree.move(three, one)
    tree.move(two, three)
    assert [one, three] == store.get(Node, two).all_up
    with pytest.raises(UsageError, match="no cycles"):
        tree.move(three, two)
    assert [] == store.verify()
    assert 3 == tree.remove(one, children="subtree")


def test_nested_fields_under_other_stored_names(run, database):
    store = run.store([Deep])
    store.setup()
    tree = store.tree(Deep)
    for number in (1, 2, 3):
        tree.insert(Deep(id=number, name=f"{number}"), number - 1 or None)
    stored = database["deep"].find_one({"_id": 3})
    assert {"parent": 2, "above": [1, 2]} == stored["whereItIs"]
    assert [1] == store.insert(Deep(id=4, name="4", where_it_is=Place(parent=1))).where_it_is.above
    with pytest.raises(UsageError, match="move"):
        store.update(Deep, 4, {"$set": {"whereItIs.parent": 2}})
    with pytest.raises(UsageError, match="move"):
        store.update(Deep, 4, {"$set": {"whereItIs": {"parent": 2, "above": []}}})


# -- declarations ------------------------------------------------------------------------------------


def test_a_model_without_a_tree_says_how_to_have_one(run):
    class Plain(Document, collection="plain"):
        name: str

    with pytest.raises(UsageError, match="tree=AncestorArray") as caught:
        run.store([Plain]).tree(Plain)
    assert "tree-undeclared" == caught.value.code


# -- with other patterns -------------------------------------------------------------------------------


def test_other_patterns_follow_the_tree_s_own_fields(run):
    store = run.store([Counted])
    store.setup()
    ids = plant(store, Counted, SHAPE)
    tree = store.tree(Counted)
    tree.move(ids["computers"], ids["books"])
    seen = {
        each.name: (each.children, each.below, each.parent_name, each.depth) for each in store.find(Counted)
    }
    assert (1, 1, None, 0) == seen["electronics"]
    assert (1, 3, None, 0) == seen["books"]
    assert (0, 0, "laptops", 3) == seen["gaming"]
    store.update(Counted, ids["laptops"], {"$set": {"name": "notebooks"}})
    assert "notebooks" == store.get(Counted, ids["gaming"]).parent_name
    tree.remove(ids["laptops"], children="lift")
    assert ("computers", 2) == (
        store.get(Counted, ids["gaming"]).parent_name,
        store.get(Counted, ids["gaming"]).depth,
    )
    assert [] == store.verify()


# -- from one representation to another ------------------------------------------------------------------


def test_writers_go_on_while_a_tree_changes_its_representation(server, database):
    """Child lists that Treadle never saw become arrays, while threads insert and move."""
    nodes = [{"_id": ObjectId(), "name": str(number), "children": []} for number in range(120)]
    for number in range(1, 120):
        nodes[(number - 1) // 3]["children"].append(nodes[number]["_id"])
    database["turning"].insert_many(nodes)
    store = Store(database, [Turning])
    store.setup()
    done = threading.Event()
    errors: list[BaseException] = []

    def write(start: int) -> None:
        tree = Store(database, [Turning]).tree(Turning)
        number = start
        while not done.is_set() or number < start + 200:
            number += 50
            try:
                tree.insert(Turning(name=f"new {number}"), nodes[number % 120]["_id"])
                tree.move(nodes[100 + number % 20]["_id"], nodes[number % 7]["_id"])
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=write, args=(start,)) for start in (1, 2)]
    for thread in threads:
        thread.start()
    store.rebuild(Turning)
    done.set()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert [] == store.verify()
    assert 0 == database["turning"].count_documents({"ancestors": None})
