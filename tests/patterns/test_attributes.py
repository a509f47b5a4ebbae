"""Many optional fields as pairs under one index, behind the names that callers use.

Covers: model/attributes
"""

from __future__ import annotations

import datetime as dt
import os
import random
import re
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo import MongoClient

from tests.profiles import Profile, ProfileProxy
from treadle import (
    Attributes,
    Count,
    Document,
    Measured,
    Store,
    UsageError,
    migration,
)

# Few by default; TREADLE_STEPS=all plays as many as a release should have seen.
STEPS = 5_000 if os.environ.get("TREADLE_STEPS") == "all" else 300
Value = str | int | float | bool | Decimal | dt.datetime | list[str] | Measured | None


class Sheet(BaseModel):
    lines: Annotated[dict[str, str], Attributes()] = {}


class Product(Document, collection="products"):
    id: int
    name: str = ""
    shop_id: int = 1
    specs: Annotated[dict[str, Value], Attributes()] = {}
    sheet: Sheet = Sheet()


class Shop(Document, collection="shops"):
    id: int
    red: Annotated[int, Count(Product, by="shop_id", where={"specs.color": "red"})] = 0
    heavy: Annotated[int, Count(Product, by="shop_id", where={"specs.weight.value": {"$gt": 5}})] = 0


@pytest.fixture
def store(run):
    store = run.store([Product, Shop])
    store.setup()
    store.insert(Shop(id=1))
    return store


def stored(database, key=1):
    return database["products"].find_one({"_id": key})["specs"]


@pytest.mark.quick
def test_a_dict_is_stored_as_pairs_and_read_back(store, database):
    specs = {
        "color": "red",
        "size": 5,
        "price": Decimal("9.90"),
        "new": True,
        "since": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "tags": ["a", "b"],
        "weight": Measured(7, "kg"),
        "a.b": "dotted",
        "$x": "dollar",
        "nothing": None,
    }
    inserted = store.insert(Product(id=1, specs=specs))
    assert specs == inserted.specs == store.get(Product, 1).specs
    pairs = stored(database)
    assert {"k": "color", "v": "red"} == pairs[0]
    assert {"k": "weight", "v": 7, "u": "kg"} == next(each for each in pairs if each["k"] == "weight")
    assert [] == store.verify()


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"specs.color": "red"}, [1, 2]),
    ({"specs.color": "red", "specs.size": 5}, [1]),
    ({"specs.color": {"$ne": "red"}}, [3, 4]),
    ({"specs.color": {"$in": ["blue", "green"]}}, [3]),
    ({"specs.color": {"$in": ["blue", None]}}, [3, 4]),
    ({"specs.color": {"$in": []}}, []),
    ({"specs.color": {"$nin": ["red"]}}, [3, 4]),
    ({"specs.color": {"$exists": True}}, [1, 2, 3]),
    ({"specs.color": {"$exists": False}}, [4]),
    ({"specs.color": None}, [4]),
    ({"specs.color": {"$eq": None}}, [4]),
    ({"specs.color": {"$ne": None}}, [1, 2, 3]),
    ({"specs.size": {"$gte": 5, "$lt": 9}}, [1]),
    ({"specs.size": {"$gte": 5, "$ne": 9}}, [1]),
    ({"specs.size": {"$not": {"$gte": 6}}}, [1, 3, 4]),
    ({"$or": [{"specs.color": "blue"}, {"specs.size": 9}]}, [2, 3]),
    ({"$nor": [{"specs.color": "blue"}]}, [1, 2, 4]),
    ({"$and": [{"specs.color": "red"}, {"name": "n2"}]}, [2]),
    ({"specs.color": {"$regex": "^bl"}}, [3]),
    ({"specs.color": re.compile("^bl")}, [3]),
    ({"specs.color": {"$not": re.compile("^bl")}}, [1, 2, 4]),
    ({"specs.color": {"$in": [re.compile("^bl"), None]}}, [3, 4]),
    ({"specs.color": {"$gte": None}}, [4]),
    ({"specs.a.b": "x"}, [4]),
    ({"specs.weight": Measured(7, "kg")}, [1]),
    ({"specs.weight.unit": "kg"}, [1, 2]),
    ({"specs.weight.value": {"$gt": 7}}, [2]),
    ({"specs": {"a.b": "x"}}, [4]),
    ({"specs": {"$eq": {"a.b": "x"}}}, [4]),
    ({"specs": {"$ne": {"a.b": "x"}}}, [1, 2, 3]),
    ({"specs": {"$in": [{"a.b": "x"}, {"color": "blue"}, {"color": None}]}}, [3, 4]),
    ({"specs": {"$nin": [{"a.b": "x"}], "$size": 1}}, [3]),
    ({"specs": {"$not": {"$eq": {"color": "blue"}}}}, [1, 2, 4]),
    ({"specs": {"none": None}}, []),
    ({"specs": {"$size": 1}}, [3, 4]),
    ({"sheet.lines.top": "t"}, [2]),
]


@pytest.fixture
def filled(store):
    store.insert_many(
        [
            Product(id=1, name="n1", specs={"color": "red", "size": 5, "weight": Measured(7, "kg")}),
            Product(
                id=2,
                name="n2",
                specs={"size": 9, "color": "red", "weight": Measured(8, "kg")},
                sheet=Sheet(lines={"top": "t"}),
            ),
            Product(id=3, name="n3", specs={"color": "blue"}),
            Product(id=4, name="n4", specs={"a.b": "x"}),
        ]
    )
    return store


def test_filters_on_names_find_what_filters_on_fields_would(filled):
    for filter, expected in FILTERS:
        assert expected == [each.id for each in filled.find(Product, filter, sort="_id")], filter
        assert len(expected) == filled.count(Product, filter), filter
        assert bool(expected) == filled.exists(Product, filter), filter
        first = [each.id for each in [filled.find_one(Product, filter, sort="_id")] if each]
        assert expected[:1] == first, filter


def test_every_filter_on_a_name_uses_the_one_index(store, database):
    store.insert_many([Product(id=key, specs={f"n{key % 7}": key}) for key in range(50)])
    listed = [each["key"] for each in database["products"].list_indexes()]
    assert {"specs.k": 1, "specs.v": 1} in [dict(each) for each in listed]
    assert [] == store.setup()
    from treadle.query.filters import parse_filter

    sent = parse_filter(store.graph.entry(Product).paths.fields, {"specs.n3": {"$gte": 10, "$lt": 30}})
    plan = database["products"].find(sent).explain()["queryPlanner"]["winningPlan"]
    assert "IXSCAN" in str(plan)
    assert "COLLSCAN" not in str(plan)
    assert 3 == database["products"].count_documents(sent)


def test_the_one_index_is_compressed_where_the_server_can(database, server):
    with ProfileProxy(server, Profile("other", refuse=_refuses_storage)) as proxy:
        for name, uri, compressed in (("here", server.uri, True), ("there", proxy.uri, False)):
            with MongoClient(uri) as client:
                here = client[f"{database.name}_{name}"]
                store = Store(here, [Product, Shop])
                store.setup()
                assert [] == store.setup()
                indexes = here["products"].index_information()
                assert compressed == ("zstd" in str(indexes["specs.k_1_specs.v_1"]))
                client.drop_database(here.name)


def _refuses_storage(body: dict[str, Any]) -> tuple[int, str] | None:
    refused = "createIndexes" in body and "storageEngine" in str(body["indexes"])
    return (72, "there is no choice of storage here") if refused else None


def test_updates_of_one_name_change_it_in_place(store, database):
    store.insert(Product(id=1, specs={"color": "red", "size": 5, "weight": Measured(7, "kg")}))
    after = store.update(Product, 1, {"$set": {"specs.color": "blue", "name": "x"}, "$inc": {"shop_id": 2}})
    assert {"color": "blue", "size": 5, "weight": Measured(7, "kg")} == after.specs
    assert ("x", 3) == (after.name, after.shop_id)
    assert ["color", "size", "weight"] == [each["k"] for each in stored(database)]
    after = store.update(Product, 1, {"$set": {"specs.new.one": 1}, "$unset": {"specs.color": ""}})
    assert {"size": 5, "weight": Measured(7, "kg"), "new.one": 1} == after.specs
    assert all({"k", "v"} <= each.keys() for each in stored(database))
    after = store.update(Product, 1, {"$set": {"specs.weight": Measured(8, "lb")}})
    assert Measured(8, "lb") == after.specs["weight"]
    assert {"a": 1} == store.update(Product, 1, {"$set": {"specs": {"a": 1}}}).specs
    assert [{"k": "a", "v": 1}] == stored(database)
    assert [] == store.verify()


def test_updates_and_deletions_are_chosen_by_names(filled, database):
    assert 2 == filled.update_many(Product, {"specs.color": "red"}, {"$set": {"specs.color": "green"}})
    assert "green" == filled.update(Product, {"specs.size": 9}, {"$set": {"name": "big"}}).specs["color"]
    assert 1 == filled.delete_many(Product, {"specs.color": "blue"})
    assert 1 == filled.delete(Product, {"specs.size": 5}).id


def test_values_are_the_model_s_and_text_is_never_an_expression(store, database):
    store.insert(Product(id=1, name="secret"))
    store.update(Product, 1, {"$set": {"specs.color": "$name"}})
    assert {"color": "$name"} == store.get(Product, 1).specs
    with pytest.raises(UsageError):
        store.update(Product, 1, {"$set": {"sheet.lines.top": 5}})
    for update in ({"$push": {"specs.tags": "x"}}, {"$set": {"specs.a": 1}, "$push": {"name": 1}}):
        with pytest.raises(UsageError) as raised:
            store.update(Product, 1, update)
        assert raised.value.code in ("attributes-update", "value-invalid", "update-invalid")


REFUSED_UPDATES: list[Any] = [
    {"$set": {"specs.color": "x"}, "$unset": {"specs.color": ""}},
    {"$set": {"specs": {"a": 1}, "specs.color": "x"}},
    {"$set": {"sheet": {"lines": {}}, "sheet.lines.top": "x"}},
    {"$set": {"specs.$[].v": 1}},
    {"$set": {"specs.weight.unit": "lb"}},
    *({operator: {"specs.weight.value": 1}} for operator in ("$inc", "$mul", "$min", "$max")),
    [{"$set": {"specs.color": "x"}}],
    [{"$unset": "specs.color"}],
]


def test_an_update_that_attributes_cannot_take_is_refused(store, database):
    """Two changes of one name, parts of a value, arithmetic and pipelines."""
    store.insert(Product(id=1, specs={"color": "red", "weight": Measured(7, "kg")}))
    before = database["products"].find_one()
    for update in REFUSED_UPDATES:
        for call in (store.update, store.update_many):
            with pytest.raises(UsageError) as raised:
                call(Product, {"_id": 1}, update)
            assert "attributes-update" == raised.value.code, update
    assert before == database["products"].find_one()


def test_an_update_of_one_name_keeps_the_others_of_a_plain_dict(store, database):
    """A document that nobody has made pairs of yet."""
    raw = {"_id": 1, "name": "", "shop_id": 1, "specs": {"color": "red", "size": 5}, "sheet": {"lines": []}}
    database.get_collection("products").insert_many([raw], bypass_document_validation=True)
    store.update(Product, 1, {"$set": {"specs.color": "blue"}})
    assert [{"k": "color", "v": "blue"}, {"k": "size", "v": 5}] == stored(database)
    assert [] == store.verify()


def test_removing_a_name_that_is_not_there_changes_nothing(store, database):
    raw = {"_id": 1, "name": "", "shop_id": 1}
    database["products"].insert_one(dict(raw))
    store.update(Product, 1, {"$unset": {"specs.color": ""}})
    assert raw == database["products"].find_one({}, {"_treadle": 0})


def test_sorts_by_a_name(filled):
    found = [each.id for each in filled.find(Product, {"specs.size": {"$exists": True}}, sort="-specs.size")]
    assert [2, 1] == found
    assert [1] == [each.id for each in filled.find(Product, sort="-specs.size", skip=1, limit=1)]
    assert 2 == filled.find_one(Product, sort="-specs.size").id
    for call in (lambda: filled.page(Product, sort="specs.size"),):
        with pytest.raises(UsageError) as raised:
            call()
        assert "sort-invalid" == raised.value.code


def test_conditions_of_derived_values_are_translated(store, database):
    store.insert(Product(id=1, specs={"color": "red", "weight": Measured(9, "kg")}))
    store.insert(Product(id=2, specs={"color": "blue"}))
    assert (1, 1) == (store.get(Shop, 1).red, store.get(Shop, 1).heavy)
    store.update(Product, 2, {"$set": {"specs.color": "red"}})
    assert 2 == store.get(Shop, 1).red
    store.update(Product, 1, {"$unset": {"specs.color": ""}})
    assert 1 == store.get(Shop, 1).red
    assert [] == store.verify()
    store.rebuild()
    assert 1 == store.get(Shop, 1).red


def test_the_validator_refuses_what_is_no_pair(store, database):
    from pymongo.errors import WriteError

    for specs in ([{"k": 5, "v": 1}], [{"k": "a"}], {"a": 1}):
        with pytest.raises(WriteError):
            database["products"].insert_one(
                {"_id": 9, "name": "", "shop_id": 1, "specs": specs, "sheet": {"lines": []}}
            )


def test_what_others_wrote_is_read_and_doubled_names_are_found(store, database):
    raw = database.get_collection("products")
    pairs = [{"k": "color", "v": "red"}, {"k": "size", "v": 1}, {"k": "color", "v": "blue"}]
    documents = [
        {"_id": 1, "name": "", "shop_id": 1, "specs": pairs, "sheet": {"lines": []}},
        {"_id": 2, "name": "", "shop_id": 1, "specs": {"color": "red"}, "sheet": {"lines": []}},
    ]
    raw.insert_many(documents, bypass_document_validation=True)
    assert {"color": "blue", "size": 1} == store.get(Product, 1).specs
    assert {"color": "red"} == store.get(Product, 2).specs
    found = [each for each in store.verify() if each.pattern == "attributes"]
    assert [1, 2] == [each.document_id for each in found]
    store.repair()
    assert [] == store.verify()
    assert [{"k": "color", "v": "blue"}, {"k": "size", "v": 1}] == stored(database)
    assert {"color": "blue", "size": 1} == store.get(Product, 1).specs


def test_what_a_repair_changes_is_followed(store, database):
    pairs = [{"k": "color", "v": "red"}, {"k": "color", "v": "blue"}]
    raw = {"name": "", "shop_id": 1, "sheet": {"lines": []}}
    database["products"].insert_many([{**raw, "_id": key, "specs": pairs} for key in (1, 2)])
    database["products"].insert_one({**raw, "_id": 3, "specs": pairs[:1]})
    assert 2 == store.repair(Product)
    assert 1 == store.get(Shop, 1).red
    assert [] == [each for each in store.verify() if each.path == "red"]


def test_elements_of_other_writers_stay_and_are_named(store, database):
    """A repair deletes nothing that it does not understand."""
    foreign = {"k": "size", "value": 7}
    specs = [{"k": "color", "v": "red"}, foreign, {"k": "color", "v": "blue"}]
    raw = {"_id": 1, "name": "", "shop_id": 1, "specs": specs, "sheet": {"lines": []}}
    database.get_collection("products").insert_many([raw], bypass_document_validation=True)
    store.repair(Product)
    assert [{"k": "color", "v": "blue"}, foreign] == stored(database)
    (item,) = store.set_aside()
    assert ("Product.specs", 1, "document-invalid") == (item.rule, item.document_id, item.code)


@pytest.mark.heavy
def test_random_updates_and_filters(database):
    """Against a plain dict, and against a collection whose fields are ordinary ones."""
    store, chance = Store(database, [Product, Shop]), random.Random(5)
    store.setup()
    plain: dict[int, dict[str, Any]] = {}
    names, values = ["color", "size", "a.b", "n"], [1, 2, 3]
    for number in range(STEPS):
        key, name, value = chance.randrange(5), chance.choice(names), chance.choice(values)
        what = chance.choice(["put", "set", "set", "unset", "many", "delete", "replace"])
        field = f"specs.{name}"
        if what == "put" and key not in plain:
            store.insert(Product(id=key, specs={name: value}))
            plain[key] = {name: value}
        elif what == "replace" and key in plain:
            store.replace(Product(id=key, specs={name: value, "x": 1}))
            plain[key] = {name: value, "x": 1}
        elif what == "delete":
            store.delete(Product, {field: value})
            gone = sorted(each for each, specs in plain.items() if specs.get(name) == value)
            left = {each["_id"] for each in database["products"].find({}, {"_id": 1})}
            assert len(gone[:1]) == len(plain) - len(left)
            plain = {each: specs for each, specs in plain.items() if each in left}
        elif what == "many":
            store.update_many(Product, {field: {"$gte": value}}, {"$set": {field: value + 1}})
            for specs in plain.values():
                if specs.get(name, 0) >= value:
                    specs[name] = value + 1
        elif what in ("set", "unset"):
            store.update(Product, key, {f"${what}": {field: value}})
            if key in plain and what == "unset":
                plain[key].pop(name, None)
            elif key in plain:
                plain[key][name] = value
        asked = chance.choice(
            [{"$gte": value}, value, {"$ne": value}, {"$exists": False}, None, {"$nin": [value]}]
        )
        expected = sorted(each for each, specs in plain.items() if _matches(specs.get(name), asked))
        assert expected == [each.id for each in store.find(Product, {field: asked}, sort="_id")]
        assert plain == {each.id: each.specs for each in store.find(Product)}
        if number % 100 == 99:
            assert [] == store.verify()


def _matches(value: Any, asked: Any) -> bool:
    if not isinstance(asked, dict):
        return bool(value == asked)
    ((operator, operand),) = asked.items()
    return {
        "$gte": lambda: value is not None and value >= operand,
        "$ne": lambda: value != operand,
        "$exists": lambda: value is None,
        "$nin": lambda: value not in operand,
    }[operator]()


@pytest.mark.parametrize("order", [1, -1])
def test_an_update_picks_the_document_that_an_attribute_sorts_first(run, order):
    store = run.store([Product, Shop])
    store.setup()
    sizes = {1: 5, 2: 9, 3: 2, 4: 7}
    store.insert_many([Product(id=key, specs={"size": size}) for key, size in sizes.items()])
    sort = [("specs.size", order)]
    picked = store.update(Product, {"specs.size": {"$gt": 1}}, {"$set": {"name": "picked"}}, sort=sort)
    assert (3 if order == 1 else 2) == picked.id
    assert {"name": "picked", "specs": {"size": sizes[picked.id]}} == store.get(
        Product, picked.id
    ).model_dump(include={"name", "specs"})
    before = store.update(Product, {"name": ""}, {"$set": {"name": "next"}}, sort=sort, returns="before")
    assert (1 if order == 1 else 4, "") == (before.id, before.name)
    assert 1 == store.count(Product, {"name": "next"})


def test_an_attribute_needs_a_name_wherever_it_is_said(store, database):
    """What no filter could find is not stored; what another writer stored so is read."""
    with pytest.raises(UsageError, match="attribute-unnamed"):
        store.insert(Product(id=70, specs={"": 1}))
    store.insert(Product(id=71, specs={"size": 1}))
    calls = {
        "update-invalid": lambda: store.update(Product, 71, {"$set": {"specs.": 2}}),
        "attribute-unnamed": lambda: store.update(Product, 71, {"$set": {"specs": {"": 2}}}),
        "filter-invalid": lambda: store.find_one(Product, {"specs.": 1}),
    }
    for code, call in calls.items():
        with pytest.raises(UsageError, match=code):
            call()
    with pytest.raises(UsageError, match="attribute-unnamed"):
        store.change(store.get(Product, 71), specs={"": 2})
    assert {"size": 1} == store.get(Product, 71).specs
    database["products"].insert_one({"_id": 72, "specs": [{"k": "", "v": 1}]})
    assert {"": 1} == store.get(Product, 72).specs


class Renamed(Document, collection="renamed", version=2):
    id: int
    specs: Annotated[dict[str, int], Attributes()] = {}


@migration(Renamed, from_version=1, fields=("specs", "old"))
def rename_specs(document: dict[str, Any]) -> dict[str, Any]:
    document["specs"] = document.pop("old", [])
    return document


def test_pairs_of_an_outdated_document_are_repaired(run, database):
    store = run.store([Renamed])
    database.renamed.insert_one({"_id": 1, "old": [{"k": "a", "v": 1}, {"k": "a", "v": 2}]})
    assert 1 == len(store.verify())
    assert 1 == store.repair()
    assert {"_id": 1, "specs": [{"k": "a", "v": 2}], "schema_version": 2} == database.renamed.find_one()
    assert [] == store.verify()
