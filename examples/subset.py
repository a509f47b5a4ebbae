"""Subset: a product embeds its five most recent reviews; all reviews are in a collection of their own.

The page of a product shows the newest reviews with one read, and the product
stays small however many there are.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated

from examples.story import only, show, step, tell, verified
from pydantic import BaseModel

from treadle import Document, Store, Subset


class Review(Document, collection="reviews"):
    id: int
    product_id: int
    review_author: str
    review_text: str
    published_date: datetime


class ReviewCard(BaseModel):
    review_author: str
    review_text: str
    published_date: datetime


class Price(BaseModel):
    value: Decimal
    currency: str = "USD"


class Product(Document, collection="products"):
    id: int
    name: str
    description: str
    price: Price
    reviews: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-published_date", size=5)] = []


MODELS: list[type[Document]] = [Review, Product]

FIRST = datetime(2019, 2, 1, tzinfo=UTC)
AUTHORS = ("Kristina", "Trina", "Hans", "Ana", "Ola", "Sam", "Eve", "Li")


def story(store: Store) -> None:
    store.setup()
    collection = store.collection(Product)

    step("A product with eight reviews, written in no particular order")
    store.insert(
        Product(
            id=1,
            name="Super Widget",
            description="This is the most useful item in your toolbox.",
            price=Price(value=Decimal("119.99")),
        )
    )
    for day in (3, 0, 7, 5, 1, 6, 2, 4):
        store.insert(
            Review(
                id=780 + day,
                product_id=1,
                review_author=AUTHORS[day],
                review_text=f"Day {day}.",
                published_date=FIRST + timedelta(days=day),
            )
        )
    show("products", collection.find_one())
    assert [787, 786, 785, 784, 783] == [card["_id"] for card in only(collection)["reviews"]]
    assert 8 == store.count(Review), "all of them are in the collection of reviews"

    step("The newest is withdrawn, so an older one moves up; another is edited")
    store.delete(Review, 787)
    store.update(Review, 784, {"$set": {"review_text": "Edited."}})
    product = store.require(Product, 1)
    assert ["Eve", "Sam", "Ola", "Ana", "Hans"] == [card.review_author for card in product.reviews]
    assert "Edited." == product.reviews[2].review_text

    step("A review is published again: it comes first")
    store.update(Review, 780, {"$set": {"published_date": FIRST + timedelta(days=30)}})
    assert "Kristina" == store.require(Product, 1).reviews[0].review_author

    step("Somebody pushes a sixth one into the array")
    spam = {"_id": 1, "review_author": "Bot", "review_text": "Cheap widgets!", "published_date": FIRST}
    collection.update_one({"_id": 1}, {"$push": {"reviews": spam}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert [780, 786, 785, 784, 783] == [card["_id"] for card in only(collection)["reviews"]]


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
