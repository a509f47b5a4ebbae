"""Rollups proved and repaired, and rollups of rollups."""

from __future__ import annotations

from bson import ObjectId
from bson.decimal128 import Decimal128

from tests.patterns.sales import CHAIN, DailySales, Sale, act_on_chain, at, check_chain, rows, sale

# -- proof and repair --------------------------------------------------------------------------------


def test_verify_finds_what_is_missing_orphaned_double_and_wrong(run, database):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert_many([sale(number, "1", 2026, 3, 1) for number in range(4)])
    summaries = database.daily_summaries
    summaries.delete_one({"product_id": 0})
    summaries.update_one({"product_id": 1}, {"$set": {"total_amount": Decimal128("7")}})
    database.sales.delete_one({"product_id": 2})
    summaries.drop_index("product_id_1_day_1")
    double = summaries.find_one({"product_id": 3})
    summaries.insert_one({**double, "_id": ObjectId()})
    key = {"product_id": 0, "day": at(2026, 3, 1)}
    found = {(each.path, each.document_id): each for each in store.verify()}
    assert 4 == len(found)
    assert {"rollup"} == {each.pattern for each in found.values()}
    missing = found["product_id, day", (0, at(2026, 3, 1))]
    assert (None, key) == (missing.stored, missing.expected)
    wrong = next(each for each in found.values() if each.path == "total_amount")
    assert (Decimal128("7"), Decimal128("1")) == (wrong.stored, wrong.expected)
    gone = [each for each in found.values() if each.expected is None]
    assert [2, 3] == sorted(each.stored["product_id"] for each in gone)
    summaries.delete_one({"_id": double["_id"]})
    store.setup()
    assert 3 == store.repair()
    assert [] == store.verify()
    assert {0: 1, 1: 1, 3: 1} == {each["product_id"]: each["order_count"] for each in summaries.find()}


def test_rebuild_makes_groups_of_old_data_and_removes_empty_ones(run, database):
    database.sales.insert_many(
        {"product_id": n % 7, "amount": Decimal128("1"), "created_at": at(2026, 1 + n % 3, 1)}
        for n in range(500)
    )
    store = run.store([Sale, DailySales])
    store.setup()
    store.rebuild()
    assert 21 == store.count(DailySales)
    assert [] == store.verify()
    database.sales.delete_many({"product_id": 3})
    store.rebuild()
    assert 18 == store.count(DailySales)
    assert [] == store.verify()


# -- chains ------------------------------------------------------------------------------------------


def test_rollups_of_rollups_and_of_maintained_fields(run, database):
    store = run.store(CHAIN)
    store.setup()
    act_on_chain(store)
    check_chain(store, database)


def test_a_chain_is_rebuilt_from_nothing(run, database):
    store = run.store(CHAIN)
    store.setup()
    act_on_chain(store)
    before = {name: rows(database, name, "_id") for name in ("shelf_days", "shelf_months", "shelves")}
    for name in ("shelf_days", "shelf_months", "earned"):
        database[name].delete_many({})
    database.shelves.update_many({}, {"$set": {"earned": Decimal128("99")}})
    store.rebuild()
    assert before == {name: rows(database, name, "_id") for name in before}
    check_chain(store, database)
