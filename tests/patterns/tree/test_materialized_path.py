"""Materialized Path: ranges of the index, hostile segments, and names that begin alike."""

from __future__ import annotations

import re

import pytest
from bson import ObjectId

from tests.patterns.tree.forest import Pathed, PathedUp, names, plant, tree_of
from treadle import DataError, Store, UsageError
from treadle.patterns.tree import reads, segments

SHAPE = {
    "company": {"eng": {"backend": {}}, "engineering": {"frontend": {}}, "a.b": {"x": {}}, "aXb": {"y": {}}}
}
BOTH = pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)


def made(run, model):
    store = run.store([model])
    store.setup()
    return store


@pytest.mark.quick
@BOTH
def test_paths_are_those_of_the_literature(run, database, model):
    store = made(run, model)
    plant(store, model, SHAPE)
    stored = {each["name"]: each["path"] for each in database[model.__treadle__.collection].find()}
    assert ",company," == stored["company"]
    assert ",company,eng,backend," == stored["backend"]


@BOTH
def test_a_name_that_begins_another_is_not_taken_for_it(run, model):
    """`^,company,eng` also matches "engineering", and `a.b` as a pattern matches "aXb"."""
    store = made(run, model)
    ids = plant(store, model, SHAPE)
    tree = store.tree(model)
    assert ["backend"] == names(tree.descendants(ids["eng"]))
    assert ["x"] == names(tree.descendants(ids["a.b"]))
    tree.move(ids["eng"], ids["aXb"])
    assert ["engineering", "frontend"] == sorted(names(tree.path(ids["frontend"]))[1:])
    assert 1 == tree.remove(ids["x"])
    assert [] == store.verify()
    naive = re.compile("^,company,a.b,")
    assert naive.search(",company,aXb,y,")


def test_a_range_of_the_index_is_read_and_nothing_else(run, database):
    store = made(run, Pathed)
    ids = plant(store, Pathed, SHAPE)
    store.insert_many([Pathed(name=f"other {number}") for number in range(50)])
    tree = tree_of(Store(database, [Pathed]).graph.entry(Pathed))
    for depth, most in ((None, 4), (1, 4), (2, 4)):
        stream = run(reads.descendants(tree, ids["engineering"], depth))
        (condition,) = stream.arguments
        plan = database["paths"].find(condition).explain()
        assert "IXSCAN" in str(plan["queryPlanner"]["winningPlan"])
        assert plan["executionStats"]["totalKeysExamined"] <= most
        assert 1 == plan["executionStats"]["nReturned"] == plan["executionStats"]["totalDocsExamined"]
        # Both ends of the range, whatever else is asked.
        bounds = str(plan["queryPlanner"]["winningPlan"])
        assert '(",company,engineering,", ",company,engineering-")' in bounds


def test_siblings_in_order_come_from_the_range_and_not_from_the_index_that_has_the_order(run, database):
    """Left to itself, the server goes through the index on _id, that is through the whole tree."""
    store = made(run, Pathed)
    top = store.insert(Pathed(name="top"))
    own = [f"n{number}" for number in range(150)]
    store.insert_many([Pathed(name=name, path=f",top,{name},") for name in own])
    store.insert_many([Pathed(name=f"other {number}") for number in range(600)])
    tree = tree_of(Store(database, [Pathed]).graph.entry(Pathed))
    for stream in (run(reads.children(tree, top.id)), run(reads.descendants(tree, top.id, sort="-_id"))):
        (condition,) = stream.arguments
        plan = database["paths"].find(condition).sort(stream.options["sort"]).explain()
        assert plan["executionStats"]["totalKeysExamined"] <= len(own) + 1
    assert own == [node.name for node in store.tree(Pathed).children(top.id)]
    assert own[::-1] == [node.name for node in store.tree(Pathed).descendants(top.id, sort="-_id")]


def test_ancestors_are_looked_up_by_their_paths(run, database):
    store = made(run, Pathed)
    plant(store, Pathed, SHAPE)
    condition = {"path": {"$in": segments.prefixes(",company,eng,backend,")}}
    plan = database["paths"].find(condition).sort("path", 1).explain()
    assert 2 == plan["executionStats"]["nReturned"] == plan["executionStats"]["totalDocsExamined"]
    assert "SORT'" not in str(plan["queryPlanner"]["winningPlan"])


# -- segments -----------------------------------------------------------------------------------


HOSTILE = [
    "a.b",
    "^a",
    "a$",
    "(",
    "[",
    "\\",
    "*",
    "a|b",
    "+",
    "?",
    "{1}",
    "$where",
    "-",
    "ü",
    "日本",
    "🌳",
    " a ",
    "%2C",
    "a-b",
    ";",
]


@BOTH
def test_every_character_but_the_separator_is_only_a_character(run, model):
    """Each as a node with a child, beside all the others; nobody finds another's."""
    store = made(run, model)
    tree = store.tree(model)
    top = tree.insert(model(name="top"))
    ids = {}
    for segment in HOSTILE:
        ids[segment] = tree.insert(model(name=segment), top.id).id
        tree.insert(model(name=f"below {segment}"), ids[segment])
    for segment, key in ids.items():
        assert [f"below {segment}"] == names(tree.children(key)) == names(tree.descendants(key))
        (child,) = tree.children(key)
        assert ["top", segment] == names(tree.ancestors(child.id))
    goal = tree.insert(model(name="goal"))
    for segment, key in ids.items():
        tree.move(key, goal.id)
        assert 1 == tree.count(key), segment
    assert 2 * len(HOSTILE) == tree.count(goal.id)
    assert [] == store.verify()


@pytest.mark.parametrize("segment", ["", "   ", "a,b", ",", "a\0b", "a\nb", "x" * 1025, "ü" * 600, "\x7f"])
@BOTH
def test_what_cannot_be_a_segment_is_refused_and_changes_nothing(run, model, segment):
    store = made(run, model)
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


@BOTH
def test_siblings_have_different_segments(run, model):
    store = made(run, model)
    tree = store.tree(model)
    ids = plant(store, model, {"r": {"a": {"x": {}}, "b": {"x2": {}}}})
    for act in (
        lambda: tree.insert(model(name="a"), ids["r"]),
        lambda: store.insert(model(name="r")),
        lambda: tree.rename(ids["b"], "a"),
        lambda: store.insert_many([model(name="c"), model(name="c")]),
    ):
        with pytest.raises(DataError, match="siblings") as caught:
            act()
        assert "tree-segment-taken" == caught.value.code
    tree.rename(ids["x2"], "x")
    with pytest.raises(DataError, match="siblings"):
        tree.remove(ids["b"], children="lift")
        tree.remove(ids["a"], children="lift")
    assert [] == store.verify()


@BOTH
def test_a_child_that_is_called_as_its_parent_can_take_its_place(run, model):
    store = made(run, model)
    ids = plant(store, model, {"r": {"a": {"b": {}}}})
    tree = store.tree(model)
    same = tree.insert(model(name="a"), ids["a"])
    deep = tree.insert(model(name="a"), same.id)
    assert 1 == tree.remove(ids["a"], children="lift")
    assert ",r,a,a," == store.get(model, deep.id).path
    assert [] == store.verify()


@BOTH
def test_a_new_name_reaches_all_paths_below(run, model):
    store = made(run, model)
    ids = plant(store, model, SHAPE)
    tree = store.tree(model)
    assert "Företag" == tree.rename(ids["company"], "Företag").name
    tree.rename(ids["company"], "ü")
    assert ",ü,eng,backend," == store.get(model, ids["backend"]).path
    with pytest.raises(UsageError, match=r"rename\(id, segment\)"):
        store.update(model, ids["eng"], {"$set": {"name": "x"}})
    with pytest.raises(UsageError, match="maintains"):
        store.update(model, ids["eng"], {"$set": {"path": ",x,"}})
    stale = store.get(model, ids["eng"])
    stale.name = "other"
    with pytest.raises(UsageError, match="rename"):
        store.replace(stale)
    assert [] == store.verify()


# -- plain writes ---------------------------------------------------------------------------------


def test_a_plain_insert_says_its_place_by_its_path(run):
    store = made(run, Pathed)
    plant(store, Pathed, SHAPE)
    assert ",new," == store.insert(Pathed(name="new")).path
    assert ",company,eng,new," == store.insert(Pathed(name="new", path=",company,eng,new,")).path
    for path in (",company,eng,", "company,new", ",company,,new,", ",new", "x", ",company,other,"):
        with pytest.raises(UsageError) as caught:
            store.insert(Pathed(name="new", path=path))
        assert "tree-path-invalid" == caught.value.code
    with pytest.raises(DataError) as missing:
        store.insert(Pathed(name="new", path=",nowhere,new,"))
    assert "tree-parent-missing" == missing.value.code
    batch = [Pathed(name="c", path=",a,b,c,"), Pathed(name="a"), Pathed(name="b", path=",a,b,")]
    assert [",a,b,c,", ",a,", ",a,b,"] == [each.path for each in store.insert_many(batch)]
    assert [] == store.verify()


def test_a_plain_insert_with_a_parent_fills_the_path(run):
    store = made(run, PathedUp)
    ids = plant(store, PathedUp, SHAPE)
    stored = store.insert(PathedUp(name="new", parent_id=ids["eng"], path="nonsense"))
    assert ",company,eng,new," == stored.path


# -- proof and repair -------------------------------------------------------------------------------


def test_wrong_paths_are_derived_from_the_parents(run, database):
    store = made(run, PathedUp)
    ids = plant(store, PathedUp, SHAPE)
    raw = database["paths_up"]
    raw.update_one({"_id": ids["eng"]}, {"$set": {"path": ",wrong,"}})
    raw.update_one({"_id": ids["x"]}, {"$unset": {"path": 1}})
    # Two that have each other's.
    raw.update_one({"_id": ids["y"]}, {"$set": {"path": ",tmp,"}})
    raw.update_one({"_id": ids["frontend"]}, {"$set": {"path": ",company,aXb,y,"}})
    raw.update_one({"_id": ids["y"]}, {"$set": {"path": ",company,engineering,frontend,"}})
    assert {ids["eng"], ids["x"], ids["y"], ids["frontend"]} == {each.document_id for each in store.verify()}
    assert {"materialized-path"} == {each.pattern for each in store.verify()}
    assert 4 == store.repair()
    assert [] == store.verify()


def test_without_parents_the_path_itself_is_the_truth(run, database):
    store = made(run, Pathed)
    ids = plant(store, Pathed, SHAPE)
    raw = database["paths"]
    raw.update_one({"_id": ids["eng"]}, {"$set": {"name": "renamed by hand"}})
    raw.delete_one({"_id": ids["engineering"]})
    raw.insert_one({"_id": ObjectId(), "name": "no path"})
    found = {(each.stored, each.expected) for each in store.verify()}
    assert (",company,eng,", ",company,renamed by hand,") in found
    assert (",company,eng,backend,", ",company,renamed by hand,backend,") in found
    assert (",company,engineering,frontend,", ",frontend,") in found
    assert (None, ",no path,") in found
    assert 4 == store.repair()
    assert [] == store.verify()


def test_what_only_a_person_can_mend_stays_a_finding(run, database):
    """A name that is no segment, and two siblings with one name."""
    store = made(run, PathedUp)
    ids = plant(store, PathedUp, SHAPE)
    raw = database["paths_up"]
    raw.update_one({"_id": ids["eng"]}, {"$set": {"name": "a,b"}})
    raw.update_one({"_id": ids["engineering"]}, {"$set": {"name": "a.b"}})
    store.repair()
    left = {(each.document_id, each.path) for each in store.verify()}
    assert {(ids["eng"], "name"), (ids["engineering"], "path")} <= left
    assert 1 == database["treadle.set_aside"].count_documents({"_id.key": ids["engineering"]})
    raw.update_one({"_id": ids["eng"]}, {"$set": {"name": "eng"}})
    raw.update_one({"_id": ids["engineering"]}, {"$set": {"name": "engineering"}})
    store.repair()
    assert [] == store.verify()


def test_a_second_path_of_one_name_is_refused_by_the_server_too(run, database):
    """Documents without a path yet are no duplicates of each other."""
    made(run, Pathed)
    database["paths"].insert_many([{"name": "a"}, {"name": "b"}, {"name": "c", "path": ""}])
    database["paths"].insert_one({"name": "d", "path": ",d,"})
    with pytest.raises(Exception, match="E11000"):
        database["paths"].insert_one({"name": "d", "path": ",d,"})
