"""What can be asked of the shop."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from examples.shop_api.models import (
    Book,
    Category,
    Clothing,
    Customer,
    DailySales,
    Electronics,
    Line,
    Order,
    Product,
    Review,
)
from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, Field

from treadle import Id, NotFound
from treadle.fastapi import CurrentStore as Shop

PAGE_SIZE = 50

router = APIRouter()
AnyProduct = Book | Electronics | Clothing


# -- what callers send: never a model with maintained fields -----------------------


class NewCategory(BaseModel):
    name: str
    parent_id: Id | None = None


class Place(BaseModel):
    parent_id: Id | None


class NewCustomer(BaseModel):
    name: str
    email: str


class CustomerChange(BaseModel):
    name: str | None = None
    tier: Literal["silver", "gold"] | None = None


class NewProduct(BaseModel):
    title: str
    price: Decimal = Field(ge=0)
    stock: int = Field(0, ge=0)
    category_id: Id


class NewBook(NewProduct):
    type: Literal["book"]
    author: str
    isbn: str | None = None


class NewElectronics(NewProduct):
    type: Literal["electronics"]
    brand: str


class NewClothing(NewProduct):
    type: Literal["clothing"]
    size: Literal["S", "M", "L"]


NewAnyProduct = Annotated[NewBook | NewElectronics | NewClothing, Field(discriminator="type")]
KINDS: dict[str, type[AnyProduct]] = {"book": Book, "electronics": Electronics, "clothing": Clothing}


class NewReview(BaseModel):
    rating: int = Field(ge=1, le=5)
    text: str = ""


class Wanted(BaseModel):
    product_id: Id
    quantity: int = Field(ge=1)


class NewOrder(BaseModel):
    customer_id: Id
    lines: list[Wanted] = Field(min_length=1, max_length=100)


# -- categories ----------------------------------------------------------------------


@router.post("/categories", status_code=201)
async def add_category(new: NewCategory, shop: Shop) -> Category:
    return await shop.tree(Category).insert(Category(name=new.name), parent=new.parent_id)


@router.post("/categories/{id}/move")
async def move_category(id: Id, to: Place, shop: Shop) -> Category:
    return await shop.tree(Category).move(id, to.parent_id)


@router.delete("/categories/{id}", status_code=204)
async def remove_category(id: Id, shop: Shop) -> None:
    """Refused with 409 while the category has children or products."""
    await shop.tree(Category).remove(id)


@router.get("/categories/{id}/products", response_model=list[AnyProduct])
async def products_below(id: Id, shop: Shop) -> list[Product]:
    """The products of a category and of all categories below it."""
    below = [id, *[category.id async for category in shop.tree(Category).descendants(id)]]
    return await shop.find(Product, {"category_id": {"$in": below}}, sort="title").to_list()


# -- customers -----------------------------------------------------------------------


@router.post("/customers", status_code=201)
async def add_customer(new: NewCustomer, shop: Shop) -> Customer:
    return await shop.insert(Customer(**new.model_dump()))


@router.patch("/customers/{id}")
async def change_customer(id: Id, change: CustomerChange, shop: Shop) -> Customer:
    """All orders of the customer show the new name and tier as well."""
    return await shop.change(await shop.require(Customer, id), **change.model_dump(exclude_none=True))


@router.delete("/customers/{id}", status_code=204)
async def delete_customer(id: Id, shop: Shop) -> None:
    """Refused with 409 while there are orders of the customer."""
    if await shop.delete(Customer, id) is None:
        raise NotFound("Customer", id)


# -- products ------------------------------------------------------------------------


@router.post("/products", status_code=201)
async def add_product(new: NewAnyProduct, shop: Shop) -> AnyProduct:
    await shop.require(Category, new.category_id)
    return await shop.insert(KINDS[new.type](**new.model_dump()))


@router.get("/products", response_model=list[AnyProduct])
async def search(words: str, shop: Shop) -> list[Product]:
    return await shop.search(Product, words, limit=PAGE_SIZE).to_list()


@router.get("/products/{id}", response_model=AnyProduct)
async def see_product(id: Id, shop: Shop) -> Product:
    """One read: reviews, their average and the category's name are in the document."""
    product = await shop.require(Product, id)
    await shop.counter(Product, "views").add(id)
    return product


@router.post("/products/{id}/reviews", status_code=201)
async def add_review(id: Id, new: NewReview, shop: Shop) -> Review:
    await shop.require(Product, id)
    return await shop.insert(Review(product_id=id, date=datetime.now(UTC), **new.model_dump()))


@router.delete("/reviews/{id}", status_code=204)
async def delete_review(id: Id, shop: Shop) -> None:
    if await shop.delete(Review, id) is None:
        raise NotFound("Review", id)


@router.put("/products/{id}/followers/{customer_id}")
async def follow(id: Id, customer_id: Id, shop: Shop) -> dict[str, bool]:
    return {"new": await shop.array(Product, "followers", id).append(customer_id)}


@router.delete("/products/{id}/followers/{customer_id}")
async def unfollow(id: Id, customer_id: Id, shop: Shop) -> dict[str, int]:
    return {"removed": await shop.array(Product, "followers", id).remove(customer_id)}


@router.get("/products/{id}/followers")
async def followers(id: Id, shop: Shop, page: Annotated[int, Query(ge=1)] = 1) -> dict[str, Any]:
    """The same for a product with ten followers and for one with a million."""
    array = shop.array(Product, "followers", id)
    return {
        "count": await array.count(),
        "followers": [str(each) for each in await array.page(page, PAGE_SIZE)],
    }


# -- orders --------------------------------------------------------------------------


@router.post("/orders", status_code=201)
async def place_order(new: NewOrder, shop: Shop) -> Order:
    """The order and the stock that it takes, both or neither."""
    await shop.require(Customer, new.customer_id)

    async def place(session: Any) -> Order:
        for line in new.lines:
            enough = {"_id": line.product_id, "stock": {"$gte": line.quantity}}
            if not await shop.update(Product, enough, {"$inc": {"stock": -line.quantity}}, session=session):
                raise HTTPException(409, f"there are not {line.quantity} of product {line.product_id}")
        lines = [Line(product_id=line.product_id, quantity=line.quantity) for line in new.lines]
        order = Order(customer_id=new.customer_id, lines=lines, placed_at=datetime.now(UTC))
        return await shop.insert(order, session=session)

    return await shop.with_transaction(place)


@router.get("/orders/{id}")
async def see_order(id: Id, shop: Shop) -> Order:
    return await shop.require(Order, id)


@router.get("/sales")
async def sales(shop: Shop) -> list[DailySales]:
    """Turnover per day; the worker follows the orders."""
    return await shop.find(DailySales, sort="-day", limit=PAGE_SIZE).to_list()


# -- health --------------------------------------------------------------------------


@router.get("/health")
async def health(shop: Shop) -> dict[str, int]:
    """How many events the worker is behind."""
    return {"events_behind": (await shop.worker().lag()).events}


@router.get("/findings")
async def findings(shop: Shop) -> list[str]:
    """What is stored and should be something else. It reads everything: not for a load balancer."""
    return [f"{each.model} {each.document_id}: {each.path}" for each in await shop.verify()]
