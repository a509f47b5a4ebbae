"""Collect: all distinct values, sorted, up to a bound; exact after every write."""

from __future__ import annotations

import random
from typing import Annotated, Any

from pydantic import BaseModel

from treadle import Collect, Document

STEPS = 80
SIZE = 3


class Part(BaseModel):
    product: int
    color: str | None = None


class Use(Document, collection="uses"):
    product: int | None = None
    tag: str | None = None
    words: list[str] = []
    parts: list[Part] = []


def product(**how: Any) -> Any:
    class Product(Document, collection="products"):
        id: int
        tags: Annotated[list[str], Collect(Use, "tag", by="product", size=SIZE, **how)] = []
        chosen: Annotated[
            list[str], Collect(Use, "tag", by="product", where={"words": {"$ne": []}}, size=SIZE, **how)
        ] = []
        words: Annotated[set[str], Collect(Use, "words", by="product", **how)] = set()
        colors: Annotated[list[str], Collect(Use, "parts.color", by="parts.product", size=SIZE, **how)] = []
        upper: Annotated[list[str], Collect(Use, {"$toUpper": "$tag"}, by="product", **how)] = []

    return Product


def check(database: Any) -> None:
    uses = list(database["uses"].find())
    for each in database["products"].find():
        own = [use for use in uses if use.get("product") == each["_id"]]
        tags = sorted({use["tag"] for use in own if use.get("tag") is not None})
        chosen = sorted({use["tag"] for use in own if use.get("tag") is not None and use["words"]})
        colors = {
            part.get("color") for use in uses for part in use["parts"] if part["product"] == each["_id"]
        }
        expected = {
            "tags": tags[:SIZE],
            "chosen": chosen[:SIZE],
            "words": sorted({word for use in own for word in use["words"]}),
            "colors": sorted(colors - {None})[:SIZE],
            "upper": sorted({(use.get("tag") or "").upper() for use in own}),
        }
        assert expected == {name: each.get(name, []) for name in expected}


def write(store: Any, chance: random.Random) -> None:
    """One random write of a source."""

    def new() -> dict[str, Any]:
        parts = [Part(product=chance.randrange(3), color=chance.choice(["r", "g", "b", "c", None]))]
        return {
            "product": chance.choice([0, 1, 2, None]),
            "tag": chance.choice([*"abcdef", None]),
            "words": chance.sample("uvwxyz", chance.randrange(3)),
            "parts": parts * chance.randrange(3),
        }

    uses = list(store.find(Use))
    act = chance.randrange(6) if uses else 0
    if act == 0:
        store.insert_many([Use(**new()), Use(**new())])
    elif act == 1:
        store.change(chance.choice(uses), **new())
    elif act == 2:
        store.update_many(Use, {"tag": chance.choice("abcdef")}, {"$set": {"tag": chance.choice("abcdef")}})
    elif act == 3:
        store.delete(Use, chance.choice(uses).id)
    elif act == 4:
        store.update(Use, chance.choice(uses).id, {"$push": {"words": chance.choice("uvwxyz")}})
    else:
        store.update(Use, chance.choice(uses).id, {"$unset": {"tag": ""}})


def test_the_values_follow_a_random_history(run, database):
    Product = product()
    store = run.store([Use, Product])
    store.setup()
    store.insert_many([Product(id=0), Product(id=1)])
    chance = random.Random(5)
    for number in range(STEPS):
        write(store, chance)
        if number == STEPS // 2:
            store.insert(Product(id=2))
        check(database)
    assert [] == store.verify()


def test_the_first_values_move_up_when_one_leaves(run, database):
    """Beyond the bound stands what only the sources know."""
    Product = product()
    store = run.store([Use, Product])
    store.setup()
    store.insert(Product(id=0))
    uses = store.insert_many([Use(product=0, tag=tag) for tag in "dcbaa"])
    assert ["a", "b", "c"] == store.get(Product, 0).tags
    store.delete(Use, uses[3].id)
    assert ["a", "b", "c"] == store.get(Product, 0).tags
    store.delete(Use, uses[4].id)
    assert ["b", "c", "d"] == store.get(Product, 0).tags


def test_a_source_that_holds_something_else_stops_no_write(run, database):
    class Order(Document, collection="orders"):
        product: int
        amount: int

    class Product(Document, collection="products"):
        id: int
        amounts: Annotated[list[int], Collect(Order, "amount", by="product")] = []

    store = run.store([Order, Product])
    store.setup()
    store.insert(Product(id=1))
    one, two = store.insert_many([Order(product=1, amount=amount) for amount in (1, 2)])
    odd = {"product": 1, "amount": "many"}
    key = database["orders"].insert_one(odd, bypass_document_validation=True).inserted_id
    store.delete(Order, one.id)
    assert 3 == store.update(Order, two.id, {"$set": {"amount": 3}}).amount
    assert "extreme-invalid" in [each.code for each in store.set_aside()]
    database["orders"].delete_one({"_id": key})
    store.repair()
    assert [3] == store.get(Product, 1).amounts
    assert [] == store.verify()
