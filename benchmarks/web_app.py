"""One small FastAPI application in three libraries, as each one's documentation would write it.

    python -m benchmarks.web_app Treadle

serves it with uvicorn on a free port of 127.0.0.1, which it prints first.
"""

# No postponed annotations here: FastAPI and Beanie read them inside functions.
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from bson import ObjectId
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from pymongo import AsyncMongoClient

import treadle

DATABASE = "treadle_benchmarks_web"


class ProductOut(BaseModel):
    id: str
    name: str
    price: float
    tags: list[str]
    stock: int


class ReviewIn(BaseModel):
    product_id: str
    rating: int
    text: str


class ReviewOut(ReviewIn):
    id: str


def with_pymongo(client: AsyncMongoClient[Any]) -> FastAPI:
    app = FastAPI()
    database = client[DATABASE]

    @app.get("/products/{id}")
    async def product(id: str) -> ProductOut:
        raw = await database["products"].find_one({"_id": ObjectId(id)})
        if raw is None:
            raise HTTPException(404)
        return ProductOut(id=str(raw.pop("_id")), **raw)

    @app.post("/reviews")
    async def review(review: ReviewIn) -> ReviewOut:
        raw = {**review.model_dump(), "product_id": ObjectId(review.product_id)}
        result = await database["reviews"].insert_one(raw)
        return ReviewOut(id=str(result.inserted_id), **review.model_dump())

    return app


class Product(treadle.Document, collection="products"):
    name: str
    price: float
    tags: list[str] = []
    stock: int = 0


class Review(treadle.Document, collection="reviews"):
    product_id: treadle.Id
    rating: int
    text: str


def with_treadle(client: AsyncMongoClient[Any]) -> FastAPI:
    store = treadle.AsyncStore(client[DATABASE], models=[Product, Review])
    app = FastAPI()

    @app.get("/products/{id}")
    async def product(id: str) -> ProductOut:
        found = await store.get(Product, id)
        if found is None:
            raise HTTPException(404)
        return ProductOut(
            id=str(found.id), name=found.name, price=found.price, tags=found.tags, stock=found.stock
        )

    @app.post("/reviews")
    async def review(review: ReviewIn) -> ReviewOut:
        stored = await store.insert(Review.model_validate(review.model_dump()))
        return ReviewOut(id=str(stored.id), **review.model_dump())

    return app


def with_beanie(client: AsyncMongoClient[Any]) -> FastAPI:
    import beanie

    class BeanieProduct(beanie.Document):
        name: str
        price: float
        tags: list[str] = []
        stock: int = 0

        class Settings:
            name = "products"

    class BeanieReview(beanie.Document):
        product_id: beanie.PydanticObjectId
        rating: int
        text: str

        class Settings:
            name = "reviews"

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await beanie.init_beanie(database=client[DATABASE], document_models=[BeanieProduct, BeanieReview])
        yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/products/{id}")
    async def product(id: str) -> ProductOut:
        found = await BeanieProduct.get(id)
        if found is None:
            raise HTTPException(404)
        return ProductOut(
            id=str(found.id), name=found.name, price=found.price, tags=found.tags, stock=found.stock
        )

    @app.post("/reviews")
    async def review(review: ReviewIn) -> ReviewOut:
        stored = await BeanieReview.model_validate(review.model_dump()).insert()
        return ReviewOut(id=str(stored.id), **review.model_dump())

    return app


LIBRARIES: dict[str, Callable[[AsyncMongoClient[Any]], FastAPI]] = {
    "PyMongo async": with_pymongo,
    "Treadle": with_treadle,
    "Beanie": with_beanie,
}


def main() -> None:
    # One core for the application; the server and the one who asks share the others.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    client: AsyncMongoClient[Any] = AsyncMongoClient(os.environ["MONGODB_URI"])
    app = LIBRARIES[sys.argv[1]](client)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, loop="asyncio", http="h11")
    )
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
