"""Kinds that carry other patterns, at the write and by the worker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests.patterns.stock import Customer, CustomerCard
from treadle import (
    Approximate,
    Average,
    Count,
    DataError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Outlier,
    Subset,
    Sum,
    Unchecked,
    UsageError,
)

# -- kinds that carry other patterns -----------------------------------------------------------------


class Review(Document, collection="reviews"):
    product_id: Id
    stars: int
    when: datetime = datetime(2026, 1, 1, tzinfo=UTC)


class ReviewCard(BaseModel):
    stars: int


class Product(Document, collection="products", discriminator="kind"):
    name: str
    reviews: Annotated[int, Count(Review, by="product_id")] = 0
    doubled: Annotated[int | None, Formula({"$multiply": ["$reviews", 2]})] = None


class Toy(Product, kind="toy"):
    stars: Annotated[int, Sum(Review, "stars", by="product_id")] = 0
    rank: Annotated[int | None, Formula({"$add": ["$stars", "$reviews"]})] = None


class Game(Toy, kind="game"):
    latest: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-when", size=2)] = []


class Service(Product, kind="service"):
    customer_id: Id | None = None
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    average: Annotated[float | None, Average(Review, "stars", by="product_id")] = None


class ToyCard(BaseModel):
    name: str
    stars: int


class Shelf(Document, collection="shelves"):
    toy_id: Id | None = None
    toy: Annotated[ToyCard | None, ExtendedReference(Toy, by="toy_id")] = None


class Owner(Document, collection="owners"):
    name: str = ""
    services: Annotated[int, Count("Service", by="customer_id")] = 0


RULED = [Customer, Review, Product, Toy, Game, Service, Shelf, Owner]


def check(store: Any) -> None:
    assert [] == store.verify()


def story(store: Any, database: Any) -> None:
    """The life of some products, with everything they maintain checked after each step."""
    store.setup()
    ada = store.insert(Customer(name="Ada"))
    toy, game, service = store.insert_many(
        [Toy(name="ball"), Game(name="go"), Service(name="repair", customer_id=ada.id)]
    )
    assert "Ada" == service.customer.name
    for product in (toy, game, service):
        store.insert_many([Review(product_id=product.id, stars=stars) for stars in (2, 3)])
    raws = {raw["kind"]: raw for raw in database["products"].find()}
    # Each review is counted once, though three models inherit the count.
    assert [2, 2, 2] == [raws[kind]["reviews"] for kind in ("toy", "game", "service")]
    assert [4, 4, 4] == [raws[kind]["doubled"] for kind in ("toy", "game", "service")]
    # A kind's own fields are not made in documents of others.
    assert [5, 5, None] == [raws[kind].get("stars") for kind in ("toy", "game", "service")]
    assert [7, 7, None] == [raws[kind].get("rank") for kind in ("toy", "game", "service")]
    assert 2 == len(raws["game"]["latest"])
    assert not {"latest", "average"} & set(raws["toy"])
    assert not {"stars", "rank", "latest"} & set(raws["service"])
    assert 2.5 == raws["service"]["average"]
    check(store)

    shelves = store.insert_many([Shelf(toy_id=toy.id), Shelf(toy_id=game.id), Shelf(toy_id=service.id)])
    assert ["ball", "go", None] == [each.toy and each.toy.name for each in shelves]
    store.update(Product, toy.id, {"$set": {"name": "red ball"}})
    store.update_many(Product, {"_id": {"$in": [game.id, service.id]}}, {"$set": {"name": "new"}})
    assert ["red ball", "new", None] == [
        (store.get(Shelf, each.id).toy or ToyCard(name="", stars=0)).name or None for each in shelves
    ]
    check(store)

    store.insert(Review(product_id=toy.id, stars=4))
    assert 9 == store.get(Shelf, shelves[0].id).toy.stars
    store.update(Customer, ada.id, {"$set": {"name": "Ada L."}})
    assert "Ada L." == store.get(Product, service.id).customer.name
    with pytest.raises(UsageError, match="maintains"):
        store.update(Product, toy.id, {"$set": {"stars": 1}})
    check(store)

    store.delete(Product, game.id)
    store.delete_many(Product, {"_id": service.id})
    check(store)


def test_kinds_carry_other_patterns(run, database):
    story(run.store(RULED), database)


def test_two_kinds_may_maintain_the_same_field_in_their_own_ways(run):
    class Node(Document, collection="nodes", discriminator="is"):
        parent_id: Id | None = None

    class File(Node, kind="file"):
        size: int = 0

    class Folder(Node, kind="folder"):
        size: Annotated[int, Sum(File, "size", by="parent_id")] = 0

    class Link(Node, kind="link"):
        size: Annotated[int | None, Formula({"$literal": 1})] = None

    store = run.store([Node, File, Folder, Link])
    store.setup()
    folder = store.insert(Folder())
    files = store.insert_many([File(parent_id=folder.id, size=size) for size in (3, 4)])
    link = store.insert(Link(parent_id=folder.id))
    assert (7, 1) == (store.get(Node, folder.id).size, store.get(Node, link.id).size)
    store.update(Node, files[0].id, Unchecked({"$inc": {"parent": 0}}))
    store.replace(File(id=files[0].id, parent_id=folder.id, size=10))
    assert 14 == store.get(Node, folder.id).size
    assert [] == store.verify()


def test_a_reference_may_not_block_a_deletion_of_another_kind(run):
    class Part(Document, collection="parts", discriminator="t"): ...

    class Wheel(Part, kind="wheel"):
        name: str = "w"

    class Bolt(Part, kind="bolt"): ...

    class Card(BaseModel):
        name: str

    class Cart(Document, collection="carts"):
        wheel_id: Id | None = None
        wheel: Annotated[Card | None, ExtendedReference(Wheel, by="wheel_id", on_delete="restrict")] = None

    store = run.store([Part, Wheel, Bolt, Cart])
    wheel, bolt = store.insert_many([Wheel(), Bolt()])
    store.insert(Cart(wheel_id=wheel.id))
    store.insert(Cart(wheel_id=bolt.id))
    with pytest.raises(DataError, match="restrict"):
        store.delete(Part, wheel.id)
    with pytest.raises(DataError, match="restrict"):
        store.change_kind(Bolt(id=wheel.id), was=Wheel)
    assert store.delete(Part, bolt.id) is not None


# -- kinds whose arrays continue elsewhere ------------------------------------------------------------


class Medium(Document, collection="tagged", discriminator="kind"):
    name: str


class Plain(Medium, kind="plain"):
    tags: list[str] = []
    views: int = 0


class Film(Medium, kind="film"):
    tags: Annotated[list[str], Outlier(limit=3, overflow="film_tags")] = []
    views: Annotated[int, Approximate(every=1)] = 0


class Show(Medium, kind="show"):
    tags: Annotated[list[str], Outlier(limit=5, overflow="show_tags")] = []


@pytest.mark.parametrize("was", [Plain, Film])
@pytest.mark.parametrize("becomes", [Film, Show])
def test_a_document_that_becomes_a_kind_with_an_outlier_array_keeps_its_items(run, database, was, becomes):
    if was is becomes:
        return
    store = run.store([Medium, Plain, Film, Show])
    store.setup()
    old = store.insert(was(name="x", tags=list("abcdefgh")))
    store.change_kind(becomes(id=old.id, name="x", tags=list("ABCDEFGH")), was=was)
    assert list("ABCDEFGH") == list(store.array(becomes, "tags", old.id))
    assert [] == store.verify()
