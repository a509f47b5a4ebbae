"""The public contract, held from outside: names, signatures, results, stored documents, commands, codes.

Only public names are used: `treadle`, `treadle.testing`, `treadle.server`,
`treadle.fastapi`, the `treadle` command, and PyMongo on raw collections. A
change here is a change of the contract. What the contract promises and the
code does not do yet is at the end: strict expected failures, each with its
issue.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import pytest
from bson import DBRef, Decimal128, ObjectId
from pydantic import BaseModel, Field, create_model
from pymongo import AsyncMongoClient, IndexModel, MongoClient
from pymongo.errors import DuplicateKeyError

import treadle
import treadle.server
from treadle import (
    AncestorArray,
    Approximate,
    Archive,
    AsyncStore,
    Attributes,
    Average,
    Bucket,
    ChildReferences,
    Collect,
    Count,
    CreatedAt,
    Day,
    Document,
    ExtendedReference,
    Formula,
    History,
    Hour,
    Id,
    Indexed,
    Links,
    MaterializedPath,
    Max,
    Measured,
    Min,
    Outlier,
    ParentReference,
    Rollup,
    Store,
    Subset,
    Sum,
    TimeSeries,
    UpdatedAt,
    migration,
)

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
ROOT = Path(__file__).parent.parent


# -- names --

NAMES = """
Document Id Indexed Measured CreatedAt UpdatedAt Unchecked Limits
ExtendedReference Count Sum Average Min Max Collect Subset Formula
Rollup Total Minute Hour Day Week Month Quarter Year
Bucket TimeSeries Outlier Approximate Attributes Links History Archive
AncestorArray ChildReferences MaterializedPath ParentReference Migration migration
Store AsyncStore
Insert Update UpdateMany Replace Upsert Delete DeleteMany
Action Bulk Upserted Page Finding Progress State Summary FieldSummary Nested JobStatus KeptFinding
Migrated Sample SetAside SetAsideDocument Ran
TreadleError DeclarationError DataError UsageError NotFound Conflict DuplicateKey BulkFailed Failure
PartlyDone TimedOut NotSetUp
"""
PUBLIC = NAMES.split()


def test_every_public_name_is_exported():
    assert not set(PUBLIC) - set(treadle.__all__)
    assert all(getattr(treadle, name) is not None for name in PUBLIC)


def test_the_errors_say_who_can_act():
    kinds = {name: getattr(treadle, name) for name in PUBLIC}
    for name in ("DeclarationError", "DataError", "UsageError"):
        assert issubclass(kinds[name], treadle.TreadleError)
    for name in ("NotFound", "Conflict", "DuplicateKey"):
        assert issubclass(kinds[name], treadle.UsageError)
    for name in ("BulkFailed", "PartlyDone"):
        assert issubclass(kinds[name], treadle.DataError)
    assert issubclass(treadle.DuplicateKey, DuplicateKeyError)
    assert issubclass(treadle.TimedOut, treadle.TreadleError)


# -- signatures: a line is what a caller may rely on; "..." stands for any default --

STORE = """
__init__(database, models, write_versions=None, limits=None, timeout=None)
open(uri, models, write_versions=None, limits=None, timeout=None, **client_options)
local(models, path=None, write_versions=None, limits=None)
setup(dry_run=False, *, validation=None)
index_ready()
ping()
close()
recover()
collection(model)
insert(document, session=None)
insert_many(documents, session=None, *, ordered=True)
get(model, id, session=None, *, into=None)
get_many(model, ids, session=None, *, into=None)
require(model, id_or_filter, session=None, *, into=None)
find_one(model, filter=None, sort=None, session=None, *, into=None)
find(model, filter=None, sort=None, skip=0, limit=None, session=None, *, into=None, deleted=False, \
archived=False, invalid="raise")
search(model, text, filter=None, limit=None, session=None, *, into=None)
page(model, filter=None, sort=None, size=20, after=None, session=None, *, into=None)
count(model, filter=None, session=None)
exists(model, filter=None, session=None)
distinct(model, field, filter=None, session=None)
aggregate(model, pipeline, session=None, *, into=None)
update(model, id_or_filter, update, session=None, *, sort=None, returns="after", array_filters=None)
update_many(model, filter, update, session=None)
upsert(model, filter, update, insert, session=None)
change(document, /, session=None, **fields)
change_kind(document, was, session=None)
replace(document, session=None)
delete(model, id_or_filter, session=None)
delete_many(model, filter, session=None)
bulk(operations, session=None, *, ordered=True)
restore(model, id, session=None)
purge(model, before=None, session=None)
transaction()
with_transaction(work)
array(model, field, id)
counter(model, field, random=None)
tree(model)
related(model, id, filter=None, sort=None, limit=None, session=None)
summary(model, key, start=None, end=None, session=None)
readings(model, key, start=None, end=None, fields=None, session=None)
history(model, id, session=None)
at(model, id, moment, session=None)
find_at(model, filter, moment, session=None)
revert(model, id, revision, session=None)
archive(model, now=None, throttle=None, dry_run=False, progress=None)
verify(*models, sample=None, since=None, resume=False, fields=None, throttle=None, progress=None)
repair(*models, ids=None, fields=None, throttle=None, progress=None)
rebuild(*models, resume=False, throttle=None, progress=None)
findings()
worker(name="worker")
run_due(now=None, dry_run=False)
status()
pause(rule)
resume(rule)
set_aside(rule=None)
retry(item)
discard(item)
jobs()
control_job(id, asked=None, throttle="keep")
migrate(model, to=None, dry_run=False, batch=None, throttle=None, retry=False, stop=None, progress=None)
migration_status(model)
migration_failures(model)
""".strip().splitlines()

HANDLES = """
array.append(item, session=None)
array.extend(items, session=None)
array.remove(item, session=None)
array.contains(item, session=None)
array.count(session=None)
array.page(number, size, session=None)
counter.add(id, n=1)
counter.add_many(counts)
counter.flush()
counter.pending()
counter.read(id, exact=False)
counter.close()
tree.insert(node, parent=None, session=None)
tree.roots(sort=None, session=None)
tree.children(id, sort=None, session=None)
tree.ancestors(id, session=None)
tree.descendants(id, max_depth=None, sort=None, session=None)
tree.move(id, parent, session=None)
tree.remove(id, children="refuse", session=None)
tree.path(id, session=None)
tree.depth(id, session=None)
tree.parent(id, session=None)
tree.count(id=None, max_depth=None, session=None)
tree.nested(id, max_depth=None, sort=None, session=None)
tree.rename(id, segment, session=None)
worker.run()
worker.run_until_idle()
worker.lag()
worker.stop()
""".strip().splitlines()

COMPUTED = "by=None, where=None, maintain='write', every=None, computed_at=None, to=None"
DECLARATIONS = f"""
ExtendedReference(source, by, fields=None, field=None, policy="sync", snapshot=(), on_delete="keep", \
maintain="write", every=None, to=None)
Count(source=None, {COMPUTED})
Sum(source=None, field=None, {COMPUTED})
Average(source=None, field=None, {COMPUTED})
Min(source=None, field=None, {COMPUTED})
Max(source=None, field=None, {COMPUTED})
Collect(source=None, field=None, {COMPUTED}, size=100)
Subset(source, by, sort, size, where=None, maintain="write", every=None, to=None)
Formula(expression, maintain="write", every=None)
Rollup(source, keys, where=None, maintain="write", every=None)
Total(name="all")
Minute(field, timezone="UTC", size=1)
Hour(field, timezone="UTC", size=1)
Day(field, timezone="UTC")
Week(field, timezone="UTC")
Month(field, timezone="UTC")
Quarter(field, timezone="UTC")
Year(field, timezone="UTC")
Bucket(key, time, span=None, limit=None, stats=(), names=..., metadata=(), unique=None, expire_after=None, \
adopt=None)
TimeSeries(time, key=None, granularity="seconds", expire_after=None, stats=(), adopt=None)
Outlier(limit, overflow, page_size=1000, layout="page", unique=False, flag=None, count=None, owner=None, \
item="item")
Approximate(every=100, within=timedelta(seconds=5), buffer="memory", collection=None, by="id", upsert=False, \
flushed_at=None, keys_max=100_000)
AncestorArray(parent, ancestors, *, sort=None)
MaterializedPath(path, segment, parent=None, *, sort=None)
ParentReference(parent, *, sort=None)
ChildReferences(children)
History(collection=None, keep=None, maintain="write")
Archive(by, after, into, counted=True, archived="refuse")
Attributes()
Measured(value, unit)
Links(field="links")
Indexed(unique=False, descending=False, sparse=False, expire_after=None, name=None, text=False, \
deleted=False, options=...)
CreatedAt()
UpdatedAt()
Insert(document)
Update(model, filter, update)
UpdateMany(model, filter, update)
Replace(document)
Upsert(model, filter, update, insert)
Delete(model, filter)
DeleteMany(model, filter)
""".strip().splitlines()


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(function).parameters)
    found.pop("self", None)
    return found


def assert_takes(function: Callable[..., Any], contract: str) -> None:
    """The parameters of the contract, in their order, with their defaults; others must be optional."""
    wanted = parameters(eval(f"lambda {contract}: None", {"timedelta": timedelta}))
    actual = parameters(function)
    assert list(wanted) == [name for name in actual if name in wanted]
    for name, parameter in wanted.items():
        if parameter.default is ...:
            assert actual[name].default is not inspect.Parameter.empty, name
        else:
            assert (parameter.kind, parameter.default) == (actual[name].kind, actual[name].default), name
    for name in actual.keys() - wanted.keys():
        assert actual[name].default is not inspect.Parameter.empty, f"{name} is not of the contract"


def split(line: str) -> tuple[str, str]:
    name, _, rest = line.partition("(")
    return name, rest.removesuffix(")")


@pytest.mark.parametrize("line", STORE, ids=[split(line)[0] for line in STORE])
def test_calls_of_both_stores(line):
    name, contract = split(line)
    assert_takes(getattr(Store, name), contract)
    assert_takes(getattr(AsyncStore, name), contract)


def test_both_stores_have_the_same_calls():
    calls = [{name for name in dir(kind) if not name.startswith("_")} for kind in (Store, AsyncStore)]
    assert calls[0] == calls[1]
    assert {split(line)[0] for line in STORE} - {"__init__"} <= calls[0]


@pytest.mark.parametrize("line", DECLARATIONS, ids=[split(line)[0] for line in DECLARATIONS])
def test_constructors_of_declarations_and_operations(line):
    name, contract = split(line)
    assert_takes(getattr(treadle, name), contract)


def test_calls_of_handles():
    """Also: making a Store and its handles connects to nothing."""
    nowhere = {"host": "mongodb://127.0.0.1:1", "connect": False}
    stores = [
        Store(MongoClient(**nowhere)["shop"], SHAPES),
        AsyncStore(AsyncMongoClient(**nowhere)["shop"], SHAPES),
    ]
    for store in stores:
        handles = {
            "array": store.array(User, "followers", ObjectId()),
            "counter": store.counter(Visit, "hits"),
            "tree": store.tree(Category),
            "worker": store.worker(),
        }
        for line in HANDLES:
            name, contract = split(line)
            handle, _, call = name.partition(".")
            assert_takes(getattr(handles[handle], call), contract)


RESULTS = {
    "Action": "what collection detail",
    "Bulk": "inserted updated deleted",
    "Upserted": "document created",
    "Page": "items next",
    "Finding": "pattern model document_id path stored expected",
    "Progress": "model done total seconds_left",
    "State": "document revision valid_from valid_to missed",
    "Summary": "start end count stats",
    "FieldSummary": "min max sum avg",
    "Nested": "node children",
    "Migrated": "model to migrated remaining finished set_aside samples",
    "Sample": "document_id before after",
    "SetAside": "model document_id reason",
    "SetAsideDocument": "rule collection document_id reason code since attempts",
    "Failure": "position reason code",
}


@pytest.mark.parametrize("name", RESULTS)
def test_fields_of_results(name):
    actual = list(parameters(getattr(treadle, name)))
    assert RESULTS[name].split() == actual


KEYWORDS: list[dict[str, Any]] = [
    *({"naming": each} for each in ("snake", "camel")),
    *({"validation": each} for each in ("strict", "moderate", "off")),
    *({"validation_action": each} for each in ("error", "warn")),
    *({"version": 1, "version_field": "v", "migrate_on_read": each} for each in ("memory", "store")),
    {"discriminator": "type", "default_kind": "a", "kind": "a"},
    {"indexes": [IndexModel([("name", 1)])]},
    {"revision": "number"},
    {"soft_delete": "at"},
    {"shard_key": ("name",)},
    {"history": History(collection="h")},
    {"archive": Archive(by="at", after=timedelta(days=1), into="a")},
    {"tree": ParentReference("parent")},
    {"links": Links("links"), "discriminator": "type"},
    {"bucket": Bucket(key="name", time="at", limit=5)},
    {"timeseries": TimeSeries(time="at")},
]


def thing(fields: dict[str, Any] | None = None, **keywords: Any) -> type[Any]:
    """A model in one expression: a field is a type without a default, or a type with its default."""
    given = {key: each if isinstance(each, tuple) else (each, ...) for key, each in (fields or {}).items()}
    keywords = {"collection": "things", **keywords}
    return create_model("Thing", __base__=Document, __cls_kwargs__=keywords, **given)


@pytest.mark.parametrize("keywords", KEYWORDS, ids=" ".join)
def test_class_keywords(keywords):
    thing(**keywords)


def test_other_class_keywords_and_values_are_refused():
    with pytest.raises(treadle.DeclarationError, match=r"did you mean 'collection'.*keyword-unknown"):
        thing(colection="things")
    for keyword in ("naming", "validation", "validation_action", "migrate_on_read"):
        with pytest.raises(treadle.DeclarationError, match=keyword):
            thing(**{keyword: "other"})


# -- models in the shapes of the literature --


class Tier(Enum):
    SILVER = "silver"
    GOLD = "gold"


class Customer(Document, collection="customers"):
    name: str
    email: Annotated[str, Indexed(unique=True)]
    tier: Tier = Tier.SILVER


class CustomerCard(BaseModel):
    name: str
    tier: Tier


class ProductCard(BaseModel):
    name: str
    price: Decimal


class Line(BaseModel):
    product_id: Id
    product: Annotated[
        ProductCard | None, ExtendedReference("Product", by="product_id", policy="snapshot")
    ] = None
    quantity: int = 1


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    customer_name: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="name", policy="snapshot")
    ] = None
    lines: list[Line] = []


class Shelf(Document, collection="shelves"):
    code: Annotated[str, Indexed(unique=True)]
    name: str


class ShelfCard(BaseModel):
    id: Id = Field(alias="_id")
    name: str | None = None


class Article(Document, collection="articles"):
    shelf: Annotated[ShelfCard | None, ExtendedReference(Shelf, by="shelf.id", on_delete="restrict")] = None
    shelf_code: str | None = None
    shelf_name: Annotated[
        str | None, ExtendedReference(Shelf, by="shelf_code", to="code", field="name", on_delete="clear")
    ] = None
    editor: Any = None
    editor_name: Annotated[str | None, ExtendedReference(Customer, by="editor.$id", field="name")] = None


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str = ""
    date: datetime = NOON


class ReviewCard(BaseModel):
    rating: int
    date: datetime


class ReviewSummary(BaseModel):
    total_count: Annotated[int, Count(Review, by="product_id", computed_at="last_computed")] = 0
    average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    last_computed: datetime | None = None


class Product(Document, collection="products"):
    name: str
    price: Decimal
    specs: Annotated[dict[str, str | int | Measured], Attributes()] = {}
    review_summary: ReviewSummary = ReviewSummary()
    rating_total: Annotated[int, Sum(Review, {"$multiply": ["$rating", 2]}, by="product_id")] = 0
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id", where={"rating": {"$lte": 4}})] = None
    ratings: Annotated[list[int], Collect(Review, "rating", by="product_id")] = []
    recent_reviews: Annotated[
        list[ReviewCard], Subset(Review, by="product_id", sort=["-rating", "date"], size=2)
    ] = []
    price_with_tax: Annotated[Decimal | None, Formula({"$multiply": ["$price", Decimal("1.2")]})] = None


class Sale(
    Document, collection="sales", archive=Archive(by="at", after=timedelta(days=365), into="sales_archive")
):
    product: str
    at: datetime
    amount: Decimal


class DailySales(
    Document,
    collection="daily_summaries",
    rollup=Rollup(Sale, keys={"product": "product", "day": Day("at", timezone="Europe/Berlin")}),
):
    product: str
    day: datetime
    total: Annotated[Decimal, Sum("amount")]
    orders: Annotated[int, Count()]


class Power(BaseModel):
    consumption: Annotated[Decimal, Sum("amount")]
    mean: Annotated[Decimal | None, Formula({"$divide": ["$kW per day.consumption", 2]})] = None


class SalesOf(Document, collection="sales_of", rollup=Rollup(Sale, keys={"id": "product"})):
    id: str
    power: Annotated[Power, Field(alias="kW per day")]


class Reading(
    Document,
    collection="sensor_data",
    bucket=Bucket(key="sensor_id", time="ts", span=timedelta(hours=1), limit=3, stats=("temp",)),
):
    sensor_id: str
    ts: datetime
    temp: float


class Metric(
    Document,
    collection="metrics",
    bucket=Bucket(
        key=("site", "sensor"),
        time="ts",
        span=timedelta(hours=1),
        stats=("value",),
        unique="ts",
        metadata=("unit",),
        names={"start": "hour", "end": "until", "readings": "points", "stats": "totals", "count": "n"},
    ),
):
    site: str
    sensor: int
    unit: str
    ts: datetime
    value: int


class Sample(Document, collection="samples", timeseries=TimeSeries(time="ts", key="sensor_id")):
    sensor_id: str
    ts: datetime
    temp: float


class User(Document, collection="users"):
    name: str = ""
    followers: Annotated[list[int], Outlier(limit=3, overflow="follower_overflow", page_size=2)] = []
    follower_count: int = 0
    has_overflow: bool = False


class ForumThread(Document, collection="threads", naming="camel"):
    open_posts: Annotated[
        list[str],
        Outlier(
            limit=1, overflow="thread_posts", layout="documents", item="one_post", unique=True,
            flag="is_long", count="post_count",
        ),
    ] = []  # fmt: skip
    post_count: int = 0
    is_long: bool = False


class Metrics(BaseModel):
    view_count: Annotated[int, Approximate(every=3, within=None, flushed_at="last_flushed")] = 0
    last_flushed: datetime | None = None


class WebPage(Document, collection="pages"):
    approximate_metrics: Metrics = Metrics()


class Visit(Document, collection="visits"):
    page_id: Annotated[str, Indexed(unique=True)]
    hits: Annotated[
        int,
        Approximate(every=100, within=None, buffer="durable", collection="hits", by="page_id", upsert=True),
    ] = 0


class Category(
    Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    id: str
    parent_id: str | None = None
    ancestors: list[str] = []


class Unit(Document, collection="units", tree=MaterializedPath(path="path", segment="slug", parent="above")):
    slug: str
    path: str = ""
    above: Id | None = None


class Folder(Document, collection="folders", tree=ChildReferences(children="children")):
    id: str
    children: list[str] = []


class Employee(Document, collection="employees", tree=ParentReference(parent="manager")):
    id: str
    manager: str | None = None


class Policy(
    Document, collection="policies", history=History(collection="policies_history"), revision="revision"
):
    id: int
    premium: int
    revision: int = 0


class Booking(Document, collection="bookings", naming="camel", soft_delete="deleted_at"):
    id: str
    first_night: date
    seat_numbers: set[int] = set()
    token: uuid.UUID | None = None
    made_at: Annotated[datetime | None, CreatedAt()] = None
    written_at: Annotated[datetime | None, UpdatedAt()] = None
    deleted_at: datetime | None = None


class Item(Document, collection="items", discriminator="type", links=Links("links")):
    id: str
    links: list[str] = []


class Book(Item, kind="book"):
    isbn: Annotated[str | None, Indexed(unique=True)] = None


class Electronics(Item, kind="electronics"):
    brand: str


class Account(Document, collection="accounts", version=2):
    id: int
    first: str = ""
    last: str = ""


@migration(Account, from_version=1)
def split_name(document: dict[str, Any]) -> dict[str, Any]:
    document["first"], document["last"] = document.pop("name").split()
    return document


@split_name.down
def join_name(document: dict[str, Any]) -> dict[str, Any]:
    document["name"] = f"{document.pop('first')} {document.pop('last')}"
    return document


class Badge(Document, collection="badges"):
    owner: str
    awards: Annotated[int, Count("Award", by="owner", to="owner", maintain="stream")] = 0


class Award(Document, collection="awards"):
    owner: str
    at: datetime = NOON


class AwardsPerHour(
    Document,
    collection="awards_per_hour",
    rollup=Rollup(Award, keys={"id": Hour("at")}, maintain="schedule", every=timedelta(hours=1)),
):
    id: datetime
    number: Annotated[int, Count()]


SHAPES: list[type[Any]] = [
    Customer, Order, Shelf, Article, Review, Product, Sale, DailySales, SalesOf, Reading, Metric, Sample, User,
    ForumThread, WebPage, Visit, Category, Unit, Folder, Employee, Policy, Booking, Item, Book, Electronics,
    Account, Badge, Award, AwardsPerHour,
]  # fmt: skip


@pytest.fixture(scope="module")
def shapes(server) -> Iterator[Store]:
    """One Store for all tests here that write: each uses documents of its own."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with MongoClient(server.uri, tz_aware=True) as client:
        with Store(client[name], SHAPES) as opened:
            opened.setup()
            yield opened
        client.drop_database(name)


def raw(store: Store, model: Any, identity: Any) -> dict[str, Any]:
    """A stored document without `_treadle`, the one name that Treadle may add."""
    document = store.collection(model).find_one({"_id": identity})
    assert document is not None
    document.pop("_treadle", None)
    return document


def rows(store: Store, collection: str, filter: Any = None) -> list[dict[str, Any]]:
    """The documents of a collection without a model, without ids and `_treadle`."""
    found = store.collection(Customer).database[collection].find(filter or {}, {"_id": 0, "_treadle": 0})
    return list(found)


# -- stored documents --


def test_setup_is_idempotent_and_a_dry_run_lists_what_it_would_do(database):
    store = Store(database, [Shelf, Article, Customer])
    would = store.setup(dry_run=True)
    assert {treadle.Action} == {type(action) for action in would}
    assert would == store.index_ready() == store.setup()
    assert [] == store.setup() == store.index_ready()


def test_extended_reference_is_a_card_a_flat_copy_or_a_snapshot_in_an_array(shapes):
    ada = shapes.insert(Customer(name="Ada", email="ada@card"))
    loom = shapes.insert(Product(name="Loom", price=Decimal("90.00")))
    order = shapes.insert(Order(customer_id=ada.id, lines=[Line(product_id=loom.id)]))
    assert ("Ada", Tier.SILVER) == (order.customer.name, order.customer.tier)
    shapes.update(Customer, ada.id, {"$set": {"tier": Tier.GOLD, "name": "Lovelace"}})
    shapes.update(Product, loom.id, {"$set": {"price": Decimal("95.00")}})
    assert {
        "_id": order.id,
        "customer_id": ada.id,
        "customer": {"name": "Lovelace", "tier": "gold"},
        "customer_name": "Ada",
        "lines": [
            {"product_id": loom.id, "product": {"name": "Loom", "price": Decimal128("90.00")}, "quantity": 1}
        ],
    } == raw(shapes, Order, order.id)
    bob = shapes.insert(Customer(name="Bob", email="bob@card"))
    assert "Bob" == shapes.update(Order, order.id, {"$set": {"customer_id": bob.id}}).customer_name


def test_extended_reference_by_its_own_id_by_another_key_and_by_a_dbref(shapes):
    craft = shapes.insert(Shelf(code="c1", name="Craft"))
    ada = shapes.insert(Customer(name="Ada", email="ada@dbref"))
    editor = DBRef("customers", ada.id)
    article = shapes.insert(Article(shelf=ShelfCard(_id=craft.id), shelf_code="c1", editor=editor))
    shapes.update(Shelf, craft.id, {"$set": {"name": "Crafts"}})
    assert {
        "_id": article.id,
        "shelf": {"_id": craft.id, "name": "Crafts"},
        "shelf_code": "c1",
        "shelf_name": "Crafts",
        "editor": editor,
        "editor_name": "Ada",
    } == raw(shapes, Article, article.id)


def test_computed_values_also_in_nested_models(shapes):
    late = [Review(product_id=ObjectId(), rating=3)]
    shapes.insert_many(late)
    assert shapes.get(Product, late[0].product_id) is None, "a source creates no target"
    loom = shapes.insert(Product(name="Loom", price=Decimal("10.00")))
    dates = [NOON, NOON + timedelta(days=1), NOON]
    first, _, third = shapes.insert_many(
        [Review(product_id=loom.id, rating=n, date=at) for n, at in zip([5, 4, 5], dates, strict=True)]
    )
    stored = raw(shapes, Product, loom.id)
    stamped = stored["review_summary"].pop("last_computed")
    assert abs(datetime.now(UTC) - stamped) < timedelta(minutes=5)
    assert {
        "_id": loom.id,
        "name": "Loom",
        "price": Decimal128("10.00"),
        "specs": [],
        "review_summary": {"total_count": 3, "average": pytest.approx(14 / 3)},
        "rating_total": 28,
        "worst": 4,
        "best": 4,
        "ratings": [4, 5],
        "recent_reviews": [{"_id": each.id, "rating": 5, "date": NOON} for each in (first, third)],
        "price_with_tax": Decimal128("12.000"),
    } == stored
    early = shapes.insert(Product(id=late[0].product_id, name="Late", price=Decimal(1)))
    assert (1, 6) == (early.review_summary.total_count, early.rating_total), "filled from its sources"


def test_rollups(shapes):
    at = datetime(2026, 3, 29, 23, 30, tzinfo=UTC)
    shapes.insert_many([Sale(product="tea", at=at, amount=Decimal("1.50")) for _ in range(2)])
    berlin_midnight = datetime(2026, 3, 29, 22, tzinfo=UTC)
    assert [{"product": "tea", "day": berlin_midnight, "total": Decimal128("3.00"), "orders": 2}] == rows(
        shapes, "daily_summaries", {"product": "tea"}
    )
    indexes = shapes.collection(DailySales).index_information().values()
    assert any(index.get("unique") and [("product", 1), ("day", 1)] == index["key"] for index in indexes)
    assert {
        "_id": "tea",
        "kW per day": {"consumption": Decimal128("3.00"), "mean": Decimal128("1.50")},
    } == raw(shapes, SalesOf, "tea")
    shapes.delete_many(Sale, {"product": "tea"})
    assert [] == rows(shapes, "daily_summaries", {"product": "tea"})


def readings(series: str, *minutes: int) -> list[Reading]:
    return [Reading(sensor_id=series, ts=NOON + timedelta(minutes=n), temp=n) for n in minutes]


LAST_INSTANT = NOON + timedelta(hours=1) - timedelta(milliseconds=1)


def test_buckets_and_their_views(shapes):
    shapes.insert_many(readings("s1", 1, 5, 3, 7))
    first = {
        "sensor_id": "s1",
        "start": NOON,
        "end": LAST_INSTANT,
        "count": 3,
        "readings": [{"ts": NOON + timedelta(minutes=n), "temp": float(n)} for n in (1, 3, 5)],
        "stats": {"temp": {"min": 1.0, "max": 5.0, "sum": 9.0}},
    }
    buckets = rows(shapes, "sensor_data", {"sensor_id": "s1"})
    for bucket in buckets:
        bucket["readings"].sort(key=lambda reading: reading["ts"])
    assert first in buckets
    assert [1, 3] == sorted(bucket["count"] for bucket in buckets)
    flat = rows(shapes, "sensor_data.flat", {"sensor_id": "s1"})
    assert {1.0, 3.0, 5.0, 7.0} == {row["temp"] for row in flat}
    assert {"sensor_id", "ts", "temp"} == set(flat[0])
    (summary,) = rows(shapes, "sensor_data.summary", {"sensor_id": "s1", "count": 3})
    assert {"min": 1.0, "max": 5.0, "sum": 9.0, "avg": 3.0} == summary["stats"]["temp"]


def test_parts_of_a_bucket_can_be_renamed_and_metadata_is_lifted_out(shapes):
    shapes.insert(Metric(site="north", sensor=1, unit="W", ts=NOON, value=4))
    assert [
        {
            "site": "north",
            "sensor": 1,
            "unit": "W",
            "hour": NOON,
            "until": LAST_INSTANT,
            "n": 1,
            "points": [{"ts": NOON, "value": 4}],
            "totals": {"value": {"min": 4, "max": 4, "sum": 4}},
        }
    ] == rows(shapes, "metrics", {"site": "north"})


def test_time_series_are_the_native_kind(shapes):
    reading = shapes.insert(Sample(sensor_id="s1", ts=NOON, temp=1.5))
    assert [{"sensor_id": "s1", "ts": NOON, "temp": 1.5}] == rows(shapes, "samples")
    (options,) = shapes.collection(Sample).database.list_collections(filter={"name": "samples"})
    assert {"timeField": "ts", "metaField": "sensor_id"}.items() <= options["options"]["timeseries"].items()
    assert [reading] == shapes.find(Sample).to_list()


def test_outlier_arrays_overflow_into_pages(shapes):
    ann = shapes.insert(User(name="Ann"))
    assert 6 == shapes.array(User, "followers", ann.id).extend(range(6))
    assert {
        "_id": ann.id, "name": "Ann", "followers": [0, 1, 2], "follower_count": 6, "has_overflow": True,
    } == raw(shapes, User, ann.id)  # fmt: skip
    assert [
        {"user_id": ann.id, "page": 2, "followers": [3, 4], "count": 2},
        {"user_id": ann.id, "page": 3, "followers": [5], "count": 1},
    ] == sorted(rows(shapes, "follower_overflow", {"user_id": ann.id}), key=lambda row: row["page"])


def test_outlier_arrays_overflow_into_documents_in_the_naming_of_the_model(shapes):
    thread = shapes.insert(ForumThread())
    shapes.array(ForumThread, "open_posts", thread.id).extend(["a", "b"])
    assert {"_id": thread.id, "openPosts": ["a"], "postCount": 2, "isLong": True} == raw(
        shapes, ForumThread, thread.id
    )
    (overflow,) = rows(shapes, "thread_posts", {"forumThreadId": thread.id})
    assert {"forumThreadId": thread.id, "onePost": "b"}.items() <= overflow.items()
    assert {"forumThreadId", "position", "onePost"} == set(overflow)


def test_counters(shapes):
    page = shapes.insert(WebPage())
    with shapes.counter(WebPage, "approximate_metrics.view_count") as views:
        views.add(page.id, 2)
        assert 0 == raw(shapes, WebPage, page.id)["approximate_metrics"]["view_count"]
        views.add(page.id, 1)
    stored = raw(shapes, WebPage, page.id)["approximate_metrics"]
    assert 3 == stored["view_count"]
    assert abs(datetime.now(UTC) - stored["last_flushed"]) < timedelta(minutes=5)
    with shapes.counter(Visit, "hits") as hits:
        hits.add("home")
        assert 1 == len(rows(shapes, "hits")), "a durable event is stored at once"
    assert [{"page_id": "home", "hits": 1}] == rows(shapes, "visits", {"page_id": "home"})


def test_trees(shapes):
    tree = shapes.tree(Category)
    for node, parent in [("goods", None), ("books", "goods"), ("poetry", "books")]:
        tree.insert(Category(id=node), parent=parent)
    assert {"_id": "poetry", "parent_id": "books", "ancestors": ["goods", "books"]} == raw(
        shapes, Category, "poetry"
    )
    units = shapes.tree(Unit)
    company = units.insert(Unit(slug="company"))
    below = units.insert(Unit(slug="engineering"), parent=company.id)
    assert {
        "_id": below.id, "slug": "engineering", "path": ",company,engineering,", "above": company.id,
    } == raw(shapes, Unit, below.id)  # fmt: skip
    folders = shapes.tree(Folder)
    for node in ("root", "a", "b"):
        folders.insert(Folder(id=node), parent=None if node == "root" else "root")
    assert {"_id": "root", "children": ["a", "b"]} == raw(shapes, Folder, "root")
    employees = shapes.tree(Employee)
    employees.insert(Employee(id="ann"))
    employees.insert(Employee(id="bob"), parent="ann")
    assert {"_id": "bob", "manager": "ann"} == raw(shapes, Employee, "bob")


def test_attributes(shapes):
    specs = {"color": "red", "width": Measured(80, "cm")}
    loom = shapes.insert(Product(name="Loom", price=Decimal(1), specs=specs))
    stored = [{"k": "color", "v": "red"}, {"k": "width", "v": 80, "u": "cm"}]
    assert stored == raw(shapes, Product, loom.id)["specs"]
    indexes = shapes.collection(Product).index_information().values()
    assert any([("specs.k", 1), ("specs.v", 1)] == index["key"][:2] for index in indexes)
    assert [loom] == shapes.find(Product, {"specs.color": "red"}, sort="specs.width").to_list()
    after = shapes.update(Product, loom.id, {"$set": {"specs.color": "blue"}, "$unset": {"specs.width": ""}})
    assert {"color": "blue"} == after.specs
    assert [{"k": "color", "v": "blue"}] == raw(shapes, Product, loom.id)["specs"]


def test_history_rows(shapes):
    shapes.insert(Policy(id=1, premium=100))
    shapes.update(Policy, 1, {"$set": {"premium": 110}})
    shapes.update(Policy, 1, {"$set": {"premium": 110}})
    first, second = sorted(
        rows(shapes, "policies_history", {"document_id": 1}), key=lambda row: row["revision"]
    )
    assert {"document_id", "revision", "valid_from", "valid_to", "document"} == set(first)
    assert (1, 2) == (first["revision"], second["revision"])
    assert (100, 110) == (first["document"]["premium"], second["document"]["premium"])
    assert {"_id", "premium", "revision"} == set(first["document"])
    assert first["valid_from"] < first["valid_to"] == second["valid_from"]
    assert second["valid_to"] is None


def test_archived_documents_move_whole(shapes):
    old = shapes.insert(Sale(product="old", at=NOON - timedelta(days=800), amount=Decimal(2)))
    before = shapes.collection(Sale).find_one({"_id": old.id})
    assert 1 == shapes.archive(Sale, now=NOON)
    assert shapes.collection(Sale).find_one({"_id": old.id}) is None
    assert before == shapes.collection(Sale).database["sales_archive"].find_one({"_id": old.id})
    assert Decimal(2) == shapes.get(SalesOf, "old").power.consumption, "counted=True"
    assert shapes.find(Sale, {"product": "old"}).to_list() == []
    assert [old] == shapes.find(Sale, {"product": "old"}, archived=True).to_list()
    assert old == shapes.get(Sale, old.id) == shapes.restore(Sale, old.id)
    assert before == shapes.collection(Sale).find_one({"_id": old.id})


def test_kinds_and_links(shapes):
    shapes.insert(Book(id="dune"))
    shapes.insert(Electronics(id="mouse", brand="Click", links=["dune"]))
    assert {"_id": "dune", "type": "book", "links": ["mouse"]} == raw(shapes, Item, "dune")
    assert {"_id": "mouse", "type": "electronics", "brand": "Click", "links": ["dune"]} == raw(
        shapes, Item, "mouse"
    )
    together = shapes.related(Item, "dune").to_list()
    assert {(Book, "dune"), (Electronics, "mouse")} == {(type(each), each.id) for each in together}
    indexes = shapes.collection(Item).index_information().values()
    (isbn,) = [index for index in indexes if index["key"] == [("isbn", 1)]]
    assert isbn["unique"]
    assert {"$eq": "book"} == isbn["partialFilterExpression"]["type"]
    assert shapes.get(Electronics, "dune") is None
    shapes.delete(Electronics, "mouse")
    assert [] == raw(shapes, Item, "dune")["links"]


def test_versions(shapes):
    shapes.insert(Account(id=1, first="Ada", last="Lovelace"))
    stored = {"_id": 1, "first": "Ada", "last": "Lovelace", "schema_version": 2}
    assert stored == raw(shapes, Account, 1)
    shapes.collection(Account).insert_one({"_id": 2, "name": "Grace Hopper"})
    assert Account(id=2, first="Grace", last="Hopper") == shapes.get(Account, 2)
    assert {"_id": 2, "name": "Grace Hopper"} == raw(shapes, Account, 2), 'migrate_on_read="memory"'
    assert {1: 1, 2: 1} == shapes.migration_status(Account)
    done = shapes.migrate(Account)
    assert (1, 0, True) == (done.migrated, done.remaining, done.finished)
    assert {2: 2} == shapes.migration_status(Account)
    shapes.migrate(Account, to=1)
    assert {"_id": 1, "name": "Ada Lovelace", "schema_version": 1} == raw(shapes, Account, 1)
    assert [] == shapes.migration_failures(Account)


def test_camel_names_auto_fields_soft_delete_and_values(shapes):
    token = uuid.uuid4()
    booked = shapes.insert(Booking(id="b1", first_night=date(2026, 3, 2), seat_numbers={3, 1}, token=token))
    stored = raw(shapes, Booking, "b1")
    assert stored["madeAt"] == stored["writtenAt"] == booked.made_at
    assert {
        "_id": "b1",
        "firstNight": datetime(2026, 3, 2, tzinfo=UTC),
        "seatNumbers": [1, 3],
        "token": token,
        "madeAt": booked.made_at,
        "writtenAt": booked.made_at,
        "deletedAt": None,
    } == {**stored, "seatNumbers": sorted(stored["seatNumbers"])}
    assert [booked] == shapes.find(Booking, {"token": token, "firstNight": date(2026, 3, 2)}).to_list()
    after = shapes.update(Booking, "b1", {"$set": {"seatNumbers": {7}}})
    assert after.made_at == booked.made_at < after.written_at
    shapes.delete(Booking, "b1")
    assert raw(shapes, Booking, "b1")["deletedAt"] is not None
    assert shapes.get(Booking, "b1") is None
    assert 0 == shapes.count(Booking, {"_id": "b1"})
    assert ["b1"] == [each.id for each in shapes.find(Booking, deleted=True)]
    assert shapes.restore(Booking, "b1").deleted_at is None
    shapes.delete(Booking, "b1")
    assert 1 == shapes.purge(Booking, before=datetime.now(UTC) + timedelta(hours=1))
    assert shapes.collection(Booking).find_one({"_id": "b1"}) is None


def test_dates_are_cut_to_milliseconds(shapes):
    review = shapes.insert(Review(product_id=ObjectId(), rating=1, date=NOON.replace(microsecond=123_456)))
    assert NOON.replace(microsecond=123_000) == review.date == raw(shapes, Review, review.id)["date"]


def test_nothing_but_treadles_own_collections_is_added(shapes):
    own = {shapes.collection(model).name for model in SHAPES}
    extra = {"sales_archive", "sensor_data.flat", "sensor_data.summary", "metrics.flat", "metrics.summary",
             "follower_overflow", "thread_posts", "policies_history", "hits"}  # fmt: skip
    names = shapes.collection(Customer).database.list_collection_names()
    left = [name for name in names if not name.startswith(("treadle.", "system."))]
    assert set(left) <= own | extra


def test_validators_require_what_has_no_default_and_carry_enums(shapes):
    (options,) = shapes.collection(Customer).database.list_collections(filter={"name": "customers"})
    assert "moderate" == options["options"]["validationLevel"]
    schema = options["options"]["validator"]["$jsonSchema"]
    assert {"name", "email"} <= set(schema["required"])
    assert "tier" not in schema["required"]
    assert {"silver", "gold"} == set(schema["properties"]["tier"]["enum"])


# -- what calls return --


class NameOnly(BaseModel):
    name: str


@pytest.fixture(scope="module")
def people(shapes) -> list[Customer]:
    return shapes.insert_many([Customer(name=name, email=f"{name}@people") for name in ("Ann", "Bea", "Cem")])


OF_PEOPLE = {"email": {"$regex": "@people$"}}


def test_reads(shapes, people):
    ann, bea, cem = people
    nobody = ObjectId()
    assert all(type(each) is Customer for each in people)
    assert ann == shapes.get(Customer, ann.id) == shapes.get(Customer, str(ann.id))
    assert [cem, None, ann] == shapes.get_many(Customer, [cem.id, nobody, ann.id])
    assert bea == shapes.require(Customer, bea.id) == shapes.require(Customer, {"name": "Bea"})
    assert shapes.get(Customer, nobody) is shapes.find_one(Customer, {"name": "Zoe"}) is None
    for sort in ("-name", ["-name", "email"], [("name", -1)]):
        assert [cem, bea] == shapes.find(Customer, OF_PEOPLE, sort=sort, limit=2).to_list()
    assert [bea] == list(shapes.find(Customer, OF_PEOPLE, sort="name", skip=1, limit=1))
    assert (3, True, False) == (
        shapes.count(Customer, OF_PEOPLE),
        shapes.exists(Customer, OF_PEOPLE),
        shapes.exists(Customer, {"name": "Zoe"}),
    )
    assert [Tier.SILVER] == shapes.distinct(Customer, "tier", OF_PEOPLE)
    pipeline = [{"$match": OF_PEOPLE}, {"$sort": {"name": 1}}, {"$project": {"_id": 0, "name": 1}}]
    assert [{"name": "Ann"}, {"name": "Bea"}, {"name": "Cem"}] == list(shapes.aggregate(Customer, pipeline))
    assert NameOnly(name="Ann") == next(iter(shapes.aggregate(Customer, pipeline, into=NameOnly)))
    for read in (
        shapes.get(Customer, ann.id, into=NameOnly),
        shapes.get_many(Customer, [ann.id], into=NameOnly)[0],
        shapes.require(Customer, ann.id, into=NameOnly),
        shapes.find_one(Customer, {"name": "Ann"}, into=NameOnly),
        shapes.find(Customer, {"name": "Ann"}, into=NameOnly).to_list()[0],
        shapes.page(Customer, {"name": "Ann"}, into=NameOnly).items[0],
    ):
        assert NameOnly(name="Ann") == read
    assert isinstance(shapes.ping(), float)
    assert "customers" == shapes.collection(Customer).name


def test_pages_follow_each_other(shapes, people):
    first = shapes.page(Customer, OF_PEOPLE, sort="name", size=2)
    assert people[:2] == first.items
    assert isinstance(first.next, str)
    shapes.insert(Customer(name="Abe", email="abe@people"))
    assert treadle.Page([people[2]], None) == shapes.page(
        Customer, OF_PEOPLE, sort="name", size=2, after=first.next
    )
    shapes.delete(Customer, {"email": "abe@people"})


def test_writes(shapes):
    dee = shapes.insert(Customer(name="Dee", email="dee@writes"))
    gold = {"$set": {"tier": "gold"}}
    assert Tier.GOLD == shapes.update(Customer, dee.id, gold).tier
    before = shapes.update(Customer, {"email": "dee@writes"}, {"$set": {"name": "D"}}, returns="before")
    assert "Dee" == before.name
    assert shapes.update(Customer, ObjectId(), gold) is None
    assert 1 == shapes.update_many(Customer, {"email": "dee@writes"}, gold)
    assert "Di" == shapes.change(shapes.get(Customer, dee.id), name="Di").name
    new = Customer(name="Eve", email="eve@writes")
    by_email = {"email": "eve@writes"}
    assert treadle.Upserted(new, True) == shapes.upsert(Customer, by_email, gold, insert=new)
    again = shapes.upsert(Customer, by_email, gold, insert=Customer(name="Eva", email="eve@writes"))
    assert (new.id, "Eve", Tier.GOLD, False) == (
        again.document.id, again.document.name, again.document.tier, again.created,
    )  # fmt: skip
    assert new.id == shapes.replace(new).id
    assert new == shapes.delete(Customer, new.id)
    assert shapes.delete(Customer, new.id) is None
    assert 1 == shapes.delete_many(Customer, {"email": "dee@writes"})


def test_bulk_takes_operations_of_several_models(shapes):
    product = Product(name="Bulk", price=Decimal(1))
    reviews = [Review(product_id=product.id, rating=n) for n in (1, 2, 3)]
    done = shapes.bulk(
        [
            treadle.Insert(product),
            *map(treadle.Insert, reviews),
            treadle.Update(Review, reviews[0].id, {"$set": {"rating": 5}}),
            treadle.UpdateMany(Review, {"product_id": product.id}, {"$set": {"text": "x"}}),
            treadle.Replace(reviews[1]),
            treadle.Delete(Review, reviews[2].id),
            treadle.DeleteMany(Review, {"product_id": ObjectId()}),
            treadle.Upsert(Shelf, {"code": "b"}, {"$set": {"name": "B"}}, insert=Shelf(code="b", name="new")),
        ]
    )
    assert treadle.Bulk(inserted=5, updated=5, deleted=1) == done
    assert (2, 14) == (
        (stored := shapes.get(Product, product.id)).review_summary.total_count,
        stored.rating_total,
    )
    with pytest.raises(treadle.BulkFailed) as failed:
        shapes.insert_many([Shelf(code=code, name="") for code in ("x", "b", "y")], ordered=False)
    (failure,) = failed.value.failures
    assert (1, "duplicate-key") == (failure.position, failure.code)
    assert failure.reason
    assert 2 == shapes.count(Shelf, {"code": {"$in": ["x", "y"]}})
    with pytest.raises(treadle.DuplicateKey):
        shapes.insert_many([Shelf(code=code, name="") for code in ("z", "b")])
    assert not shapes.exists(Shelf, {"code": "z"}), "ordered: all or nothing"


def test_transactions_commit_or_leave_nothing(shapes):
    def codes() -> list[str]:
        return sorted(shapes.distinct(Shelf, "code", {"name": "txn"}))

    with shapes.transaction() as session:
        shapes.insert(Shelf(code="t1", name="txn"))
        shapes.insert(Shelf(code="t2", name="txn"), session=session)
        other = threading.Thread(target=lambda: seen.append(codes()))
        seen: list[list[str]] = []
        other.start()
        other.join()
    assert [[]] == seen
    assert ["t1", "t2"] == codes()
    with pytest.raises(ZeroDivisionError), shapes.transaction():
        shapes.insert(Shelf(code="t3", name="txn"))
        1 / 0  # noqa: B018
    assert 7 == shapes.with_transaction(
        lambda session: (shapes.insert(Shelf(code="t4", name="txn"), session=session), 7)[1]
    )
    with shapes.collection(Shelf).database.client.start_session() as plain, plain.start_transaction():
        shapes.insert(Shelf(code="t5", name="txn"), session=plain)
    assert ["t1", "t2", "t4", "t5"] == codes()


def test_verify_repair_and_rebuild(shapes):
    loom = shapes.insert(Product(name="Verified", price=Decimal(1)))
    shapes.insert(Review(product_id=loom.id, rating=4))
    assert [] == shapes.verify(Product, Review)
    products = shapes.collection(Product)
    products.update_one({"_id": loom.id}, {"$set": {"rating_total": 99}})
    assert [treadle.Finding("computed", "Product", loom.id, "rating_total", 99, 8)] == shapes.verify(Product)
    (kept,) = shapes.findings()
    assert ("Product", "Product.rating_total", loom.id) == (kept.model, kept.rule, kept.document_id)
    assert (1, 0) == (shapes.repair(Product), shapes.repair(Product))
    products.update_one({"_id": loom.id}, {"$set": {"rating_total": 99}})
    seen: list[treadle.Progress] = []
    assert isinstance(shapes.rebuild(Product, throttle="gentle", progress=seen.append), int)
    assert 8 == shapes.get(Product, loom.id).rating_total
    assert "Product" == seen[-1].model
    job = shapes.jobs()[0]
    assert {"rebuild", "repair", "verify"} >= {job.kind}
    assert "Product" in job.models


def test_stream_schedule_status_and_pause(shapes):
    badge = shapes.insert(Badge(owner="ann"))
    worker = shapes.worker()
    worker.run_until_idle()
    shapes.collection(Award).insert_one({"owner": "ann", "at": NOON})
    assert isinstance(worker.run_until_idle(), int)
    assert 1 == shapes.get(Badge, badge.id).awards
    assert (0, 0) == (worker.lag().events, int(worker.lag().seconds))
    (ran, *_) = [each for each in shapes.run_due(now=datetime.now(UTC)) if each.model == "AwardsPerHour"]
    assert ran.error is None
    assert {"_id": NOON, "number": 1} == raw(shapes, AwardsPerHour, NOON)
    rules = {rule.rule: rule for rule in shapes.status().rules}
    states = {"building", "following", "paused", "behind", "failed"}
    assert states >= {rule.state for rule in rules.values()}
    stream, schedule, write = (
        rules[name] for name in ("Badge.awards", "AwardsPerHour.number", "Product.rating_total")
    )
    assert ("stream", "schedule", "write") == (stream.mode, schedule.mode, write.mode)
    assert stream.headroom > 0
    assert 0 == stream.lag_events
    assert isinstance(stream.lag_seconds, float)
    assert (True, False) == (shapes.pause("Badge.awards"), shapes.pause("Badge.awards"))
    shapes.collection(Award).insert_one({"owner": "ann", "at": NOON})
    worker.run_until_idle()
    assert 1 == shapes.get(Badge, badge.id).awards
    assert shapes.resume("Badge.awards") in ("behind", "building")
    worker.run_until_idle()
    assert 2 == shapes.get(Badge, badge.id).awards, "resuming catches up"
    assert [] == shapes.set_aside() == shapes.set_aside("Badge.awards")


def test_array_handle(shapes):
    fan = shapes.insert(User())
    array = shapes.array(User, "followers", fan.id)
    assert array.append(1) is True
    assert 5 == array.extend([2, 3, 4, 5, 1])
    assert (True, False, 6) == (array.contains(5), array.contains(9), array.count())
    assert ([1, 2], [5, 1], []) == (array.page(1, 2), array.page(3, 2), array.page(4, 2))
    assert [1, 2, 3, 4, 5, 1] == list(array)
    assert (2, 0) == (array.remove(1), array.remove(1))
    posts = shapes.array(ForumThread, "open_posts", shapes.insert(ForumThread()).id)
    assert (True, False, 1) == (posts.append("a"), posts.append("a"), posts.ignored)


def test_counter_handle(shapes):
    page = shapes.insert(WebPage())
    with shapes.counter(WebPage, "approximate_metrics.view_count") as views:
        views.add(page.id)
        views.add_many({page.id: 1})
        assert {page.id: 2} == views.pending()
        assert (0, 2, None) == (views.read(page.id), views.read(page.id, exact=True), views.read(ObjectId()))
        views.flush()
        assert {} == views.pending()
        gone = ObjectId()
        views.add(gone)
        assert gone in views.flush().unknown


def test_tree_handle(shapes):
    tree = shapes.tree(Category)
    for node, parent in [("r", None), ("r1", "r"), ("r2", "r"), ("r11", "r1"), ("r111", "r11")]:
        tree.insert(Category(id=node), parent=parent)

    def ids(nodes: Any) -> list[str]:
        return [node.id for node in nodes]

    assert "r" in ids(tree.roots())
    assert ["r1", "r2"] == ids(tree.children("r", sort="_id")) == sorted(ids(tree.descendants("r", 1)))
    assert {"r1", "r2", "r11", "r111"} == set(ids(tree.descendants("r")))
    assert (["r", "r1"], ["r", "r1", "r11"]) == (ids(tree.ancestors("r11")), ids(tree.path("r11")))
    assert (0, 2, 4) == (tree.depth("r"), tree.depth("r11"), tree.count("r"))
    assert (None, "r1") == (tree.parent("r"), tree.parent("r11").id)
    nested = tree.nested("r", sort="_id")
    assert ("r", ["r1", "r2"]) == (nested.node.id, [each.node.id for each in nested.children])
    assert ["r", "r2"] == tree.move("r11", "r2").ancestors
    assert ["r", "r2", "r11"] == shapes.get(Category, "r111").ancestors
    assert 1 == tree.remove("r11", children="lift")
    assert "r2" == shapes.get(Category, "r111").parent_id
    assert 2 == tree.remove("r2", children="subtree")


def test_bucket_calls(shapes):
    stored = shapes.insert_many(readings("calls", 1, 2, 70))
    assert 3 == shapes.count(Reading, {"sensor_id": "calls"})
    assert stored == shapes.find(Reading, {"sensor_id": "calls"}, sort="ts").to_list()
    first, second = shapes.summary(Reading, "calls", NOON, NOON + timedelta(hours=2))
    assert (NOON, LAST_INSTANT, 2) == (first.start, first.end, first.count)
    assert treadle.FieldSummary(1.0, 2.0, 3.0, 1.5) == first.stats["temp"]
    assert 1 == second.count
    assert [(NOON + timedelta(minutes=1), 1.0)] == shapes.readings(
        Reading, "calls", NOON, NOON + timedelta(minutes=2), fields=["temp"]
    )
    assert [{"n": 3}] == list(
        shapes.aggregate(Reading, [{"$match": {"sensor_id": "calls"}}, {"$count": "n"}])
    )
    metric = Metric(site="south", sensor=1, unit="W", ts=NOON, value=4)
    kept = shapes.insert_many([metric, metric.model_copy()])
    assert (1, 1) == (len(kept), kept.duplicates)


def test_history_calls(shapes):
    shapes.insert(Policy(id=7, premium=1))
    shapes.update(Policy, 7, {"$set": {"premium": 2}})
    now, before = shapes.history(Policy, 7).to_list()
    assert (2, 2, None) == (now.revision, now.document.premium, now.valid_to)
    assert (1, 1, now.valid_from) == (before.revision, before.document.premium, before.valid_to)
    assert 1 == shapes.at(Policy, 7, before.valid_from).premium
    assert shapes.at(Policy, 7, before.valid_from - timedelta(seconds=1)) is None
    assert [1] == [each.premium for each in shapes.find_at(Policy, {"_id": 7}, before.valid_from)]
    assert 1 == shapes.revert(Policy, 7, 1).premium
    with shapes.transaction():
        shapes.update(Policy, 7, {"$set": {"premium": 5}})
        shapes.update(Policy, 7, {"$set": {"premium": 6}})
    assert [6, 1, 2, 1] == [state.document.premium for state in shapes.history(Policy, 7)]


def test_revision_counts_writes_of_callers(shapes):
    first = shapes.insert(Policy(id=8, premium=1))
    changed = shapes.change(first, premium=2)
    assert changed.revision == first.revision + 1
    with pytest.raises(treadle.Conflict):
        shapes.replace(first)
    with pytest.raises(treadle.Conflict):
        shapes.change(first, premium=3)


def test_replace_keeps_derived_values(shapes):
    loom = shapes.insert(Product(name="Kept", price=Decimal(1)))
    shapes.insert(Review(product_id=loom.id, rating=4))
    assert 8 == shapes.replace(loom.model_copy(update={"name": "New"})).rating_total


def test_change_kind(shapes):
    shapes.insert(Book(id="kind"))
    assert Electronics(id="kind", brand="x") == shapes.change_kind(
        Electronics(id="kind", brand="x"), was=Book
    )
    assert "electronics" == raw(shapes, Item, "kind")["type"]


def test_invalid_documents_can_be_skipped(shapes):
    employees = shapes.collection(Employee)
    employees.insert_one({"_id": "bad", "manager": ["x"]}, bypass_document_validation=True)
    results = shapes.find(Employee, {"_id": "bad"}, invalid="skip")
    assert [] == results.to_list()
    assert ["document-invalid"] == [error.code for error in results.invalid]
    employees.delete_one({"_id": "bad"})


def test_async_store_is_the_same_with_await(shapes, server):
    async def calls() -> None:
        name = shapes.collection(Shelf).database.name
        async with AsyncMongoClient(server.uri) as client, AsyncStore(client[name], SHAPES) as store:
            async with store.transaction():
                shelf = await store.insert(Shelf(code="async", name="a"))
            assert shelf == await store.get(Shelf, shelf.id)
            assert [shelf] == [each async for each in store.find(Shelf, {"code": "async"})]
            assert [shelf] == await store.find(Shelf, {"code": "async"}).to_list()
            assert [shelf] == (await store.page(Shelf, {"code": "async"})).items
            user = await store.insert(User())
            array = store.array(User, "followers", user.id)
            assert 4 == await array.extend(range(4))
            assert [0, 1, 2, 3] == [each async for each in array]
            async with store.counter(Visit, "hits") as hits:
                await hits.add("async")
            assert 1 == (await store.require(Visit, {"page_id": "async"})).hits
            await store.tree(Category).insert(Category(id="async"))
            assert ["async"] == [node.id for node in await store.tree(Category).path("async")]
            assert [] == await store.verify(Shelf)

    asyncio.run(calls())


# -- errors: the code, the class, and the call that raises it --


def a_customer(store: Store) -> Customer:
    return store.insert(Customer(name="E", email=f"{uuid.uuid4().hex}@errors"))


def two_equal_emails(store: Store) -> None:
    store.insert(Customer(name="F", email=a_customer(store).email))


def a_restricted_shelf(store: Store) -> None:
    shelf = store.insert(Shelf(code=uuid.uuid4().hex, name=""))
    store.insert(Article(shelf=ShelfCard(_id=shelf.id)))
    store.delete(Shelf, shelf.id)


def an_archived_sale(store: Store) -> None:
    sale = store.insert(Sale(product="errors", at=NOON - timedelta(days=900), amount=Decimal(1)))
    store.archive(Sale, now=NOON)
    store.update(Sale, sale.id, {"$set": {"amount": 2}})


def a_policy_read_before(store: Store) -> None:
    policy = store.insert(Policy(id=99, premium=1))
    store.update(Policy, 99, {"$set": {"premium": 2}})
    store.replace(policy)


def a_family(store: Store) -> Any:
    tree = store.tree(Employee)
    if not store.exists(Employee, {"_id": "e1"}):
        tree.insert(Employee(id="e1"))
        tree.insert(Employee(id="e2"), parent="e1")
    return tree


def a_bulk_with_a_duplicate(store: Store) -> None:
    email = a_customer(store).email
    store.insert_many([Customer(name="G", email=email)], ordered=False)


SET = {"$set": {"name": "x"}}
Call = Callable[[Store], Any]
CALLS: list[tuple[str, type[Exception], Call]] = [
    ("document-missing", treadle.NotFound, lambda s: s.require(Customer, ObjectId())),
    ("document-gone", treadle.DataError, lambda s: s.replace(Customer(name="x", email="none@errors"))),
    ("document-changed", treadle.Conflict, a_policy_read_before),
    ("duplicate-key", treadle.DuplicateKey, two_equal_emails),
    ("bulk-failed", treadle.BulkFailed, a_bulk_with_a_duplicate),
    ("field-unknown", treadle.UsageError, lambda s: s.find(Customer, {"nmae": 1}).to_list()),
    ("field-unknown", treadle.UsageError, lambda s: s.find(Customer, sort="nmae").to_list()),
    ("field-unknown", treadle.UsageError, lambda s: s.update_many(Customer, {}, {"$set": {"nmae": 1}})),
    ("field-maintained", treadle.UsageError, lambda s: s.update_many(Product, {}, {"$set": {"worst": 1}})),
    ("field-maintained", treadle.UsageError, lambda s: s.update_many(User, {}, {"$inc": {"follower_count": 1}})),
    ("upsert-not-unique", treadle.UsageError,
     lambda s: s.upsert(Customer, {"name": "x"}, SET, insert=Customer(name="x", email="u@errors"))),
    ("update-invalid", treadle.UsageError, lambda s: s.update_many(Customer, {}, {"name": "x"})),
    ("document-invalid", treadle.UsageError, lambda s: s.update_many(Customer, {}, {"$set": {"tier": "tin"}})),
    ("id-invalid", treadle.UsageError, lambda s: s.get(Customer, "no id")),
    ("page-token-invalid", treadle.UsageError, lambda s: s.page(Customer, after="nonsense")),
    ("page-token-invalid", treadle.UsageError,
     lambda s: s.page(Customer, sort="-name", after=s.page(Customer, sort="name", size=1).next)),
    ("operator-forbidden", treadle.UsageError, lambda s: list(s.aggregate(Customer, [{"$out": "x"}]))),
    ("decimal-too-long", treadle.UsageError,
     lambda s: s.update_many(Product, {}, {"$set": {"price": Decimal("1." + "1" * 34)}})),
    ("reference-restricted", treadle.DataError, a_restricted_shelf),
    ("document-archived", treadle.UsageError, an_archived_sale),
    ("model-unknown", treadle.UsageError, lambda s: s.find(Stranger).to_list()),
    ("array-unknown", treadle.UsageError, lambda s: s.array(User, "name", ObjectId())),
    ("array-owner-missing", treadle.DataError, lambda s: s.array(User, "followers", ObjectId()).append(1)),
    ("counter-unknown", treadle.UsageError, lambda s: s.counter(User, "name")),
    ("archive-undeclared", treadle.UsageError, lambda s: s.archive(Customer)),
    ("history-undeclared", treadle.UsageError, lambda s: s.history(Customer, ObjectId()).to_list()),
    ("links-undeclared", treadle.UsageError, lambda s: s.related(Customer, ObjectId()).to_list()),
    ("soft-delete-undeclared", treadle.UsageError, lambda s: s.purge(Customer)),
    ("tree-undeclared", treadle.UsageError, lambda s: s.tree(Customer)),
    ("layout-missing", treadle.UsageError, lambda s: s.summary(Customer, "s1")),
    ("tree-has-children", treadle.DataError, lambda s: a_family(s).remove("e1")),
    ("tree-cycle", treadle.UsageError, lambda s: a_family(s).move("e1", "e2")),
    ("tree-node-missing", treadle.DataError, lambda s: a_family(s).depth("none")),
    ("tree-parent-missing", treadle.DataError, lambda s: a_family(s).insert(Employee(id="e3"), parent="none")),
    ("revision-unknown", treadle.UsageError, lambda s: s.revert(Policy, 98, 3)),
    ("rule-unknown", treadle.UsageError, lambda s: s.pause("Customer.name")),
    ("set-aside-unknown", treadle.UsageError, lambda s: s.retry("nothing")),
    ("throttle-invalid", treadle.UsageError, lambda s: s.rebuild(Customer, throttle="fast")),
    ("database-missing", treadle.UsageError, lambda s: Store.open("mongodb://127.0.0.1:1/", [Customer])),
    ("uri-invalid", treadle.UsageError, lambda s: Store.open("nonsense", [Customer])),
    ("timeout-invalid", treadle.UsageError,
     lambda s: Store(s.collection(Customer).database, [Customer], timeout=0)),
]  # fmt: skip


class Stranger(Document, collection="strangers"):
    name: str


def assert_error(error: BaseException, code: str, kind: type[Exception]) -> None:
    assert isinstance(error, kind)
    assert code == error.code
    assert str(error).endswith(code)


@pytest.mark.parametrize(("code", "kind", "call"), CALLS, ids=[f"{n}-{c[0]}" for n, c in enumerate(CALLS)])
def test_what_a_call_refuses(shapes, code, kind, call):
    with pytest.raises(treadle.TreadleError) as raised:
        call(shapes)
    assert_error(raised.value, code, kind)


def test_what_errors_carry(shapes):
    with pytest.raises(treadle.DuplicateKey) as taken:
        two_equal_emails(shapes)
    assert ("email_1", ["email"], 11000) == (
        taken.value.index, list(taken.value.fields), taken.value.details["code"],
    )  # fmt: skip
    with pytest.raises(treadle.UsageError, match="did you mean 'name'"):
        shapes.find(Customer, {"nmae": 1}).to_list()
    assert [] == shapes.find(Customer, treadle.Unchecked({"nmae": 1})).to_list()
    ada = a_customer(shapes)
    with pytest.raises(treadle.UsageError):
        shapes.update(Customer, ada.id, {"$set": {"name": "new", "tier": "tin"}})
    assert ada == shapes.get(Customer, ada.id), "a refused update has changed nothing"


# -- declarations that are refused when the Store is made, without a server --

OLD: dict[str, Any] = {"by": "at", "after": timedelta(days=1), "into": "old"}
AT = {"at": datetime}


class MisspeltCard(BaseModel):
    nmae: str


def count_of(by: str) -> dict[str, Any]:
    return {"reviews": (Annotated[int, Count(Review, by=by)], 0)}


CARD = Annotated[MisspeltCard | None, ExtendedReference(Customer, by="customer_id")]
COUNTER = {"views": (Annotated[int, Approximate()], 0)}
OUTLIER = {"fans": (Annotated[list[int], Outlier(limit=3, overflow="more")], [])}
PARENT = {"parent": (Id | None, None)}
TOTAL = {"thing_id": Id, "total": (Annotated[int, Sum("Thing", "total", by="thing_id")], 0)}
FORMULA = {"double": (Annotated[int | None, Formula({"$multiply": ["$prise", 2]})], None), "price": int}
EXPRESSION = {"sum": (Annotated[int, Sum(Review, {"$add": ["$ratng", 2]}, by="product_id")], 0)}
REFUSED: dict[str, tuple[str, Callable[[], list[type[Any]]]]] = {
    # The pairs of features that do not go together:
    "archive with tree": ("archive-declaration",
        lambda: [thing(AT | PARENT, archive=Archive(**OLD), tree=ParentReference("parent"))]),
    "archive with outlier": ("archive-declaration", lambda: [thing(AT | OUTLIER, archive=Archive(**OLD))]),
    "archive with counter": ("archive-declaration", lambda: [thing(AT | COUNTER, archive=Archive(**OLD))]),
    "archive with links": ("links-declaration",
        lambda: [thing(AT | {"links": (list[Id], [])}, archive=Archive(**OLD), links=Links("links"))]),
    "uncounted archive with history": ("archive-declaration",
        lambda: [thing(AT, archive=Archive(**OLD, counted=False), history=History())]),
    "counter with a nested id": ("counter-key", lambda: [thing(COUNTER | {"id": ReviewCard})]),
    # Mistakes of one declaration:
    "misspelt card": ("embedded-field-missing",
        lambda: [Customer, thing({"customer_id": Id, "card": (CARD, None)})]),
    "unknown by": ("reference-field-missing", lambda: [Review, thing(count_of("thing_id"))]),
    "source not given": ("source-unknown", lambda: [thing(count_of("product_id"))]),
    "missing migration": ("migration-missing", lambda: [thing(version=2)]),
    "shared collection": ("collection-shared", lambda: [Customer, thing(collection="customers")]),
    "models with one class name": ("model-name-shared", lambda: [thing(), thing(collection="other")]),
    "misspelt formula": ("field-unknown", lambda: [thing(FORMULA)]),
    "misspelt expression": ("field-unknown", lambda: [Review, thing(EXPRESSION)]),
    "own collection": ("collection-name-invalid", lambda: [thing(collection="treadle.things")]),
    "bucket without an end": ("bucket-declaration",
        lambda: [thing(AT | {"key": str}, bucket=Bucket(key="key", time="at"))]),
    "cycle": ("maintenance-cycle", lambda: [thing(TOTAL)]),
}  # fmt: skip


def refusal(models: Callable[[], list[type[Any]]]) -> treadle.TreadleError:
    """The error by which a Store of these models is refused; no server is asked."""
    client: MongoClient[dict[str, Any]] = MongoClient("mongodb://127.0.0.1:1", connect=False)
    with pytest.raises(treadle.DeclarationError) as raised:
        Store(client["shop"], models())
    return raised.value


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_declaration_refuses(name):
    code, models = REFUSED[name]
    assert_error(refusal(models), code, treadle.DeclarationError)


# -- the command line --

VERBS = """
demo doctor scan explain decide setup teardown verify repair rebuild watch run-due migrate archive status pause resume
set-aside serve record trial plan apply prove undo
"""


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the `treadle` command in this process: its exit code, output and error output."""
    (script,) = entry_points(group="console_scripts", name="treadle")
    main = script.load()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MONGODB_URI", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


APPLICATION = """
from pymongo import MongoClient
from tests.test_contract import COMMANDED
from treadle import Store
store = Store(MongoClient({uri!r}, tz_aware=True)[{name!r}], COMMANDED)
"""
COMMANDED: list[type[Any]] = [Review, Product, Sale, DailySales, Account, Badge, Award, AwardsPerHour]


@pytest.fixture(scope="module")
def app(server, tmp_path_factory) -> Iterator[Any]:
    """A database of its own, and an application for verbs that take --app."""
    folder = tmp_path_factory.mktemp("contract")
    name = f"test_{uuid.uuid4().hex[:12]}"
    (folder / "contract_application.py").write_text(APPLICATION.format(uri=server.uri, name=name))
    with pytest.MonkeyPatch.context() as patch, MongoClient(server.uri) as client:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)]))
        patch.setenv("TREADLE_APP", "contract_application:store")
        with Store(client[name], COMMANDED) as store:
            store.setup()
            yield store
        client.drop_database(name)


def test_the_verbs(command):
    code, output, _ = command("--help")
    assert 0 == code
    listed = {line.split()[0] for line in output.partition("Commands:")[2].splitlines() if line.strip()}
    assert set(VERBS.split()) <= listed
    for group, verbs in {"migrate": "status run rollback", "set-aside": "list retry discard"}.items():
        text = command(group, "--help")[1]
        assert all(f"  {verb} " in text for verb in verbs.split())
    options = {
        "serve": "--app --host --port --token --read-only",
        "verify": "--app --sample --since --resume --throttle --json",
        "scan": "--uri --fail-on --json --html",
        "record": "-o --seconds",
        "trial": "--workload --only --documents",
        "plan": "--workload -o",
        "apply": "--dry-run",
    }
    for verb, names in options.items():
        text = command(verb, "--help")[1]
        assert "Example:" in text
        assert all(f"{name} " in text.replace(",", " ") for name in names.split()), verb


FINDING = "pattern model document_id path stored expected"
RAN = "name pattern model rules at whole why written removed seconds error"
RULE = """rule pattern model maintain mode state every_seconds lag_seconds lag_events headroom headroom_of
headroom_low paused_at set_aside dirty last_run last_seconds next_run outcome whole why findings verified_at"""
MIGRATED = "model to migrated remaining finished set_aside samples"


def test_verbs_on_an_application(command, app):
    def listing(*arguments: str, code: int = 0) -> Any:
        actual, output, errors = command(*arguments, "--json")
        assert code == actual, errors
        return json.loads(output)

    def keys(row: Any, names: str) -> bool:
        return set(names.split()) <= set(row)

    app.collection(Review).drop_indexes()
    assert keys(listing("setup", "--dry-run")[0], "what collection detail")
    assert listing("setup")
    assert [] == listing("setup")
    loom = app.insert(Product(name="Loom", price=Decimal(1)))
    app.insert(Review(product_id=loom.id, rating=4))
    app.insert(Award(owner="ann"))
    app.insert(Sale(product="old", at=NOON - timedelta(days=4000), amount=Decimal(1)))
    app.collection(Account).insert_one({"_id": 1, "name": "Ada Lovelace"})

    assert [] == listing("verify", "Product")
    app.collection(Product).update_one({"_id": loom.id}, {"$set": {"worst": 9}})
    (finding,) = listing("verify", code=1)
    assert keys(finding, FINDING)
    assert ["Product", "worst", 9, 4] == [finding[key] for key in ("model", "path", "stored", "expected")]
    assert [1] == list(listing("repair").values())
    assert [] == listing("verify")
    assert ["rebuilt"] == list(listing("rebuild", "Product"))
    assert 4 == app.get(Product, loom.id).worst

    assert keys(listing("run-due", "--dry-run")[0], RAN)
    assert "AwardsPerHour" in {run["model"] for run in listing("run-due")}
    status = listing("status")
    assert keys(status, "rules worker set_aside")
    assert all(keys(rule, RULE) for rule in status["rules"])
    assert listing("archive", "Sale")
    assert 1 == app.collection(Sale).database["sales_archive"].count_documents({})
    (account,) = listing("migrate", "status")
    assert keys(account, "model version versions set_aside")
    (done,) = listing("migrate", "run")
    assert keys(done, MIGRATED)
    assert {2: 1} == app.migration_status(Account)
    assert keys(listing("migrate", "rollback", "--to", "1")[0], MIGRATED)
    assert {1: 1} == app.migration_status(Account)
    assert [] == listing("set-aside", "list")
    assert 0 == command("pause", "Badge.awards")[0]
    assert "paused" in {rule.state for rule in app.status().rules}
    assert 0 == command("resume", "Badge.awards")[0]
    assert "paused" not in {rule.state for rule in app.status().rules}


def test_verbs_on_a_database(command, server, app):
    base, _, options = server.uri.partition("?")
    uri = f"{base}{app.collection(Product).database.name}?{options}"
    code, output, _ = command("doctor", uri, "--json")
    report = json.loads(output)
    assert {"hosts", "source", "database", "status", "checks"} <= set(report)
    assert all({"name", "status", "value", "advice", "details"} <= set(each) for each in report["checks"])
    assert code == (report["status"] == "problem")
    code, output, _ = command("scan", uri, "--json")
    assert 0 == code
    assert "findings" in json.loads(output)
    code, output, _ = command("decide", "--children-max", "500", "--child-bytes", "300", "--json")
    assert 0 == code
    assert json.loads(output)


def test_exit_codes(command, app):
    assert 2 == command("nonsense")[0]
    assert 2 == command("verify", "Nonsense")[0]
    assert 2 == command("explain", "no-such-code")[0]
    code, _, errors = command("doctor", "mongodb://user:secret@127.0.0.1:1/shop?serverSelectionTimeoutMS=200")
    assert 3 == code
    assert "secret" not in errors


def test_every_code_is_documented_and_explained(command):
    headings = set((ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines())
    codes = {code for code, *_ in CALLS} | {code for code, _ in REFUSED.values()} | {"partly-done"}
    assert set() == {code for code in codes if f"## `{code}`" not in headings}
    for code in ("document-changed", "outlier"):
        exit_code, output, _ = command("explain", code)
        assert 0 == exit_code
        assert code in output


# -- the dashboard, FastAPI, the private server and the fixtures --

SERVE = """
import sys
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="treadle")
sys.exit(script.load()(["serve", "--port", "0", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def dashboard(app) -> Iterator[str]:
    """`treadle serve` in a process of its own: its address."""
    arguments = [sys.executable, "-c", SERVE, "--interval", "0.2"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            words = process.stderr.readline().split()
            address = next(word for word in words if word.startswith("http")).rstrip(";/") + "/"
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)


def answer(address: str) -> tuple[int, str]:
    """Status and text; a 503 before the first reading of the database is waited for."""
    for _ in range(150):
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != 503 or address.endswith("readyz"):
                return error.code, error.read().decode()
        time.sleep(0.2)
    return 503, ""


def test_pages_and_json_of_the_dashboard(dashboard):
    for path in ("", "set-aside", "verify", "jobs", "rules/Product.worst", "healthz"):
        assert 200 == answer(dashboard + path)[0], path
    for path in ("status", "rules", "set-aside", "jobs", "findings"):
        code, text = answer(f"{dashboard}api/{path}")
        assert 200 == code
        assert path not in ("status", "rules") or "Product.worst" in json.dumps(json.loads(text))
    assert 404 == answer(dashboard + "nonsense")[0]
    assert answer(dashboard + "readyz")[0] in (200, 503)
    code, text = answer(dashboard + "metrics")
    assert 200 == code
    assert "# TYPE treadle_" in text


def test_actions_of_the_dashboard_need_their_token(dashboard, app):
    request = urllib.request.Request(f"{dashboard}rules/Badge.awards/pause", data=b"", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code in (400, 403)
    assert "paused" not in {rule.state for rule in app.status().rules}


def test_fastapi_answers_with_the_status_and_code_of_errors(server, app):
    import fastapi
    from fastapi.testclient import TestClient

    import treadle.fastapi as extension

    base, _, options = server.uri.partition("?")
    uri = f"{base}{app.collection(Product).database.name}?{options}"
    api = fastapi.FastAPI(lifespan=extension.lifespan(lambda: AsyncStore.open(uri, COMMANDED)))
    extension.add_error_handlers(api)

    async def read(request: fastapi.Request) -> Any:
        return await extension.current_store(request).require(Account, 12)

    api.add_route("/account", read)
    with TestClient(api) as http:
        response = http.get("/account")
    assert 404 == response.status_code
    assert "document-missing" == response.json()["code"]
    assert 409 == extension.status_of(treadle.Conflict("Account", 1))


def test_a_private_server_of_its_own(tmp_path):
    with Store.local([Shelf], path=tmp_path) as store:
        store.setup()
        shelf = store.insert(Shelf(code="local", name="l"))
        assert shelf == store.get(Shelf, shelf.id)
    assert_takes(treadle.server.start, "path=None, *, parameters=..., arguments=(), mongod=None")


class TestFixtures:
    """The fixtures of the plugin `treadle.testing`."""

    @pytest.fixture
    def models(self) -> list[type[Any]]:
        return [Shelf]

    def test_a_store_that_is_set_up(self, store, uri, database, client, server):
        assert [] == store.setup()
        store.insert(Shelf(code="f", name="f"))
        with Store.open(uri, [Shelf], appname="contract") as other:
            assert 1 == other.count(Shelf) == database["shelves"].count_documents({})
        assert client.address == database.client.address
        assert server.uri.startswith("mongodb://")

    def test_an_async_store_that_is_set_up(self, async_store):
        async def count() -> int:
            async with async_store as store:
                return await store.count(Shelf)

        assert 0 == asyncio.run(count())


# -- of the contract, and not in the code yet: each names the issue that adds it --


def missing(issue: int, what: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=f"issue {issue}: {what}")


class Contact(Document, collection="contacts", version=2):
    id: int
    tel: str = ""


migration(Contact, from_version=1, up=[{"$set": {"tel": "$phone"}}, {"$unset": "phone"}])


@pytest.fixture
def contacts(database) -> Store:
    store = Store(database, [Contact])
    store.setup()
    database["contacts"].insert_many([{"_id": 1, "phone": "1"}, {"_id": 2, "schema_version": 2, "tel": "2"}])
    return store


def test_filters_find_outdated_documents(contacts):
    assert [1] == [each.id for each in contacts.find(Contact, {"tel": "1"})]
    assert 1 == contacts.update_many(Contact, {"tel": "1"}, {"$set": {"tel": "3"}})


def test_sorts_by_a_changed_field_are_refused(contacts):
    with pytest.raises(treadle.UsageError):
        contacts.find(Contact, sort="tel").to_list()


def test_migrations_name_their_fields():
    assert "fields" in inspect.signature(migration).parameters


def kind_with_a_version() -> list[type[Any]]:
    base = thing(discriminator="type")
    return [create_model("Kind", __base__=base, __cls_kwargs__={"kind": "a", "version": 1})]


LATER: list[Any] = [
    pytest.param(kind_with_a_version, "declare it on the base"),
]


@pytest.mark.parametrize(("models", "says"), LATER)
def test_what_a_declaration_will_refuse(models, says):
    assert says.replace("'", "") in str(refusal(models)).replace("'", "").replace("$", "")


def test_a_missing_unique_index_refuses_writes(database):
    with pytest.raises(treadle.TreadleError) as raised:
        Store(database, [Shelf]).insert(Shelf(code="a", name="a"))
    assert "index-missing" == raised.value.code


def test_with_transaction_joins_calls_without_a_session(shapes):
    def work(session: Any) -> None:
        shapes.insert(Shelf(code="joined", name="x"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shapes.with_transaction(work)
    assert not shapes.exists(Shelf, {"code": "joined"})


@missing(2, "a deadline that passed is TimedOut, never a raw driver error")
def test_a_deadline_that_passed(shapes):
    hurried = Store(shapes.collection(Shelf).database, [Shelf], timeout=0.000_001)
    with pytest.raises(treadle.TimedOut):
        hurried.count(Shelf)


def test_write_versions_with_derived_values(database):
    class Team(Document, collection="teams"):
        id: str
        members: Annotated[int, Count("Member", by="group")] = 0

    class Member(Document, collection="members", version=2):
        id: int
        group: str

    @migration(Member, from_version=1)
    def rename(document: dict[str, Any]) -> dict[str, Any]:
        document["group"] = document.pop("team")
        return document

    @rename.down
    def back(document: dict[str, Any]) -> dict[str, Any]:
        document["team"] = document.pop("group")
        return document

    store = Store(database, [Team, Member], write_versions={Member: 1})
    store.setup()
    store.insert(Team(id="a"))
    store.insert(Member(id=1, group="a"))
    assert {"_id": 1, "team": "a", "schema_version": 1} == raw(store, Member, 1)
    assert 1 == store.get(Team, "a").members
    store.update(Member, 1, {"$set": {"group": "b"}})
    assert 0 == store.get(Team, "a").members
    assert [] == store.verify()


def test_child_references_have_an_order(shapes):
    tree = shapes.tree(Folder)
    tree.insert(Folder(id="ordered"))
    for node in ("o1", "o2", "o3"):
        tree.insert(Folder(id=node), parent="ordered", at=0)
    assert ["o3", "o2", "o1"] == shapes.get(Folder, "ordered").children
    tree.move("o1", "ordered", at=0)
    assert ["o1", "o3", "o2"] == shapes.get(Folder, "ordered").children


@missing(4, "treadle jobs")
def test_the_verb_jobs(command, app):
    app.verify(Review)
    code, output, _ = command("jobs", "--json")
    assert 0 == code
    assert "verify" in {job["kind"] for job in json.loads(output)}


@missing(4, "/graph, a page of its own")
def test_the_page_with_the_graph(dashboard):
    assert 200 == answer(dashboard + "graph")[0]


@missing(4, "metrics say whether the database answers")
def test_metrics_say_whether_the_database_answers(dashboard):
    assert "treadle_up" in answer(dashboard + "metrics")[1]


@missing(4, "status names all workers, leader and standbys")
def test_status_names_all_workers(shapes):
    assert isinstance(shapes.status().workers, list)


def test_teardown(database):
    store = Store(database, [Customer, Shelf, Article])
    store.setup()
    assert_takes(Store.teardown, "*models, dry_run=False, fields=False")
    would = store.teardown(dry_run=True)
    assert would == store.teardown()
    assert "code_1" not in store.collection(Shelf).index_information()
    assert store.setup()


def test_the_verb_teardown(command, app):
    assert 0 == command("teardown", "--dry-run", "--json")[0]


def test_repair_reports_what_it_repaired(command, app):
    assert "repaired" in command("repair", "Review")[1].lower()


@missing(7, "after_commit")
def test_after_commit(shapes):
    called: list[str] = []
    with shapes.transaction():
        shapes.after_commit(lambda: called.append("committed"))
        assert [] == called
    with contextlib.suppress(ZeroDivisionError), shapes.transaction():
        shapes.after_commit(lambda: called.append("rolled back"))
        raise ZeroDivisionError
    assert ["committed"] == called
