"""References, copies and aggregates through arrays: what goes wrong where an element is taken for a document."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import Count, DeclarationError, Document, ExtendedReference, Max, Store, Sum, TreadleError


class Part(BaseModel):
    ref: int | None = None
    quantity: int = 1
    card: Annotated[str | None, ExtendedReference("Product", by="ref", field="name")] = None


class Line(BaseModel):
    product_id: int | None = None
    quantity: int = 1
    name: Annotated[str | None, ExtendedReference("Product", by="product_id", field="name")] = None
    was: Annotated[
        str | None, ExtendedReference("Product", by="product_id", field="name", policy="snapshot")
    ] = None
    parts: list[Part] = []


class Order(Document, collection="orders"):
    id: int
    lines: list[Line] = []
    tags: list[int] = []


class Product(Document, collection="products"):
    id: int
    name: str = ""
    orders: Annotated[int, Count(Order, by="lines.product_id")] = 0
    sold: Annotated[int, Sum(Order, "lines.quantity", by="lines.product_id")] = 0
    best: Annotated[int | None, Max(Order, "lines.quantity", by="lines.product_id")] = None
    parts: Annotated[int, Sum(Order, "lines.parts.quantity", by="lines.parts.ref")] = 0
    tagged: Annotated[int, Count(Order, by="tags")] = 0


@pytest.fixture
def store(database) -> Store:
    store = Store(database, [Order, Product])
    store.setup()
    store.insert_many([Product(id=number, name=f"n{number}") for number in (1, 2, 3)])
    return store


def order(*lines: tuple[int, int], **fields: Any) -> Order:
    return Order(id=1, lines=[Line(product_id=key, quantity=number) for key, number in lines], **fields)


def sums(store: Store, key: int) -> tuple[int, int, int | None]:
    product = store.require(Product, key)
    return product.orders, product.sold, product.best


def copies(store: Store) -> list[tuple[str | None, str | None]]:
    return [(line.name, line.was) for line in store.require(Order, 1).lines]


def test_a_document_that_names_a_key_twice_counts_once(store):
    store.insert(order((1, 2), (1, 3), (2, 1), tags=[1, 1]))
    assert ((1, 5, 3), 1) == (sums(store, 1), store.require(Product, 1).tagged)
    store.update(Order, 1, {"$set": {"lines.0.product_id": 2}})
    assert [(1, 3, 3), (1, 3, 2)] == [sums(store, key) for key in (1, 2)]
    store.delete(Order, 1)
    assert [(0, 0, None)] * 2 == [sums(store, key) for key in (1, 2)]
    assert [] == store.verify()


@pytest.mark.parametrize(
    ("filter", "update", "options", "expected"),
    [
        ({"lines.product_id": 2}, {"$set": {"lines.$.quantity": 8}}, {}, (1, 8, 8)),
        ({}, {"$inc": {"lines.$[].quantity": 1}}, {}, (1, 2, 2)),
        (
            {},
            {"$set": {"lines.$[x].quantity": 4}},
            {"array_filters": [{"x.product_id": 2}]},
            (1, 4, 4),
        ),
        (
            {},
            {"$push": {"lines": {"$each": [{"product_id": 2, "quantity": 7}], "$position": 0}}},
            {},
            (1, 8, 7),
        ),
        ({}, {"$pull": {"lines": {"product_id": 2}}}, {}, (0, 0, None)),
    ],
)
def test_an_update_of_elements_moves_their_own_targets(store, filter, update, options, expected):
    store.insert(order((1, 5), (2, 1)))
    store.update(Order, {"_id": 1, **filter}, update, **options)
    assert (expected, []) == (sums(store, 2), store.verify())


def test_copies_follow_their_elements_and_forged_ones_are_not_believed(store):
    store.insert(order((1, 2), (2, 1)))
    store.update(Product, 1, {"$set": {"name": "new"}})
    assert [("new", "n1"), ("n2", "n2")] == copies(store)
    # Now both refer to one product, each with the name of its own moment.
    store.update(Order, 1, {"$set": {"lines.1.product_id": 1}})
    assert [("new", "n1"), ("new", "new")] == copies(store)
    document = store.require(Order, 1)
    document.lines.reverse()
    document.lines[0].name = "forged"
    store.replace(document)
    assert [("new", "new"), ("new", "n1")] == copies(store)
    store.update(Order, 1, {"$set": {"lines": [{"product_id": 2, "name": "forged", "was": "forged"}]}})
    assert ([("n2", "n2")], []) == (copies(store), store.verify())


def test_a_rename_finds_elements_by_their_reference_not_by_the_old_copy(store, database):
    store.insert(order((1, 2), (2, 1)))
    database["orders"].update_one({}, {"$set": {"lines.0.name": "broken", "lines.1.name": "n1"}})
    store.update(Product, 1, {"$set": {"name": "new"}})
    assert ["new", "n1"] == [name for name, _ in copies(store)]


def test_elements_that_are_none_are_passed_over_and_never_written_into(store, database):
    odd = [
        {"_id": 5, "lines": [{"product_id": 1, "parts": None}, {"parts": [{"ref": 1}, None, 7]}, None, 3]},
        {"_id": 6, "lines": None},
        {"_id": 7},
        {"_id": 8, "lines": {"product_id": 1, "quantity": 7}},
        {"_id": 9, "lines": [{"parts": {"ref": 1, "quantity": 2}}]},
    ]
    database["orders"].insert_many(odd, bypass_document_validation=True)
    store.rebuild()
    store.update(Product, 1, {"$set": {"name": "new"}})
    stored = {row["_id"]: row.get("lines") for row in database["orders"].find()}
    assert ["new", "n1"] == [stored[5][0]["name"], stored[5][0]["was"]]
    assert ["new", [None, 7]] == [stored[5][1]["parts"][0]["card"], stored[5][1]["parts"][1:]]
    assert [None, 3] == stored[5][2:]
    assert [None, None, odd[3]["lines"]] == [stored[6], stored[7], stored[8]]
    assert {"ref": 1, "quantity": 2} == stored[9][0]["parts"]
    assert {"validation"} == {finding.pattern for finding in store.verify()}


@pytest.mark.parametrize("path", ["lines.0.name", "lines.$.name", "lines.$[].name", "lines.0.parts.1.card"])
def test_a_copy_in_an_element_is_not_the_callers(store, path):
    with pytest.raises(TreadleError) as raised:
        store.update(Order, {"_id": 1, "lines.product_id": 1}, {"$set": {path: "x"}})
    assert "field-maintained" == raised.value.code


@pytest.mark.parametrize("operator", ["$addToSet", "$pullAll"])
def test_whole_elements_are_not_compared(store, operator):
    """The stored ones have more fields: the one would always add, the other never remove."""
    value: Any = {"product_id": 1}
    with pytest.raises(TreadleError) as raised:
        store.update(Order, 1, {operator: {"lines": [value] if operator == "$pullAll" else value}})
    assert "update-invalid" == raised.value.code


def test_a_position_in_a_missing_array_makes_no_object(store, database):
    database["orders"].insert_one({"_id": 1})
    database.command("collMod", "orders", validationLevel="off")
    for write in (store.update, store.update_many):
        with pytest.raises(TreadleError):
            write(Order, {"_id": 1}, {"$set": {"lines.0.quantity": 3}})
    assert {"_id": 1} == database["orders"].find_one()


def test_an_array_of_a_kind_is_no_key_of_its_base(database):
    class Base(Document, collection="bases", discriminator="kind"):
        id: int

    class Kind(Base, kind="a"):
        items: list[Line] = []

    class Total(Document, collection="totals"):
        id: int
        n: Annotated[int, Count(Base, by="items.product_id")] = 0

    with pytest.raises(DeclarationError):
        Store(database, [Base, Kind, Total, Product, Order])
