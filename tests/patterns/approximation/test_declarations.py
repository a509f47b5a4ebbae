"""Counter declarations that cannot work, and updates of the field that others try.

Covers: patterns/approximation/declaration
"""

from __future__ import annotations

from typing import Annotated

import pytest
from bson import ObjectId

from tests.patterns.approximation.products import NEVER, Painted, Product, store_of, stored
from tests.support import Colour, race
from treadle import Approximate, DeclarationError, Document, Formula, Store, Sum, UsageError

# -- the field is the counter's ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "update", [{"$inc": {"views": 1}}, {"$set": {"views": 0}}, {"$set": {"last_flushed": None}}]
)
def test_plain_updates_of_a_counter_are_refused_with_what_to_call(run, update):
    store = store_of(run)
    with pytest.raises(UsageError, match=r"call store.counter\(Product, '(views|likes)'\)") as refused:
        store.update(Product, 1, update)
    assert "field-maintained" == refused.value.code


def test_replace_keeps_the_stored_number(run, database):
    store = store_of(run)
    stale = store.get(Product, 1)
    store.counter(Product, "views").add(1, 10)
    stale.views = 999
    assert 10 == store.replace(stale).views


def test_replaces_and_flushes_at_once_lose_nothing(database):
    store = Store(database, [Product])
    store.insert(Product(id=1))

    def replace() -> None:
        for _ in range(20):
            store.replace(Product(id=1, views=5))

    def count() -> None:
        for _ in range(20):
            store.counter(Product, "views").add(1, 10)

    race(replace, count, count)
    assert 400 == stored(database, "views")


class Shop(Document, collection="shops"):
    id: int
    total: Annotated[int, Sum("Item", "views", by="shop_id")] = 0


class Item(Document, collection="items"):
    id: int
    shop_id: int
    views: Annotated[int, Approximate(every=10, within=NEVER)] = 0
    likes: Annotated[int, Approximate(every=10, within=NEVER, buffer="durable")] = 0
    hits: Annotated[int, Approximate(every=1, buffer="sampled")] = 0
    score: Annotated[int | None, Formula({"$add": ["$views", "$likes", "$hits"]})] = None


def test_counts_feed_formulas_and_other_documents(run):
    store = run.store([Shop, Item])
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Item(id=key, shop_id=1) for key in (1, 2)])
    store.counter(Item, "views").add_many({1: 5, 2: 7})
    store.counter(Item, "likes").add_many({1: 20, 2: 10})
    store.counter(Item, "hits").add(1, 100)
    assert (12, 125, 17) == (store.get(Shop, 1).total, store.get(Item, 1).score, store.get(Item, 2).score)
    assert [] == store.verify()


# -- declarations ------------------------------------------------------------------------------------


class Whole(Document, collection="wholes"):
    name: str
    n: Annotated[int, Approximate(upsert=True)] = 0


def test_an_upsert_that_could_not_be_a_document_is_refused(database):
    with pytest.raises(DeclarationError) as refused:
        counter = Store(database, [Whole]).counter(Whole, "n")
        counter.add(ObjectId())
        counter.flush()
    assert "upsert-incomplete" == refused.value.code


def test_an_unknown_counter_is_named(run):
    with pytest.raises(UsageError, match="it has 'views', 'likes'") as refused:
        store_of(run).counter(Product, "view")
    assert "counter-unknown" == refused.value.code


def test_keys_may_be_enums_and_numbers_floats(run, database):
    store = run.store([Painted])
    store.setup()
    counter = store.counter(Painted, "n")
    counter.add(Colour.RED, 0.5)
    counter.add("red", 2)
    assert {Colour.RED: 2.5} == counter.pending()
    counter.add("blue")
    assert 2.5 == counter.read(Colour.RED)
    assert {"red", "blue"} == {each["colour"] for each in database["painted"].find()}
