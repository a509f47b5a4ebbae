"""Extended Reference: copies of hot fields follow their source.

Covers: engine/fan_outs, graph/copied_fields, engine/references, engine/copies
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import pytest
from bson import ObjectId
from pydantic import BaseModel, Field

from treadle import (
    DataError,
    Document,
    ExtendedReference,
    Id,
    Limits,
    Store,
    UsageError,
)
from treadle.engine import fan_outs


class Customer(Document, collection="customers"):
    name: str
    email: str = ""
    tier: str = "silver"
    note: str | None = None


class CustomerCard(BaseModel):
    name: str
    tier: str


class Product(Document, collection="products"):
    name: str
    price: Decimal


class ProductCard(BaseModel):
    name: str
    price: Decimal


class Line(BaseModel):
    product_id: Id | None
    product: Annotated[
        ProductCard | None, ExtendedReference("Product", by="product_id", snapshot=["price"])
    ] = None
    quantity: int = 1


class Order(Document, collection="orders"):
    customer_id: Id | None
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    lines: list[Line] = []
    status: str = "open"


@pytest.fixture
def store(run):
    return run.store([Customer, Product, Order])


@pytest.mark.quick
def test_a_rename_reaches_every_copy_by_id_and_nothing_else(store):
    """Two customers with one email were mixed up by matching on values."""
    ann, bob = store.insert_many([Customer(name="A", email="x"), Customer(name="B", email="x")])
    orders = store.insert_many([Order(customer_id=each.id) for each in (ann, bob, ann)])
    store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    assert ["Anna", "B", "Anna"] == [store.get(Order, order.id).customer.name for order in orders]
    assert [] == store.verify()


def test_falsy_and_removed_values_propagate(run):
    class Card(BaseModel):
        note: str | None = None
        tier: str = "unset"

    class Ticket(Document, collection="tickets"):
        customer_id: Id
        customer: Annotated[Card | None, ExtendedReference(Customer, by="customer_id")] = None

    store = run.store([Customer, Ticket])
    ann = store.insert(Customer(name="Ann", note="vip"))
    ticket = store.insert(Ticket(customer_id=ann.id))
    store.update(Customer, ann.id, {"$set": {"tier": "", "note": None}})
    assert Card(note=None, tier="") == store.get(Ticket, ticket.id).customer
    store.update(Customer, ann.id, {"$unset": {"note": "", "tier": ""}})
    assert Card(note=None, tier="unset") == store.get(Ticket, ticket.id).customer
    assert [] == store.verify()


def test_snapshot_fields_keep_the_values_of_their_moment(store):
    book = store.insert(Product(name="Book", price="10"))
    order = store.insert(Order(customer_id=None, lines=[Line(product_id=book.id)]))
    store.update(Product, book.id, {"$set": {"name": "Tome", "price": Decimal("99")}})
    line = store.get(Order, order.id).lines[0]
    assert ProductCard(name="Tome", price="10") == line.product
    replaced = store.replace(order.model_copy(update={"status": "paid"}))
    assert ProductCard(name="Tome", price="10") == replaced.lines[0].product
    again = store.update(Order, order.id, {"$push": {"lines": {"product_id": book.id, "quantity": 2}}})
    assert [Decimal("10"), Decimal("99")] == [line.product.price for line in again.lines]
    assert [] == store.verify()


def test_a_missing_source_is_an_error_where_the_card_is_required(run):
    class Strict(Document, collection="strict"):
        customer_id: Id
        customer: Annotated[CustomerCard, ExtendedReference(Customer, by="customer_id")] = CustomerCard(
            name="", tier=""
        )

    store = run.store([Customer, Strict])
    with pytest.raises(DataError, match="does not exist") as caught:
        store.insert(Strict(customer_id=ObjectId()))
    assert "reference-missing" == caught.value.code
    assert 0 == store.count(Strict)


class CategoryCard(BaseModel):
    id: Id = Field(alias="_id")
    name: str | None = None


class Category(Document, collection="categories"):
    name: str


class Article(Document, collection="articles"):
    category: Annotated[CategoryCard, ExtendedReference(Category, by="category.id")]
    title: str = ""


def test_a_card_that_contains_its_reference(run, database):
    """Stored as category: {_id, name}."""
    store = run.store([Category, Article])
    tools = store.insert(Category(name="Tools"))
    article = store.insert(Article(category=CategoryCard(_id=tools.id)))
    store.update(Category, tools.id, {"$set": {"name": "Kit"}})
    assert {"_id": tools.id, "name": "Kit"} == database["articles"].find_one()["category"]
    other = store.insert(Category(name="Other"))
    assert "Other" == store.update(Article, article.id, {"$set": {"category._id": other.id}}).category.name
    with pytest.raises(UsageError, match=r"maintains Article\.category\.name"):
        store.update(Article, article.id, {"$set": {"category.name": "x"}})
    assert [] == store.verify()


def shop_with(on_delete):
    class Item(Document, collection="items"):
        customer_id: Id | None
        customer: Annotated[
            CustomerCard | None, ExtendedReference(Customer, by="customer_id", on_delete=on_delete)
        ] = None

    class Basket(Document, collection="baskets"):
        entries: list[Entry] = []

    class Entry(BaseModel):
        customer_id: Id | None
        name: Annotated[
            str | None, ExtendedReference(Customer, by="customer_id", field="name", on_delete=on_delete)
        ] = None

    Basket.model_rebuild(_types_namespace={"Entry": Entry})
    return Item, Basket, Entry


@pytest.mark.parametrize(
    ("on_delete", "item", "basket"),
    [
        ("keep", "Ann", ["Ann", "Bob"]),
        ("clear", None, [None, "Bob"]),
        ("cascade", "deleted", ["Bob"]),
    ],
)
def test_what_happens_to_copies_when_the_source_is_deleted(run, on_delete, item, basket):
    Item, Basket, Entry = shop_with(on_delete)
    store = run.store([Customer, Item, Basket])
    ann, bob = store.insert_many([Customer(name="Ann"), Customer(name="Bob")])
    one = store.insert(Item(customer_id=ann.id))
    two = store.insert(Basket(entries=[Entry(customer_id=ann.id), Entry(customer_id=bob.id)]))
    assert ann == store.delete(Customer, ann.id)
    left = store.get(Item, one.id)
    if item == "deleted":
        assert left is None
    else:
        assert item == (left.customer.name if left.customer else None)
        assert (on_delete == "keep") == (left.customer_id is not None)
    assert basket == [entry.name for entry in store.get(Basket, two.id).entries]
    assert [] == store.verify()
    store.delete_many(Customer, {})
    assert [] == store.verify()


def test_restrict_refuses_the_deletion(run):
    Item, Basket, _ = shop_with("restrict")
    store = run.store([Customer, Item, Basket])
    ann = store.insert(Customer(name="Ann"))
    one = store.insert(Item(customer_id=ann.id))
    for call in (lambda: store.delete(Customer, ann.id), lambda: store.delete_many(Customer, {})):
        with pytest.raises(DataError, match="refers to it") as caught:
            call()
        assert "reference-restricted" == caught.value.code
    assert 1 == store.count(Customer)
    store.delete(Item, one.id)
    assert ann == store.delete(Customer, ann.id)


# -- protection -----------------------------------------------------------------------


def test_a_value_that_looks_like_an_expression_is_copied_as_text(store, database):
    """A customer named "$internal.cardToken" must not copy a secret."""
    ann = store.insert(Customer(name="Ann"))
    order = store.insert(Order(customer_id=ann.id))
    database["orders"].update_one({}, {"$set": {"internal": {"cardToken": "secret"}}})
    store.update(Customer, ann.id, {"$set": {"name": "$internal.cardToken", "tier": "$$ROOT"}})
    assert CustomerCard(name="$internal.cardToken", tier="$$ROOT") == store.get(Order, order.id).customer
    store.update(Order, order.id, {"$set": {"customer_id": ann.id}})
    assert "$internal.cardToken" == store.get(Order, order.id).customer.name
    assert [] == store.verify()


# -- cost ------------------------------------------------------------------------------


def test_only_embedded_fields_cost_more_than_one_command(heard):
    database, listener = heard
    store = Store(database, [Customer, Product, Order])
    ann = store.insert(Customer(name="Ann"))
    store.insert(Order(customer_id=ann.id))
    listener.clear()
    store.update(Customer, ann.id, {"$set": {"email": "new"}})
    assert ["findAndModify"] == listener.names
    listener.clear()
    store.insert(Customer(name="Bob"))
    assert ["insert"] == listener.names
    listener.clear()
    store.update(Order, {"status": "open"}, {"$set": {"status": "paid"}})
    assert ["findAndModify"] == listener.names
    listener.clear()
    store.delete(Customer, ann.id)
    assert ["findAndModify"] == listener.names


def test_a_change_of_nothing_sends_no_update_to_the_copies(heard):
    """A rename to the same name, and a touch of other fields beside it."""
    database, listener = heard
    store = Store(database, [Customer, Product, Order])
    ann = store.insert(Customer(name="Ann"))
    store.insert(Order(customer_id=ann.id))
    for sets in ({"name": "Ann"}, {"name": "Ann", "email": "new"}):
        listener.clear()
        after = store.update(Customer, ann.id, {"$set": sets})
        assert ["findAndModify", "commitTransaction"] == listener.names
        assert store.get(Customer, ann.id) == after
    listener.clear()
    after = store.update(Customer, ann.id, {"$set": {"name": "Bob", "note": "renamed"}})
    assert 1 == listener.names.count("update")
    assert store.get(Customer, ann.id) == after
    assert "Bob" == store.find_one(Order).customer.name
    assert [] == store.verify()


def test_setup_makes_the_index_on_the_reference(run, database):
    store = run.store([Customer, Product, Order])
    store.setup()
    keys = [list(index["key"]) for index in database["orders"].list_indexes()]
    assert ["customer_id", "_id"] in keys
    assert ["lines.product_id", "_id"] in keys
    assert [] == store.setup()


# -- fan-out ----------------------------------------------------------------------------


def test_a_large_fan_out_is_chunked_and_leaves_no_intent(run, database):
    limits = Limits(fan_out_max=10, fan_out_chunk=7)
    store = run.store([Customer, Product, Order], limits=limits)
    ann, bob = store.insert_many([Customer(name="Ann"), Customer(name="Bob")])
    store.insert_many([Order(customer_id=ann.id if number % 2 else bob.id) for number in range(50)])
    store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    assert 25 == store.count(Order, {"customer.name": "Anna"})
    assert 0 == database[fan_outs.COLLECTION].count_documents({})
    assert [] == store.verify()


@pytest.mark.parametrize(("copies_max", "commits"), [(100, [1, 1, 1]), (10, [1, 2, 7])])
def test_a_fan_out_writes_only_copies_that_differ(heard, copies_max, commits):
    """Some copies may show the new name already: another writer, or a fan-out that was cut off."""
    database, listener = heard
    limits = Limits(fan_out_max=copies_max, fan_out_chunk=7)
    store = Store(database, [Customer, Product, Order], limits=limits)
    ann = store.insert(Customer(name="Ann"))
    ids = [each.id for each in store.insert_many([Order(customer_id=ann.id) for _ in range(40)])]
    orders, made = database["orders"], []
    for number, behind in enumerate([[], ids[20:21], ids]):
        card = {"name": f"Ann {number}", "tier": "silver"}
        orders.update_many({"_id": {"$nin": behind}}, {"$set": {"customer": card}})
        orders.update_many({"_id": {"$in": behind}}, {"$set": {"customer.name": "old"}})
        listener.clear()
        store.update(Customer, ann.id, {"$set": {"name": f"Ann {number}"}})
        made.append(listener.names.count("commitTransaction"))
        sent = [body["updates"] for _, body in listener.commands if body.get("update") == "orders"]
        assert 40 == store.count(Order, {"customer": card})
        orders.update_many({"_id": {"$in": behind}}, {"$set": {"customer.name": "old"}})
        assert set(behind) == {each["_id"] for (update,) in sent for each in orders.find(update["q"])}
        orders.update_many({}, {"$set": {"customer": card}})
    assert commits == made
    assert 0 == database[fan_outs.COLLECTION].count_documents({})
    assert [] == store.verify()


@pytest.mark.parametrize("copies_max", [100, 10])
def test_a_rename_that_the_collation_does_not_see_reaches_the_copies(database, copies_max):
    """To an index and a filter of this collection Ann and ann are the same."""
    database.create_collection("orders", collation={"locale": "en", "strength": 1})
    limits = Limits(fan_out_max=copies_max, fan_out_chunk=7)
    store = Store(database, [Customer, Product, Order], limits=limits)
    ann = store.insert(Customer(name="Ann", tier=""))
    store.insert_many([Order(customer_id=ann.id) for _ in range(20)])
    for name in ("ann", "änn", "ann\u200b", "ann"):
        store.update(Customer, ann.id, {"$set": {"name": name}})
        assert {name} == {each.customer.name for each in store.find(Order)}


class Stall(Document, collection="stalls"):
    id: int
    name: str
    labels: dict[str, str] = {}


class StallCard(BaseModel):
    name: str
    labels: dict[str, str]


class Offer(Document, collection="offers"):
    stall_id: int
    stall: Annotated[StallCard | None, ExtendedReference(Stall, by="stall_id")] = None


@pytest.mark.parametrize("labels", [{"": "x"}, {str(number): "x" * 1_000_000 for number in range(6)}])
def test_a_card_that_the_server_could_not_compare_follows_its_source(database, labels):
    """A name that is empty makes no path, and a large card fits into no condition beside its update."""
    store = Store(database, [Stall, Offer])
    store.insert(Stall(id=1, name="Ann", labels=labels))
    store.insert(Offer(stall_id=1))
    store.update(Stall, 1, {"$set": {"name": "Anna"}})
    assert ["Anna"] == [each.stall.name for each in store.find(Offer)]


def test_a_fan_out_that_was_interrupted_is_finished_by_recovery(database, monkeypatch):
    """The change is committed with its intent; a new Store does the rest."""
    limits = Limits(fan_out_max=10, fan_out_chunk=7)
    store = Store(database, [Customer, Product, Order], limits=limits)
    ann = store.insert(Customer(name="Ann"))
    store.insert_many([Order(customer_id=ann.id) for _ in range(40)])
    chunks = []
    real = fan_outs._copy_chunk

    def stop_after_two(*arguments):
        chunks.append(1)
        if len(chunks) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(fan_outs, "_copy_chunk", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    assert 14 == store.count(Order, {"customer.name": "Anna"})
    assert 1 == database[fan_outs.COLLECTION].count_documents({})
    monkeypatch.setattr(fan_outs, "_copy_chunk", real)
    assert 1 == Store(database, [Customer, Product, Order]).recover()
    assert 40 == store.count(Order, {"customer.name": "Anna"})
    assert 0 == database[fan_outs.COLLECTION].count_documents({})


@pytest.mark.parametrize("copies_max", [1000, 2])
def test_a_poison_document_is_set_aside_and_the_rest_goes_on(run, database, copies_max, caplog):
    """One order of almost 16 MB cannot take the longer name."""
    store = run.store([Customer, Product, Order], limits=Limits(fan_out_max=copies_max))
    ann = store.insert(Customer(name="Ann"))
    orders = store.insert_many([Order(customer_id=ann.id) for _ in range(5)])
    database["orders"].update_one({"_id": orders[2].id}, {"$set": {"blob": "x" * (16 * 1024 * 1024 - 400)}})
    store.update(Customer, ann.id, {"$set": {"name": "A" * 1000}})
    assert 4 == store.count(Order, {"customer.name": "A" * 1000})
    aside = list(database["treadle.set_aside"].find())
    assert [orders[2].id] == [each["_id"]["key"] for each in aside]
    assert [orders[2].id] == [finding.document_id for finding in store.verify()]
    assert "set aside" in caplog.text
    assert 0 == database[fan_outs.COLLECTION].count_documents({})


def test_a_document_may_refer_to_its_own_collection(run):
    class Employee(Document, collection="employees"):
        name: str
        boss_id: Id | None = None
        boss: Annotated[str | None, ExtendedReference("Employee", by="boss_id", field="name")] = None

    store = run.store([Employee])
    boss = store.insert(Employee(name="Bo"))
    clerk = store.insert(Employee(name="Cy", boss_id=boss.id))
    store.update(Employee, boss.id, {"$set": {"name": "Bea", "boss_id": boss.id}})
    assert ["Bea", "Bea"] == [store.get(Employee, each.id).boss for each in (boss, clerk)]
    assert [] == store.verify()


# -- write skew ------------------------------------------------------------------------------


def test_verify_only_reads(heard):
    """A user without the right to write can verify, and no writer is disturbed."""
    database, listener = heard
    store = Store(database, [Customer, Product, Order])
    ann = store.insert(Customer(name="Ann"))
    store.insert_many([Order(customer_id=ann.id), Order(customer_id=ObjectId())])
    database["orders"].update_many({}, {"$set": {"customer": {"name": "wrong", "tier": "x"}}})
    listener.clear()
    assert 1 == len(store.verify())
    # But for how far it came and what it found, which is noted for `status`.
    sent = [
        name
        for name, body in listener.commands
        if not str(body.get("update", body.get("delete", ""))).startswith("treadle.")
    ]
    assert {"find", "aggregate", "commitTransaction"} >= set(sent)


def test_the_validators_refusal_is_told_alike_for_every_write(run):
    store = run.store([Customer, Product, Order])
    store.setup()
    ann = store.insert(Customer(name="Ann"))
    # Only the server knows the result of a pipeline.
    bad = [{"$set": {"tier": 5}}]
    for call in (
        lambda: store.update(Customer, ann.id, bad),
        lambda: store.update_many(Customer, {}, bad),
        lambda: store.insert(Customer.model_construct(id=ObjectId(), name="x", email="", tier=5, note=None)),
    ):
        with pytest.raises(DataError, match="validator") as caught:
            call()
        assert "validator-refused" == caught.value.code


@pytest.mark.parametrize(("on_delete", "left"), [("cascade", 0), ("clear", 60)])
def test_a_deletion_on_which_too_much_hangs_goes_in_chunks(run, on_delete, left):
    Item, Basket, _ = shop_with(on_delete)
    store = run.store([Customer, Item, Basket], limits=Limits(cascade_max=20, write_chunk=15))
    ann, bob = store.insert_many([Customer(name="Ann"), Customer(name="Bob")])
    store.insert_many([Item(customer_id=ann.id) for _ in range(60)] + [Item(customer_id=bob.id)])
    assert ann == store.delete(Customer, ann.id)
    assert left + 1 == store.count(Item)
    assert 0 == store.count(Item, {"customer_id": ann.id})
    assert 1 == store.count(Item, {"customer.name": "Bob"})
    assert [] == store.verify()
