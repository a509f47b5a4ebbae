"""`treadle.fastapi`: the lifespan, the Store as a dependency, errors as answers, and what OpenAPI says."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import pytest
from bson import ObjectId
from fastapi import APIRouter, FastAPI
from pymongo import AsyncMongoClient
from starlette.testclient import TestClient

from tests.support import until
from treadle import (
    AsyncStore,
    Count,
    CreatedAt,
    Document,
    ExtendedReference,
    Id,
    Indexed,
    Outlier,
    Page,
    ParentReference,
)
from treadle.errors import BulkFailed, DataError, Failure, InvalidValue, UsageError
from treadle.fastapi import CurrentStore, add_error_handlers, lifespan, status_of
from treadle.store.call_context import TimedOut


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int = 5


class Maker(Document, collection="makers"):
    name: str


class Product(Document, collection="products", naming="camel", revision="revision"):
    full_name: Annotated[str, Indexed(unique=True)]
    maker_id: Id | None = None
    maker: Annotated[str | None, ExtendedReference(Maker, by="maker_id", field="name")] = None
    review_count: Annotated[int, Count(Review, by="product_id", computed_at="counted_at")] = 0
    counted_at: datetime | None = None
    followers: Annotated[list[Id], Outlier(limit=5, overflow="more", count="follower_count")] = []
    follower_count: int = 0
    created: Annotated[datetime | None, CreatedAt()] = None
    revision: int = 0


class Node(Document, collection="nodes", tree=ParentReference(parent="parent_id")):
    parent_id: Id | None = None


class Shelf(Document, collection="shelves"):
    reviews: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0


MODELS = [Maker, Review, Product, Node, Shelf]
router = APIRouter()


@router.get("/products/{id}")
async def see(id: Id, store: CurrentStore) -> Product:
    return await store.require(Product, id)


@router.get("/text/{id}")
async def see_by_text(id: str, store: CurrentStore) -> Product:
    return await store.require(Product, id)


@router.get("/products")
async def listed(store: CurrentStore, after: str | None = None) -> Page[Product]:
    return await store.page(Product, sort="fullName", size=2, after=after)


@router.post("/products", status_code=201)
async def add(product: Product, store: CurrentStore) -> Product:
    return await store.insert(product)


@router.put("/products/{id}")
async def put(id: Id, product: Product, store: CurrentStore) -> Product:
    return await store.replace(product.model_copy(update={"id": id}))


@router.get("/leases")
async def leases(store: CurrentStore) -> list[str]:
    return [str(each["_id"]) async for each in store.database["treadle.leases"].find()]


@pytest.fixture
def application(server, database):
    def make(**options: Any) -> FastAPI:
        def open_store() -> AsyncStore:
            # Inside, because the client belongs to the loop that the application runs on.
            return AsyncStore(AsyncMongoClient(server.uri)[database.name], MODELS)

        app = FastAPI(lifespan=lifespan(open_store, setup=True, **options))
        app.include_router(router)
        add_error_handlers(app)
        return app

    return make


@pytest.fixture
def http(application):
    with TestClient(application()) as client:
        yield client


def test_what_is_sent_comes_back_under_the_same_names(http):
    id = str(ObjectId())
    product = http.post("/products", json={"id": id, "full_name": "Lamp"}).json()
    assert (id, "Lamp", 0, 1) == (
        product["id"],
        product["full_name"],
        product["review_count"],
        product["revision"],
    )
    assert product == http.get(f"/products/{id}").json()
    assert "Desk" == http.post("/products", json={"fullName": "Desk"}).json()["full_name"]


def test_errors_have_a_status_and_one_plain_sentence(http):
    lamp = http.post("/products", json={"full_name": "Lamp"}).json()
    missing = http.get(f"/products/{ObjectId()}")
    assert (404, "document-missing") == (missing.status_code, missing.json()["code"])
    duplicate = http.post("/products", json={"full_name": "Lamp"})
    assert (409, "duplicate-key") == (duplicate.status_code, duplicate.json()["code"])
    assert "fullName" in duplicate.json()["detail"]
    assert "Lamp" not in duplicate.json()["detail"]
    stale = {**lamp, "full_name": "Lantern"}
    assert 200 == http.put(f"/products/{lamp['id']}", json=stale).status_code
    conflict = http.put(f"/products/{lamp['id']}", json=stale)
    assert (409, "document-changed") == (conflict.status_code, conflict.json()["code"])


@pytest.mark.parametrize("path", ["/products/nonsense", "/text/nonsense"])
def test_an_invalid_id_is_one_error(http, path):
    answer = http.get(path)
    assert 422 == answer.status_code
    detail = answer.json()["detail"]
    assert isinstance(detail, str) or 1 == len(detail)
    assert "24 hexadecimal digits" in answer.text


def test_pages_lead_from_one_to_the_next(http):
    for name in "abcde":
        http.post("/products", json={"full_name": name})
    names, after = [], None
    while True:
        page = http.get("/products", params={"after": after} if after else {}).json()
        names += [each["full_name"] for each in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert list("abcde") == names
    assert 400 == http.get("/products", params={"after": "nonsense"}).status_code


def test_openapi_names_fields_alike_in_and_out_and_says_what_is_read_only(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    both = [schemas[name] for name in ("Product-Input", "Product-Output")]
    assert list(both[0]["properties"]) == list(both[1]["properties"])
    assert list(Product.model_fields) == list(both[0]["properties"])
    assert ["full_name"] == both[0]["required"]
    maintained = {"maker", "review_count", "counted_at", "follower_count", "created", "revision"}
    for each in both:
        assert maintained == {name for name, field in each["properties"].items() if field.get("readOnly")}
    assert "readOnly" not in Node.model_json_schema()["properties"]["parent_id"]
    assert {"items", "next"} == set(schemas["Page_Product_"]["properties"])


def test_no_worker_runs_unless_asked(application, database):
    with TestClient(application(worker=True)) as client:
        shelf = database["shelves"].insert_one({"reviews": 0}).inserted_id
        database["reviews"].insert_one({"product_id": shelf, "rating": 5})
        until("the worker", lambda: 1 == database["shelves"].find_one()["reviews"])
    database["treadle.leases"].drop()
    with TestClient(application()) as client:
        assert [] == client.get("/leases").json()


def test_an_application_without_a_lifespan_is_told_so():
    app = FastAPI()
    app.include_router(router)
    add_error_handlers(app)
    with TestClient(app) as client:
        answer = client.get(f"/products/{ObjectId()}")
    assert (400, "store-missing") == (answer.status_code, answer.json()["code"])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x", code="limit-invalid"), 400),
        (UsageError("x", code="index-missing"), 503),
        (InvalidValue("x", code="document-invalid"), 422),
        (DataError("x", code="document-invalid"), 500),
        (DataError("x", code="reference-restricted"), 409),
        (TimedOut("x", code="write-outcome-unknown"), 503),
        (BulkFailed([Failure(0, "x", "duplicate-key")], 1), 409),
    ],
)
def test_the_status_of_an_error(error, status):
    assert status == status_of(error)
