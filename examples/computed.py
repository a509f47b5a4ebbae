"""Computed: a product knows how many reviews it has, and their average.

Computing this at each page load reads every review each time. Here each write
of a review brings the product up to date, in the same transaction.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from examples.story import show, step, tell, verified
from pydantic import BaseModel

from treadle import Average, Count, Document, Formula, Id, Min, Store, UsageError


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str = ""


class ReviewSummary(BaseModel):
    total_count: Annotated[int, Count(Review, by="product_id", computed_at="last_computed")] = 0
    average_rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    lowest: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    five_stars: Annotated[int, Count(Review, by="product_id", where={"rating": 5})] = 0
    last_computed: datetime | None = None


class Product(Document, collection="products"):
    name: str
    price: Decimal
    price_with_tax: Annotated[Decimal | None, Formula({"$multiply": ["$price", Decimal("1.2")]})] = None
    review_summary: ReviewSummary = ReviewSummary()


MODELS = [Review, Product]


def story(store: Store) -> None:
    store.setup()

    step("A product without reviews")
    lamp = store.insert(Product(name="Lamp", price=Decimal("50.00")))
    shade = store.insert(Product(name="Shade", price=Decimal("20.00")))
    assert Decimal("60") == lamp.price_with_tax
    assert (0, None) == (lamp.review_summary.total_count, lamp.review_summary.average_rating)

    step("Five reviews in one call are one update of the product")
    reviews = store.insert_many([Review(product_id=lamp.id, rating=rating) for rating in (5, 4, 1, 5, 3)])
    show("products", store.collection(Product).find_one({"_id": lamp.id}))
    summary = store.require(Product, lamp.id).review_summary
    assert (5, 3.6, 1, 2) == (summary.total_count, summary.average_rating, summary.lowest, summary.five_stars)

    step("One is edited, one was about another product, the worst is deleted")
    store.update(Review, reviews[1].id, {"$set": {"rating": 5}})
    store.update(Review, reviews[4].id, {"$set": {"product_id": shade.id}})
    store.delete(Review, reviews[2].id)
    summary = store.require(Product, lamp.id).review_summary
    assert (3, 5.0, 5, 3) == (summary.total_count, summary.average_rating, summary.lowest, summary.five_stars)
    assert 1 == store.require(Product, shade.id).review_summary.total_count
    show("products", store.collection(Product).find({}, {"name": 1, "review_summary": 1}).sort("_id"))

    step("The numbers belong to Treadle: nobody sets them by hand, or only past it")
    try:
        store.update(Product, lamp.id, {"$set": {"review_summary.total_count": 99}})
    except UsageError as error:
        print(f"  refused: {error}")
    else:
        raise AssertionError("the update went through")
    store.collection(Product).update_one({"_id": lamp.id}, {"$set": {"review_summary.total_count": 99}})
    store.collection(Review).insert_one({"product_id": shade.id, "rating": 1, "text": "raw"})
    # The count of the lamp; of the shade the count, the average with its sum, and the lowest.
    assert 5 == verified(store)
    assert 2 == store.repair()
    assert 0 == verified(store)
    assert 2.0 == store.require(Product, shade.id).review_summary.average_rating


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
