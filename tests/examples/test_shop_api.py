"""The FastAPI example, through HTTP: a real uvicorn, a real server, real documents."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from bson import ObjectId
from examples.shop_api.app import create_app
from examples.shop_api.models import MODELS, Product

from tests.support import PATIENCE_SECONDS, until
from treadle import Store

DUNE = {"type": "book", "title": "Dune", "price": "9.99", "stock": 5, "author": "Herbert"}
MOUSE = {"type": "electronics", "title": "Mouse", "price": "20", "stock": 1}


@pytest.fixture(scope="module")
def served(server: Any, client: Any) -> Iterator[SimpleNamespace]:
    """The application, on a port and a database of its own."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with serving(server, name) as http:
        database = client[name]
        yield SimpleNamespace(http=http, store=Store(database, MODELS), database=database)
    client.drop_database(name)


@contextmanager
def serving(server: Any, database: str) -> Iterator[httpx.Client]:
    """Run uvicorn in a thread; its end is that of a SIGTERM."""
    base, _, options = server.uri.partition("?")
    app = create_app(f"{base}{database}?{options}")
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until("the start", lambda: running.started or not thread.is_alive())
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as http:
            yield http
    finally:
        running.should_exit = True
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the application does not end"


@pytest.fixture
def shop(served: SimpleNamespace) -> SimpleNamespace:
    """A customer, and goods that no other test has."""
    mark = uuid.uuid4().hex[:6]
    goods = post(served.http, "/categories", name="goods")
    books = post(served.http, "/categories", name="books", parent_id=goods["id"])
    novels = post(served.http, "/categories", name="novels", parent_id=books["id"])
    email = f"ada.{mark}@example.org"
    return SimpleNamespace(
        **vars(served),
        mark=mark,
        goods=goods["id"],
        books=books["id"],
        novels=novels["id"],
        email=email,
        ada=post(served.http, "/customers", name="Ada", email=email)["id"],
        dune=post(served.http, "/products", category_id=novels["id"], **DUNE)["id"],
        mouse=post(served.http, "/products", category_id=goods["id"], **MOUSE, brand=mark)["id"],
    )


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert 201 == answer.status_code, answer.text
    return answer.json()


def test_kinds_come_back_with_their_own_fields(shop):
    dune = shop.http.get(f"/products/{shop.dune}").json()
    assert ("book", "Herbert", "novels", "9.99") == (
        dune["type"],
        dune["author"],
        dune["category"],
        dune["price"],
    )
    assert "followers" not in dune
    both = shop.http.get(f"/categories/{shop.goods}/products").json()
    assert [("Dune", "book"), ("Mouse", "electronics")] == [(each["title"], each["type"]) for each in both]
    assert ["Mouse"] == [
        each["title"] for each in shop.http.get("/products", params={"words": shop.mark}).json()
    ]


def test_a_moved_category_takes_its_products_along(shop):
    other = post(shop.http, "/categories", name="second hand")["id"]
    moved = shop.http.post(f"/categories/{shop.books}/move", json={"parent_id": other}).json()
    assert [other] == moved["ancestors"]
    assert ["Dune"] == [each["title"] for each in shop.http.get(f"/categories/{other}/products").json()]
    circle = shop.http.post(f"/categories/{other}/move", json={"parent_id": shop.novels})
    assert (400, "tree-cycle") == (circle.status_code, circle.json()["code"])


def test_reviews_are_counted_averaged_and_the_newest_shown(shop):
    ids = [
        post(shop.http, f"/products/{shop.dune}/reviews", rating=rating, text=f"{rating}")["id"]
        for rating in (1, 5, 4, 3)
    ]
    dune = shop.http.get(f"/products/{shop.dune}").json()
    assert (4, 3.25, ["3", "4", "5"]) == (
        dune["review_count"],
        dune["average_rating"],
        [review["text"] for review in dune["recent_reviews"]],
    )
    assert 204 == shop.http.delete(f"/reviews/{ids[3]}").status_code
    dune = shop.http.get(f"/products/{shop.dune}").json()
    assert (3, ["4", "5", "1"]) == (
        dune["review_count"],
        [review["text"] for review in dune["recent_reviews"]],
    )


def test_an_order_takes_stock_and_keeps_its_prices(shop):
    order = post(
        shop.http,
        "/orders",
        customer_id=shop.ada,
        lines=[{"product_id": shop.dune, "quantity": 2}, {"product_id": shop.mouse, "quantity": 1}],
    )
    assert ("39.98", "Ada") == (order["total"], order["customer"]["name"])
    assert 3 == shop.http.get(f"/products/{shop.dune}").json()["stock"]
    shop.http.patch(f"/customers/{shop.ada}", json={"name": "Ada L.", "tier": "gold"}).raise_for_status()
    shop.store.update(Product, ObjectId(shop.dune), {"$set": {"price": Decimal(99)}})
    order = shop.http.get(f"/orders/{order['id']}").json()
    assert {"name": "Ada L.", "tier": "gold"} == order["customer"]
    assert ["9.99", "20"] == [line["price"] for line in order["lines"]]
    assert 409 == shop.http.delete(f"/customers/{shop.ada}").status_code


def test_an_order_beyond_the_stock_leaves_no_trace(shop):
    lines = [{"product_id": shop.dune, "quantity": 2}, {"product_id": shop.mouse, "quantity": 2}]
    refused = shop.http.post("/orders", json={"customer_id": shop.ada, "lines": lines})
    assert 409 == refused.status_code
    assert 5 == shop.http.get(f"/products/{shop.dune}").json()["stock"]
    assert 0 == shop.database["orders"].count_documents({"customer_id": ObjectId(shop.ada)})


def test_the_last_piece_is_sold_once(shop):
    body = {"customer_id": shop.ada, "lines": [{"product_id": shop.mouse, "quantity": 1}]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: shop.http.post("/orders", json=body).status_code, range(8)))
    assert [201] + [409] * 7 == sorted(answers)


def test_the_worker_follows_orders_with_sales_per_day(shop):
    for _ in range(3):
        post(shop.http, "/orders", customer_id=shop.ada, lines=[{"product_id": shop.dune, "quantity": 1}])
    orders = list(shop.database["orders"].find())
    turnover = sum(order["total"].to_decimal() for order in orders)

    def followed() -> bool:
        days = shop.http.get("/sales").json()
        sums = sum(day["orders"] for day in days), sum(Decimal(day["turnover"]) for day in days)
        return (len(orders), turnover) == sums

    until("the sales", followed)
    until("the worker", lambda: 0 == shop.http.get("/health").json()["events_behind"])
    assert [] == shop.http.get("/findings").json()


def test_findings_name_what_is_wrong(shop):
    shop.database["products"].update_one({"_id": ObjectId(shop.dune)}, {"$set": {"review_count": 7}})
    assert [f"Book {shop.dune}: review_count"] == shop.http.get("/findings").json()
    shop.store.repair()
    assert [] == shop.http.get("/findings").json()


def test_followers_beyond_the_limit_are_paged(shop):
    path = f"/products/{shop.dune}/followers"
    ids = [str(ObjectId()) for _ in range(120)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda id: shop.http.put(f"{path}/{id}").json()["new"], ids))
    assert {"new": False} == shop.http.put(f"{path}/{ids[7]}").json()
    pages = [shop.http.get(path, params={"page": page}).json()["followers"] for page in (1, 2, 3)]
    assert [50, 50, 20] == [len(page) for page in pages]
    assert set(ids) == {each for page in pages for each in page}
    stored = shop.database["products"].find_one({"_id": ObjectId(shop.dune)})
    assert (100, 120, True) == (len(stored["followers"]), stored["follower_count"], stored["has_overflow"])
    assert {"removed": 1} == shop.http.delete(f"{path}/{ids[0]}").json()


def test_views_are_stored_at_the_latest_when_the_application_ends(server, database):
    with serving(server, database.name) as http:
        category = post(http, "/categories", name="goods")["id"]
        shirt = post(
            http, "/products", type="clothing", title="Shirt", price="5", category_id=category, size="M"
        )["id"]
        for _ in range(30):
            http.get(f"/products/{shirt}").raise_for_status()
    assert 30 == database["products"].find_one({"_id": ObjectId(shirt)})["views"]
    assert [] == Store(database, MODELS).verify()


def test_refusals_have_a_status_and_a_code(shop):
    nobody = ObjectId()
    shirt = {"type": "clothing", "title": "?", "price": "1", "category_id": shop.goods}
    for method, path, body, status, code in (
        ("get", "/products/nonsense", None, 422, None),
        ("get", f"/products/{nobody}", None, 404, "document-missing"),
        ("post", "/products", {**shirt, "type": "car"}, 422, None),
        ("post", "/products", {**shirt, "size": "XXL"}, 422, None),
        ("post", "/products", {**shirt, "size": "S", "category_id": str(nobody)}, 404, "document-missing"),
        ("post", "/customers", {"name": "Eve", "email": shop.email}, 409, "duplicate-key"),
        ("put", f"/products/{nobody}/followers/{nobody}", None, 404, "array-owner-missing"),
        ("post", f"/categories/{nobody}/move", {"parent_id": None}, 404, "tree-node-missing"),
        ("delete", f"/categories/{shop.books}", None, 409, "tree-has-children"),
        ("delete", f"/categories/{shop.novels}", None, 409, "reference-restricted"),
    ):
        answer = shop.http.request(method, path, json=body)
        assert (status, code) == (answer.status_code, answer.json().get("code")), answer.text
