"""What each representation asks of the server: filters, ranges of an index, expressions.

Covers: patterns/tree/paths
"""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId

from tests.patterns.tree.forest import Array, Listed, Parented, Pathed, PathedUp, names, plant
from treadle import UsageError
from treadle.patterns.tree import paths
from treadle.patterns.tree.representations import ByAncestors, ByChildren, ByParent, ByPath, Climb

SHAPE = {
    "company": {"eng": {"backend": {}}, "engineering": {"frontend": {}}, "a.b": {"x": {}}, "aXb": {"y": {}}}
}
PATHS = pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)


def set_up(run: Any, model: Any) -> Any:
    store = run.store([model])
    store.setup()
    return store


# -- without a server --------------------------------------------------------------------------------


def test_the_topmost_of_many_paths_are_found_in_one_pass():
    """2,000 levels; comparing each path with all of its prefixes took minutes."""
    by_path = ByPath("Place", "places", "path", "name")
    segments = [f"n{number}" for number in range(2_000)]
    stated = ["," + ",".join(segments[: depth + 1]) + "," for depth in range(2_000)]
    nodes: list[Any] = [{"_id": number, "path": path} for number, path in enumerate(stated)]
    nodes += [{"_id": "other", "path": ",n00,"}, {"_id": "none", "path": None}]
    (condition,) = by_path.children_outside(nodes)
    ranges = [{"path": {"$gt": ",n0,", "$lt": ",n0-"}}, {"path": {"$gt": ",n00,", "$lt": ",n00-"}}]
    assert ranges == condition["$or"]


def test_a_cycle_is_cut_at_its_least_id_by_bytes():
    """The same node in every process, whatever the order in which nodes are read, for ids of any types."""
    nodes = [{"_id": 2, "up": "a"}, {"_id": "a", "up": 1}, {"_id": 1, "up": 2}, {"_id": 3, "up": 1}]
    for order in (nodes, nodes[::-1]):
        climb = Climb(ByParent("Node", "nodes", "up"))
        climb.add(order)
        climb.cut_cycles()
        assert [] == climb.line(1)
        assert [1, "a"] == [node["_id"] for node in climb.line(2)]


def test_a_place_is_derived_from_the_parent_s():
    by_ancestors = ByAncestors("Node", "nodes", "up", "above")
    assert {"up": None, "above": []} == by_ancestors.place({"_id": 1}, None)
    assert {"up": 2, "above": [1, 2]} == by_ancestors.place({"_id": 3}, {"_id": 2, "up": 1, "above": [1]})
    # A parent that has one, but no array yet, is to be completed first.
    assert (None, []) == (by_ancestors.line({"_id": 2, "up": 1}), by_ancestors.line({"_id": 1}))


def test_a_value_never_becomes_an_expression():
    """A node is called as its author likes, such as "$name"."""
    rebased = ByPath("Node", "nodes", "path", "name").follow({"path": ",$a,"}, {"path": ",$$ROOT,$a,"})
    assert "{'$literal': ',$$ROOT,$a,'}" in str(rebased)
    lists = ByChildren("Node", "nodes", "children")
    for sets in (
        lists.appended(["$x"]),
        lists.inserted("$x", 0),
        lists.removed(["$x"]),
        lists.replaced("$x", []),
    ):
        assert "'$literal'" in str(sets)
        assert "'$x'" not in str(sets).replace("{'$literal': '$x'}", "").replace("{'$literal': ['$x']}", "")


@pytest.mark.parametrize("path", ["", ",", ",,", "a", ",a", "a,", ",a,,b,", None, 1])
def test_what_is_no_path_has_no_segments(path):
    assert None is paths.split(path)


# -- on a server -------------------------------------------------------------------------------------


@PATHS
@pytest.mark.quick
def test_paths_are_those_of_the_literature(run, database, model):
    store = set_up(run, model)
    plant(store, model, SHAPE)
    stored = {each["name"]: each["path"] for each in database[model.__treadle__.collection].find()}
    assert (",company,", ",company,eng,backend,") == (stored["company"], stored["backend"])


@pytest.mark.quick
def test_arrays_are_those_of_the_literature(run, database):
    ids = plant(set_up(run, Array), Array, {"electronics": {"computers": {"laptops": {}}}})
    raw = database["arrays"].find_one({"name": "laptops"})
    raw.pop("_treadle", None)
    above = {"parent_id": ids["computers"], "ancestors": [ids["electronics"], ids["computers"]]}
    assert {"_id": ids["laptops"], "name": "laptops", **above} == raw
    assert [] == database["arrays"].find_one({"name": "electronics"})["ancestors"]


@PATHS
def test_a_name_that_begins_another_is_not_taken_for_it(run, model):
    """`^,company,eng` also matches "engineering", and `a.b` as a pattern matches "aXb"."""
    store = set_up(run, model)
    ids = plant(store, model, SHAPE)
    tree = store.tree(model)
    assert (["backend"], ["x"]) == (names(tree.descendants(ids["eng"])), names(tree.descendants(ids["a.b"])))
    tree.move(ids["eng"], ids["aXb"])
    assert ["engineering", "frontend"] == sorted(names(tree.path(ids["frontend"]))[1:])
    assert 1 == tree.remove(ids["x"])
    assert [] == store.verify()


HOSTILE = ["a.b", "^a", "a$", "(", "[", "\\", "*", "a|b", "+", "?", "{1}", "$where", "-", "ü", "日本", "🌳", " a ",
           "%2C", "a-b", ";"]  # fmt: skip


@PATHS
def test_every_character_but_the_separator_is_only_a_character(run, model):
    """Each as a node with a child, beside all the others; no node is below another's."""
    store = set_up(run, model)
    tree = store.tree(model)
    top, goal = tree.insert(model(name="top")), tree.insert(model(name="goal"))
    ids = {segment: tree.insert(model(name=segment), top.id).id for segment in HOSTILE}
    for segment, key in ids.items():
        child = tree.insert(model(name=f"below {segment}"), key)
        assert ["top", segment] == names(tree.ancestors(child.id))
    for segment, key in ids.items():
        assert [f"below {segment}"] == names(tree.children(key)) == names(tree.descendants(key))
        tree.move(key, goal.id)
        assert 1 == tree.count(key), segment
    assert 2 * len(HOSTILE) == tree.count(goal.id)
    assert [] == store.verify()


@pytest.mark.parametrize("segment", ["", "   ", "a,b", ",", "a\0b", "a\nb", "x" * 1025, "ü" * 600, "\x7f"])
@PATHS
def test_what_cannot_be_a_segment_is_refused_and_changes_nothing(run, model, segment):
    store = set_up(run, model)
    tree = store.tree(model)
    top = tree.insert(model(name="top"))
    for act in (
        lambda: tree.insert(model(name=segment), top.id),
        lambda: store.insert(model(name=segment)),
        lambda: store.insert_many([model(name="good"), model(name=segment)]),
        lambda: tree.rename(top.id, segment),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        assert "tree-segment-invalid" == caught.value.code
        assert len(str(caught.value)) < 300
    assert ["top"] == names(store.find(model))


def explained(database: Any, model: Any, condition: Any, sort: Any = None) -> Any:
    cursor = database[model.__treadle__.collection].find(condition)
    return (cursor.sort(sort) if sort else cursor).explain()


def test_descendants_are_one_range_of_an_index(run, database):
    store = set_up(run, Array)
    ids = plant(store, Array, SHAPE)
    for field in ("ancestors", "parent_id"):
        figures = explained(database, Array, {field: {"$eq": ids["company"]}})["executionStats"]
        assert figures["nReturned"] == figures["totalKeysExamined"] == figures["totalDocsExamined"]
    store = set_up(run, Pathed)
    ids = plant(store, Pathed, SHAPE)
    store.insert_many([Pathed(name=f"other {number}") for number in range(50)])
    node = database["paths"].find_one({"_id": ids["engineering"]})
    for depth in (None, 1, 2):
        below = ByPath("Pathed", "paths", "path", "name").below(node, depth)
        plan = explained(database, Pathed, below)
        # Both ends of the range, whatever else is asked.
        assert '(",company,engineering,", ",company,engineering-")' in str(
            plan["queryPlanner"]["winningPlan"]
        )
        assert plan["executionStats"]["totalKeysExamined"] <= 4
        assert 1 == plan["executionStats"]["nReturned"] == plan["executionStats"]["totalDocsExamined"]


@pytest.mark.parametrize("model", [Parented, Listed], ids=lambda model: model.__name__)
def test_links_are_followed_by_their_index(run, database, model):
    """No question that `$graphLookup` asks goes through the collection."""
    ids = plant(set_up(run, model), model, SHAPE)
    database[model.__treadle__.collection].insert_many([{"name": "x"} for _ in range(200)])
    for field in ("parent_id", "_id") if model is Parented else ("children", "_id"):
        plan = explained(database, model, {field: {"$in": [ids["eng"], ObjectId()]}})
        assert plan["executionStats"]["totalDocsExamined"] <= 1
