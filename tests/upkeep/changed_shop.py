"""One shop in three states of its code: before, during and after a change of declarations."""

from typing import Annotated, Any

from pydantic import BaseModel

from treadle import Average, Count, Document, Id, Replaces, Subset, Sum

GOOD = {"rating": {"$gte": 3}}


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int


class ReviewCard(BaseModel):
    rating: int


OLD: dict[str, Any] = {
    "reviews": Count(Review, by="product_id"),
    "stars": Sum(Review, "rating", by="product_id"),
    "mean": Average(Review, "rating", by="product_id"),
    "best": Subset(Review, by="product_id", sort="-rating", size=2),
}
NEW: dict[str, Any] = {
    "reviews": Count(Review, by="product_id", where=GOOD),
    "stars": Sum(Review, "rating", by="product_id", where=GOOD),
    "mean": Average(Review, "rating", by="product_id", where=GOOD),
    "best": Subset(Review, by="product_id", sort="rating", size=3, where=GOOD),
}


def product(marks: dict[str, list[Any]]) -> type[Document]:
    """The model `Product` with these declarations."""

    class Product(Document, collection="products"):
        name: str = ""
        reviews: Annotated[int, *marks["reviews"]] = 0
        stars: Annotated[int, *marks["stars"]] = 0
        mean: Annotated[float | None, *marks["mean"]] = None
        best: Annotated[list[ReviewCard], *marks["best"]] = []

    return Product


Before: Any = product({name: [OLD[name]] for name in OLD})
During: Any = product({name: [NEW[name], Replaces(OLD[name])] for name in OLD})
After: Any = product({name: [NEW[name]] for name in OLD})

FIELDS = tuple(OLD)


def given(ratings: list[int], declared: str) -> dict[str, Any]:
    """What a product of these ratings holds by the old or the new declarations."""
    counted = sorted(each for each in ratings if declared == "old" or each >= 3)
    best = counted[::-1][:2] if declared == "old" else counted[:3]
    mean = sum(counted) / len(counted) if counted else None
    return {"reviews": len(counted), "stars": sum(counted), "mean": mean, "best": best}


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """What a stored product shows, in the same form."""
    return {
        **{name: document.get(name) for name in ("reviews", "stars", "mean")},
        "best": [each["rating"] for each in document.get("best", [])],
    }
