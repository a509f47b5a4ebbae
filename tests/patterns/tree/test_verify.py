"""Verify and repair of every representation: what another program wrote is found and repaired."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import Field

from tests.patterns.tree.forest import Array, Counted, Listed, Parented, Pathed, PathedUp, names, plant
from treadle import AncestorArray, Document, Id

SHAPE = {"books": {"programming": {"languages": {}, "databases": {"mongodb": {}, "dbm": {}}}}, "music": {}}
LOST = ObjectId("f" * 24)


def planted(run: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    store = run.store([model])
    store.setup()
    return store, plant(store, model, SHAPE)


def found(store: Any) -> dict[tuple[Any, str], tuple[Any, Any]]:
    """What is wrong with places, and not with the form of a field."""
    findings = [each for each in store.verify() if each.pattern != "validation"]
    return {(each.document_id, each.path): (each.stored, each.expected) for each in findings}


@pytest.mark.parametrize("model", [Parented, Array, PathedUp], ids=lambda model: model.__name__)
def test_cycles_and_orphans_become_roots(run, database, model):
    """A cycle is cut at its least id. Whatever follows from the parents is derived again."""
    store, ids = planted(run, model)
    raw = database[model.__treadle__.collection]
    raw.update_one({"name": "programming"}, {"$set": {"parent_id": ids["dbm"]}})
    raw.update_one({"name": "music"}, {"$set": {"parent_id": LOST}})
    findings = found(store)
    assert (ids["dbm"], None) == findings[ids["programming"], "parent_id"]
    assert (LOST, None) == findings[ids["music"], "parent_id"]
    assert {model.__treadle__.patterns["tree"][0].pattern} == {each.pattern for each in store.verify()}
    assert store.repair() >= 2
    assert ([], 7) == (store.verify(), store.count(model))
    assert {"books", "programming", "music"} == set(names(store.tree(model).roots()))
    assert ["programming", "databases"] == names(store.tree(model).ancestors(ids["dbm"]))


@pytest.mark.parametrize("stored", [[], ["music"], ["databases", "programming", "books"], None, "text"])
def test_a_wrong_array_is_derived_from_the_parents(run, database, stored):
    """Also the right ancestors in another order."""
    store, ids = planted(run, Array)
    wrong = [ids[name] for name in stored] if isinstance(stored, list) else stored
    right = [ids["books"], ids["programming"], ids["databases"]]
    database["arrays"].update_one(
        {"name": "mongodb"}, {"$set": {"ancestors": wrong}}, bypass_document_validation=True
    )
    assert {(ids["mongodb"], "ancestors"): (wrong, right)} == found(store)
    assert 1 == store.repair()
    assert [] == store.verify()


def test_wrong_paths_are_derived_from_the_parents(run, database):
    store, ids = planted(run, PathedUp)
    raw = database["paths_up"]
    raw.update_one({"_id": ids["languages"]}, {"$set": {"path": ",wrong,"}})
    raw.update_one({"_id": ids["music"]}, {"$unset": {"path": 1}})
    # Two that have each other's.
    paths = {name: raw.find_one({"_id": ids[name]})["path"] for name in ("mongodb", "dbm")}
    for name, path in (("mongodb", ",tmp,"), ("dbm", paths["mongodb"]), ("mongodb", paths["dbm"])):
        raw.update_one({"_id": ids[name]}, {"$set": {"path": path}})
    assert {ids[name] for name in ("languages", "music", "mongodb", "dbm")} == {
        key for key, _ in found(store)
    }
    assert 4 == store.repair()
    assert [] == store.verify()


def test_without_parents_everything_is_derived_from_the_paths(run, database):
    store, ids = planted(run, Pathed)
    raw = database["paths"]
    raw.update_one({"_id": ids["databases"]}, {"$set": {"name": "renamed by hand"}})
    plant(store, Pathed, {"company": {"eng": {"backend": {}}}})
    raw.delete_one({"name": "eng"})
    raw.insert_one({"_id": LOST, "name": "no path"})
    findings = set(found(store).values())
    assert (",books,programming,databases,", ",books,programming,renamed by hand,") in findings
    assert (",books,programming,databases,dbm,", ",books,programming,renamed by hand,dbm,") in findings
    assert (",company,eng,backend,", ",backend,") in findings
    assert (None, ",no path,") in findings
    assert 5 == store.repair()
    assert [] == store.verify()


def test_lists_that_disagree(run, database):
    store, ids = planted(run, Listed)
    raw = database["lists"]
    raw.update_one({"name": "music"}, {"$set": {"children": [ids["languages"], LOST]}})
    raw.update_one({"name": "programming"}, {"$push": {"children": ids["databases"]}})
    raw.update_one({"name": "mongodb"}, {"$set": {"children": [ids["books"]]}})
    expected = {key: right for (key, _), (_, right) in found(store).items()}
    # In two lists: the one of the lesser id keeps it. Twice in one: once. A cycle is cut at its least id.
    right = {ids["music"]: [], ids["programming"]: [ids["languages"], ids["databases"]], ids["mongodb"]: []}
    assert right == expected
    assert 3 == store.repair()
    assert [] == store.verify()
    assert {"books", "music"} == set(names(store.tree(Listed).roots()))


def test_what_only_a_person_can_correct_stays_a_finding(run, database):
    """A name that is no segment, and two siblings with one name; all others are repaired."""
    store, ids = planted(run, PathedUp)
    raw = database["paths_up"]
    raw.update_one({"_id": ids["databases"]}, {"$set": {"name": "a,b"}})
    raw.update_one({"_id": ids["music"]}, {"$set": {"name": "books"}})
    raw.update_one({"_id": ids["languages"]}, {"$set": {"path": ",x,"}})
    store.repair()
    assert {(ids["databases"], "name"), (ids["music"], "path")} == set(found(store))
    assert 1 == database["treadle.set_aside"].count_documents({"_id.key": ids["music"]})
    raw.update_one({"_id": ids["databases"]}, {"$set": {"name": "databases"}})
    raw.update_one({"_id": ids["music"]}, {"$set": {"name": "music"}})
    store.repair()
    assert [] == store.verify()


class Heavy(
    Document,
    collection="heavy",
    validation="strict",
    tree=AncestorArray(parent="parent_id", ancestors="ancestors"),
):
    name: str
    weight: Annotated[int, Field(le=10)] = 1
    parent_id: Id | None = None
    ancestors: list[Id] = []


def test_repair_continues_past_a_node_that_cannot_be_written(run, database):
    store, ids = planted(run, Heavy)
    raw = database["heavy"]
    raw.update_many({"name": {"$in": ["mongodb", "dbm"]}}, {"$set": {"ancestors": []}})
    raw.update_one({"name": "dbm"}, {"$set": {"weight": 11}}, bypass_document_validation=True)
    store.repair()
    assert {(ids["dbm"], "ancestors")} <= set(found(store))
    assert (ids["mongodb"], "ancestors") not in found(store)
    raw.update_one({"name": "dbm"}, {"$set": {"weight": 1}}, bypass_document_validation=True)
    store.repair()
    assert [] == store.verify()


def test_what_follows_from_a_repaired_place_is_recomputed(run, database):
    store, ids = planted(run, Counted)
    raw = database["counted"]
    raw.update_one({"name": "dbm"}, {"$set": {"parent_id": ids["music"]}})
    store.repair()
    assert [] == store.verify()
    node = store.get(Counted, ids["dbm"])
    assert ("music", [ids["music"]], 1) == (node.parent_name, node.ancestors, node.depth)
    assert (1, 1) == (
        store.get(Counted, ids["music"]).children,
        store.get(Counted, ids["databases"]).children,
    )
