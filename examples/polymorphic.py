"""Polymorphic: books, electronics and clothing in one collection, each read as its own class.

The shop lists, searches and sells them together, but a book has an ISBN and a
shirt has a size. One query on the base gives all; a query on a kind gives that
kind and can use its own index.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from examples.story import show, step, tell
from pymongo.errors import DuplicateKeyError, WriteError

from treadle import DataError, Document, Indexed, Store


class Product(Document, collection="products", discriminator="type"):
    title: Annotated[str, Indexed(text=10)]
    price: Annotated[Decimal, Indexed()]


class Book(Product, kind="book"):
    author: Annotated[str, Indexed(text=True)]
    isbn: Annotated[str | None, Indexed(unique=True)] = None
    pages: int


class Electronics(Product, kind="electronics"):
    brand: Annotated[str, Indexed(text=True)]
    wireless: bool = False
    warranty_months: int = 24


class Clothing(Product, kind="clothing"):
    size: Literal["S", "M", "L"]
    color: str
    material: str = "cotton"


MODELS = [Product, Book, Electronics, Clothing]


def story(store: Store) -> None:
    step("setup() makes one text index for all, and partial indexes for each kind")
    for action in store.setup():
        print(f"  {action}")

    step("Five products of three kinds, in one call")
    _, _, mouse, keyboard, _ = store.insert_many(
        [
            Book(
                title="Dune", price=Decimal("9.99"), author="Frank Herbert", isbn="9780441013593", pages=612
            ),
            Book(title="Essays on Wireless Telegraphy", price=Decimal("25"), author="Anon", pages=80),
            Electronics(title="Wireless mouse", price=Decimal("19.90"), brand="Logi", wireless=True),
            Electronics(title="Keyboard", price=Decimal("49.00"), brand="Cherry"),
            Clothing(title="T-shirt", price=Decimal("15.00"), size="M", color="navy"),
        ]
    )
    show("products", store.collection(Product).find())

    step("All that costs less than 20, whatever it is")
    for product in store.find(Product, {"price": {"$lt": Decimal(20)}}, sort="price"):
        print(f"  {type(product).__name__:12} {product.title}, {product.price}")
    assert ["Book", "Clothing", "Electronics"] == [
        type(each).__name__ for each in store.find(Product, {"price": {"$lt": Decimal(20)}}, sort="price")
    ]

    step("Search in all kinds, and in one")
    assert {"Wireless mouse", "Essays on Wireless Telegraphy"} == {
        product.title for product in store.search(Product, "wireless")
    }
    assert [mouse] == store.search(Electronics, "wireless").to_list()

    step("A unique ISBN is a matter of books that have one")
    store.insert(Book(title="Notes", price=Decimal(1), author="Anon", pages=3))
    try:
        store.insert(
            Book(title="Dune, again", price=Decimal(5), author="F. H.", isbn="9780441013593", pages=1)
        )
    except DuplicateKeyError:
        print("  refused: that ISBN is taken; two books without one are no matter")
    else:
        raise AssertionError("two books have one ISBN")

    step("The server holds each kind to its own shape, and refuses unknown kinds")
    for wrong in ({"type": "clothing", "size": "XXL"}, {"type": "furniture"}):
        try:
            store.collection(Product).insert_one({"title": "?", "price": 1, **wrong})
        except WriteError as error:
            print(f"  {wrong}: {error}")
        else:
            raise AssertionError(f"{wrong} was stored")

    step("A kind is changed by an explicit call, and only from what it was")
    try:
        fields = {"_id": keyboard.id, "title": "?", "price": 1, "size": "S", "color": "red"}
        store.change_kind(Clothing.model_validate(fields), was=Book)
    except DataError as error:
        print(f"  refused: {error}")
    assert isinstance(store.get(Product, keyboard.id), Electronics)
    assert store.get(Book, keyboard.id) is None


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
