"""Rollup declarations that cannot work, and what callers may not do with groups."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from tests.patterns.sales import CategoryStats, DailySales, Product, Sale, at, rows, sale
from treadle import (
    Count,
    Day,
    DeclarationError,
    Document,
    Formula,
    Hour,
    Minute,
    Rollup,
    Store,
    Sum,
    Total,
    UsageError,
)

# -- what callers may not do -------------------------------------------------------------------------


def test_documents_of_a_rollup_are_treadles(run):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(DailySales, {})
    attempts: list[Callable[[], Any]] = [
        lambda: store.insert(found),
        lambda: store.insert_many([found]),
        lambda: store.replace(found),
        lambda: store.delete(DailySales, found.id),
        lambda: store.delete_many(DailySales, {}),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match="write the Sale documents instead") as raised:
            attempt()
        assert "rollup-maintained" == raised.value.code
    for path in ("day", "product_id", "total_amount", "_treadle.state.members"):
        with pytest.raises(UsageError) as raised:
            store.update(DailySales, found.id, {"$set": {path: 1}})
        assert "field-maintained" == raised.value.code, path
    assert found == store.find_one(DailySales, {})


class Noted(Document, collection="noted", rollup=Rollup(Sale, keys={"product_id": "product_id"})):
    product_id: int
    count: Annotated[int, Count()] = 0
    note: str = ""
    shouted: Annotated[str | None, Formula({"$toUpper": "$note"})] = None


def test_a_callers_own_fields_may_be_updated(run):
    store = run.store([Sale, Noted])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    updated = store.update(Noted, {"product_id": 1}, {"$set": {"note": "good"}})
    assert ("good", "GOOD") == (updated.note, updated.shouted)
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(Noted, {})
    assert ("good", 2) == (found.note, found.count)
    store.rebuild()
    assert "good" == store.find_one(Noted, {}).note


def test_without_its_unique_index_nothing_is_written(run, database):
    store = run.store([Sale, DailySales])
    with pytest.raises(UsageError, match=r"run setup\(\) first") as raised:
        store.insert(sale(1, "1", 2026, 3, 1))
    assert "rollup-index-missing" == raised.value.code
    assert [] == rows(database, "sales")
    with pytest.raises(UsageError):
        database.sales.insert_one({"product_id": 1, "amount": Decimal128("1"), "created_at": at(2026, 1, 1)})
        store.rebuild()
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    assert 1 == len(rows(database, "daily_summaries"))


def test_set_up_makes_the_indexes(run, database):
    store = run.store([Sale, DailySales, Product, CategoryStats])
    store.setup()
    (index,) = (each for each in database.daily_summaries.index_information().values() if each.get("unique"))
    assert [("product_id", 1), ("day", 1)] == index["key"]
    assert [("product_id", 1), ("created_at", 1)] in [
        each["key"] for each in database.sales.index_information().values()
    ]
    assert {"_id_"} == set(database.category_stats.index_information()), "the id is unique already"


# -- declarations ------------------------------------------------------------------------------------


def refused(**keywords: Any) -> DeclarationError:
    """The error of a Store whose rollup is declared in a wrong way."""
    fields = {"__annotations__": {"product_id": int, "day": dt.datetime}, "__module__": __name__}
    fields["__annotations__"].update(keywords.pop("fields", {}))
    fields.update(keywords.pop("values", {}))
    declared = keywords.pop("rollup", None) or Rollup(
        keywords.pop("source", Sale), keys=keywords.pop("keys"), **keywords
    )
    with pytest.raises(DeclarationError) as raised:
        model = type(Document)("Wrong", (Document,), fields, collection="wrong", rollup=declared)
        Store.__new__(Store)
        from treadle.graph.graph import Graph

        Graph([Sale, DailySales, model])
    return raised.value


class Figures(BaseModel):
    count: Annotated[int, Count()] = 0
    unit: str


BOTH = {"product_id": "product_id", "day": Day("created_at")}


@pytest.mark.parametrize(
    ("code", "keywords"),
    [
        ("rollup-keys", {"keys": {}}),
        ("rollup-keys", {"keys": {"nothing": "product_id"}}),
        ("source-field-missing", {"keys": {"product_id": "produkt_id", "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "shop", "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": Day("amount")}}),
        ("rollup-keys", {"keys": {"product_id": Day("created_at"), "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": Day("created_at", timezone="Mars/North")}}),
        ("rollup-keys", {"keys": {"product_id": Total()}}),
        ("rollup-keys", {"keys": {"name": Total(5)}, "fields": {"name": str}}),
        ("rollup-keys", {"keys": {"day": Minute("created_at", size=7)}}),
        ("rollup-keys", {"keys": {"day": Hour("created_at", size=5)}}),
        ("rollup-keys", {"keys": {"day": Hour("created_at", size=0)}}),
        ("rollup-keys", {"keys": {"day": Hour("created_at", size=True)}}),
        ("rollup-keys", {"keys": {"on": Minute("created_at")}, "fields": {"on": dt.date}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": 5}}),
        ("rollup-keys", {"keys": {**BOTH, "id": "shop"}}),
        ("rollup-keys", {"keys": BOTH, "fields": {"id": str}}),
        ("rollup-field", {"keys": BOTH, "fields": {"note": str}}),
        ("rollup-field", {"keys": BOTH, "fields": {"figures": Figures}}),
        ("rollup-keys", {"keys": {**BOTH, "on": Day("created_at", timezone="Asia/Tokyo")}, "fields": {"on": dt.date}}),
        ("rollup-source", {"keys": BOTH, "fields": {"n": Annotated[int, Count(DailySales)]}}),
        ("rollup-source", {"keys": BOTH, "fields": {"n": Annotated[int, Count(by="product_id")]}}),
        ("source-field-missing", {"keys": BOTH, "fields": {"n": Annotated[Decimal, Sum()]}}),
        ("source-field-missing", {"keys": BOTH, "fields": {"n": Annotated[Decimal, Sum("amuont")]}}),
        ("pattern-keyword", {"keys": BOTH, "maintain": "sometimes"}),
        ("pattern-keyword", {"keys": BOTH, "maintain": "schedule"}),
        ("pattern-keyword", {"keys": BOTH, "fields": {"n": Annotated[int, Count(maintain="stream")]}}),
        ("maintenance-cycle", {"source": "Wrong", "keys": {"product_id": "product_id"}}),
        ("source-unknown", {"source": "Slae", "keys": BOTH}),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(code, keywords):
    assert code == refused(**keywords).code


def test_an_aggregate_without_a_source_belongs_into_a_rollup():
    class Lost(Document, collection="lost"):
        count: Annotated[int, Count()] = 0

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="only inside a rollup") as raised:
        Graph([Lost])
    assert "source-unknown" == raised.value.code


@pytest.mark.parametrize("field", [None, 3])
def test_a_window_is_of_a_field(run, field):
    class Daily(Document, collection="daily", rollup=Rollup(Sale, keys={"day": Day(field)})):
        day: dt.datetime
        count: Annotated[int, Count()] = 0

    with pytest.raises(DeclarationError, match="source-field-missing"):
        run.store([Sale, Daily])
