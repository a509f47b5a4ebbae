"""Random histories of writes: every computed value equals a recomputation after each step."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pydantic import BaseModel

from tests.engine.histories import (
    POOL,
    Machine,
    Raw,
    check_values,
    ids,
    known,
    maybe_ids,
    play,
    ratings,
    simple,
)
from treadle import Average, Count, Document, Formula, Id, Max, Min, Sum


class Town(Document, collection="towns"):
    name: str = "town"
    shops: Annotated[int, Count("Shop", by="town_id")] = 0
    busy: Annotated[int, Count("Shop", by="town_id", where={"sales.count": {"$gte": 2}})] = 0
    total: Annotated[int, Sum("Shop", "total", by="town_id")] = 0
    best: Annotated[float | None, Max("Shop", "average", by="town_id")] = None
    score: Annotated[int, Sum("Shop", "score", by="town_id")] = 0


class Item(BaseModel):
    shop_id: Id | None = None
    quantity: int | None = None
    price: Decimal | None = None


class Sale(Document, collection="sales"):
    shop_id: Id | None = None
    tag_ids: list[Id] | None = None
    rating: int | None = None
    amount: Decimal | None = None
    weight: float | None = None
    state: str | None = "open"
    items: list[Item] = []


OPEN = {"state": "open", "rating": {"$gte": 2}}


class Sales(BaseModel):
    count: Annotated[int, Count(Sale, by="shop_id")] = 0
    open: Annotated[int, Count(Sale, by="shop_id", where=OPEN)] = 0
    note: str | None = None


class Shop(Document, collection="shops"):
    base: int = 1
    town_id: Id | None = None
    sales: Sales = Sales()
    total: Annotated[int, Sum(Sale, "rating", by="shop_id")] = 0
    money: Annotated[Decimal, Sum(Sale, "amount", by="shop_id")] = Decimal(0)
    mass: Annotated[float, Sum(Sale, "weight", by="shop_id")] = 0.0
    average: Annotated[float | None, Average(Sale, "rating", by="shop_id", computed_at="computed")] = None
    average_open: Annotated[Decimal | None, Average(Sale, "amount", by="shop_id", where=OPEN)] = None
    lowest: Annotated[int | None, Min(Sale, "rating", by="shop_id")] = None
    highest: Annotated[Decimal | None, Max(Sale, "amount", by="shop_id", where=OPEN)] = None
    worth: Annotated[Decimal, Sum(Sale, {"$multiply": ["$rating", "$amount"]}, by="shop_id")] = Decimal(0)
    tagged: Annotated[int, Count(Sale, by="tag_ids")] = 0
    tagged_total: Annotated[int, Sum(Sale, "rating", by="tag_ids")] = 0
    tagged_worst: Annotated[int | None, Min(Sale, "rating", by="tag_ids", where={"state": "open"})] = None
    listed: Annotated[int, Count(Sale, by="items.shop_id")] = 0
    sold: Annotated[int, Sum(Sale, "items.quantity", by="items.shop_id")] = 0
    sold_open: Annotated[int, Sum(Sale, "items.quantity", by="items.shop_id", where=OPEN)] = 0
    dearest: Annotated[Decimal | None, Max(Sale, "items.price", by="items.shop_id")] = None
    score: Annotated[int | None, Formula({"$add": ["$base", {"$multiply": ["$sales.count", 10]}]})] = None
    grade: Annotated[int | None, Formula({"$add": ["$score", "$total"]})] = None
    computed: dt.datetime | None = None


def is_open(sale: Raw) -> bool:
    return sale.get("state") == "open" and (sale.get("rating") is not None and sale["rating"] >= 2)


def expected_shop(shop: Raw, sales: list[Raw]) -> Raw:
    """All maintained fields of a shop, the naive way."""
    key = shop["_id"]
    mine = [sale for sale in sales if sale.get("shop_id") == key]
    opened = [sale for sale in mine if is_open(sale)]
    tagged = [sale for sale in sales if key in (sale.get("tag_ids") or [])]
    listed = [sale for sale in sales if any(item.get("shop_id") == key for item in sale.get("items") or [])]
    items = [(sale, item) for sale in listed for item in sale["items"] if item.get("shop_id") == key]
    ratings = known(sale.get("rating") for sale in mine)
    amounts = known(sale.get("amount") for sale in opened)
    total = sum(ratings)
    score = shop["base"] + 10 * len(mine)
    return {
        "sales.count": len(mine),
        "sales.open": len(opened),
        "total": total,
        "money": sum(known(sale.get("amount") for sale in mine), Decimal(0)),
        "mass": math.fsum(known(sale.get("weight") for sale in mine)),
        "average": total / len(ratings) if ratings else None,
        "average_open": sum(amounts, Decimal(0)) / len(amounts) if amounts else None,
        "lowest": min(ratings, default=None),
        "highest": max(amounts, default=None),
        "worth": sum(
            (
                sale["rating"] * sale["amount"]
                for sale in mine
                if sale.get("rating") is not None and sale.get("amount") is not None
            ),
            Decimal(0),
        ),
        "tagged": len(tagged),
        "tagged_total": sum(known(sale.get("rating") for sale in tagged)),
        "tagged_worst": min(
            known(sale.get("rating") for sale in tagged if sale.get("state") == "open"), default=None
        ),
        "listed": len(listed),
        "sold": sum(known(item.get("quantity") for _, item in items)),
        "sold_open": sum(known(item.get("quantity") for sale, item in items if is_open(sale))),
        "dearest": max(known(item.get("price") for _, item in items), default=None),
        "score": score,
        "grade": score + total,
    }


def expected_town(town: Raw, shops: list[Raw]) -> Raw:
    mine = [shop for shop in shops if shop.get("town_id") == town["_id"]]
    return {
        "shops": len(mine),
        "busy": len([shop for shop in mine if shop["sales"]["count"] >= 2]),
        "total": sum(shop["total"] for shop in mine),
        "best": max(known(shop.get("average") for shop in mine), default=None),
        "score": sum(shop["score"] for shop in mine),
    }


amounts = st.sampled_from(
    [None, Decimal("0.10"), Decimal("0.2"), Decimal("19.99"), Decimal("-3"), Decimal("1E+3")]
)

weights = st.sampled_from([None, 0.1, 0.2, 1e8, -0.3])
states = st.sampled_from(["open", "open", "shut", None])
items = st.lists(st.builds(Item, shop_id=maybe_ids, quantity=ratings, price=amounts), max_size=3)

sales = st.builds(
    dict,
    shop_id=maybe_ids,
    tag_ids=st.one_of(st.none(), st.lists(ids, max_size=3)),
    rating=ratings,
    amount=amounts,
    weight=weights,
    state=states,
    items=items,
)


class ComputedMachine(Machine):
    """Counts, sums, averages, extremes and formulas, also of maintained fields."""

    models: ClassVar = [Town, Shop, Sale]

    def check(self) -> None:
        self.state = self.read()
        sold = [simple(each) for each in self.state["sales"].values()]
        shops = [simple(each) for each in self.state["shops"].values()]
        for shop in shops:
            check_values(expected_shop(shop, sold), shop)
        for town in self.state["towns"].values():
            check_values(expected_town(town, shops), simple(town))

    @initialize()
    def begin(self):
        self.store.insert(Town(id=POOL[0]))
        self.store.insert_many([Shop(id=key, town_id=POOL[0]) for key in POOL[:3]])
        for at, key in enumerate(POOL[:4]):
            line = Item(shop_id=POOL[at % 2], quantity=at, price=Decimal(at))
            self.store.insert(
                Sale(
                    id=key,
                    shop_id=POOL[at % 2],
                    tag_ids=[POOL[0], POOL[1]],
                    rating=at,
                    amount=Decimal(at),
                    items=[line, line],
                )
            )

    @rule(id=ids, base=st.integers(0, 3), town=maybe_ids)
    def insert_shop(self, id, base, town):
        """Also after its sales, and with values that the caller made up."""
        self.add(Shop(id=id, base=base, town_id=town, total=99, sales=Sales(count=99, note="n")))

    @rule(chosen=st.sets(ids, max_size=3), town=maybe_ids)
    def insert_shops(self, chosen, town):
        new = [Shop(id=each, town_id=town) for each in sorted(chosen) if not self.has(Shop, each)]
        assert new == [] or len(new) == len(self.store.insert_many(new))

    @rule(id=ids)
    def insert_town(self, id):
        self.add(Town(id=id))

    @rule(model=st.sampled_from([Town, Shop]), id=ids)
    def delete_target(self, model, id):
        self.store.delete(model, id)

    @rule(id=ids, base=st.integers(0, 3), town=maybe_ids)
    def update_shop(self, id, base, town):
        self.store.update(Shop, id, {"$set": {"base": base, "town_id": town, "sales.note": "x"}})

    @rule(id=ids, sale=sales)
    def insert_sale(self, id, sale):
        self.add(Sale(id=id, **sale))

    @rule(chosen=st.lists(sales, max_size=4))
    def insert_sales(self, chosen):
        self.store.insert_many([Sale(**sale) for sale in chosen])

    @rule(id=ids, shop=maybe_ids, rating=ratings, amount=amounts, weight=weights, state=states)
    def set_sale(self, id, shop, rating, amount, weight, state):
        change = {"shop_id": shop, "rating": rating, "amount": amount, "weight": weight, "state": state}
        self.store.update(Sale, id, {"$set": change})

    @rule(id=ids, tag=ids, shop=maybe_ids, value=ratings, how=st.integers(0, 9))
    def alter_sale(self, id, tag, shop, value, how):
        sale = self.state["sales"].get(id)
        if sale is None:
            return
        item = {"shop_id": shop, "quantity": value, "price": Decimal("2.5")}
        updates: list[Any] = [
            {"$inc": {"rating": 2}},
            {"$inc": {"amount": Decimal("0.01")}},
            {"$push": {"tag_ids": tag}},
            {"$pull": {"tag_ids": tag}},
            {"$unset": {"rating": "", "tag_ids": ""}},
            {"$push": {"items": item}},
            {"$pull": {"items": {"shop_id": shop}}},
            [{"$set": {"rating": {"$add": [{"$ifNull": ["$rating", 0]}, 1]}, "shop_id": shop}}],
            [{"$unset": ["weight", "state"]}],
            {"$unset": {"shop_id": "", "items": ""}},
        ]
        needs = {0: "rating", 1: "amount", 2: "tag_ids", 3: "tag_ids", 5: "items", 6: "items"}
        if how in needs and sale.get(needs[how]) is None:
            return
        self.store.update(Sale, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_sales(self, old, new):
        count = len([each for each in self.state["sales"].values() if each.get("shop_id") == old])
        assert count == self.store.update_many(Sale, {"shop_id": old}, {"$set": {"shop_id": new}})

    @rule(state=states)
    def shut_sales(self, state):
        self.store.update_many(
            Sale, {"rating": {"$gte": 2}}, {"$set": {"state": state}, "$inc": {"rating": -1}}
        )

    @rule(id=ids)
    def delete_sale(self, id):
        self.store.delete(Sale, id)

    @rule(shop=maybe_ids)
    def delete_sales(self, shop):
        count = len([each for each in self.state["sales"].values() if each.get("shop_id") == shop])
        assert count == self.store.delete_many(Sale, {"shop_id": shop})

    @rule(model=st.sampled_from([Shop, Sale]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), base=st.integers(0, 3), rating=ratings, shop=maybe_ids)
    def replace(self, which, base, rating, shop):
        self.replace_kept(Shop, which, base=base)
        self.replace_kept(Sale, which, rating=rating, shop_id=shop)


@pytest.mark.heavy
def test_computed_values_equal_a_recomputation(run, database):
    play(ComputedMachine, run, database, examples=6)
