"""What every pattern must satisfy, whatever it does.

A pattern is one file or folder in `src/treadle/patterns/`, one test, one page
of documentation and one exported name. Each test here names the piece that is
missing. The behaviour that all share is tried on the models in `SAMPLES`: add
some when you add a pattern.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel
from pymongo import IndexModel

import treadle
import treadle.patterns
from tests import outside
from treadle import Document, Id
from treadle.graph.declarations import declarations
from treadle.graph.graph import Graph
from treadle.graph.rule import Pattern, Rule
from treadle.patterns.approximation.declaration import Approximate
from treadle.patterns.archive.rule import Archive
from treadle.patterns.attributes import Attributes
from treadle.patterns.bucket.declaration import Bucket, TimeSeries
from treadle.patterns.computed import Average, Collect, Count, Formula, Max, Min, Sum
from treadle.patterns.extended_reference import ExtendedReference
from treadle.patterns.history.rule import History
from treadle.patterns.links import Links
from treadle.patterns.outlier.declaration import Outlier
from treadle.patterns.rollup import Day, Rollup
from treadle.patterns.subset import Subset

# From their own files, so that a missing export is named by a test and not by a failed import.
from treadle.patterns.tree.declarations import (
    AncestorArray,
    ChildReferences,
    MaterializedPath,
    ParentReference,
)
from treadle.plan.capabilities import EVERYTHING

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "treadle"
# Patterns of the document's own shape are class keywords, and maintain nothing: they have no declarations.
SHAPES = ["polymorphic", "schema_versioning"]
MODULES = [
    importlib.import_module(each.name)
    for each in pkgutil.walk_packages(treadle.patterns.__path__, "treadle.patterns.")
]


def defined(module: ModuleType, base: type = object) -> list[type]:
    """The classes below a base that a module itself defines."""
    return [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, base) and each.__module__ == module.__name__
    ]


def name_of(pattern: str) -> str:
    """The name of a pattern in Python, from its name in findings."""
    return pattern.replace("-", "_")


def declared() -> dict[str, list[type[Pattern]]]:
    """The public declarations of each pattern; a base of several patterns is no declaration."""
    classes: dict[str, list[type[Pattern]]] = {}
    for module in MODULES:
        for each in defined(module, Pattern):
            if each.pattern and not each.__name__.startswith("_"):
                classes.setdefault(name_of(each.pattern), []).append(each)
    return classes


PATTERNS = declared()
DECLARED = sorted(PATTERNS)
# The pattern of docs/extending.md, which is no part of Treadle.
PATTERNS["slug"] = [outside.Slug]
BEHAVING = [*DECLARED, "slug"]
NAMES = sorted([*DECLARED, *SHAPES])
HEADINGS = [
    "Problem",
    "Declaration",
    "What is stored",
    "What is guaranteed",
    "How it is maintained",
    "How to adopt it on existing data",
    "When not to",
    "Cost measured",
]
# Those of the patterns, and of validation, which needs no file here.
PAGES = sorted((ROOT / "docs" / "patterns").glob("*.md"))


# -- sample models, and documents as somebody wrote them before the pattern was declared --


class Customer(Document, collection="customers"):
    name: str
    tier: str = "silver"


class CustomerCard(BaseModel):
    name: str
    tier: str


class Line(BaseModel):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", snapshot=["tier"])
    ] = None
    lines: list[Line] = []


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    price: Decimal
    date: datetime


class ReviewCard(BaseModel):
    rating: int
    date: datetime


class Product(Document, collection="products"):
    name: str
    count: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[Decimal, Sum(Review, "price", by="product_id")] = Decimal(0)
    average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None
    doubled: Annotated[int | None, Formula({"$multiply": ["$count", 2]})] = None
    ratings: Annotated[list[int], Collect(Review, "rating", by="product_id", size=3)] = []


class Shelf(Document, collection="shelves"):
    name: str
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)] = []


class Fan(Document, collection="fans"):
    idols: Annotated[list[str], Outlier(limit=3, overflow="idol_overflow", page_size=2)] = []
    idol_count: int = 0
    has_overflow: bool = False


class Article(Document, collection="articles"):
    title: str
    views: Annotated[int, Approximate(every=10)] = 0


def articles() -> dict[str, list[dict[str, Any]]]:
    return {"articles": [{"title": "old"}, {"title": "older", "views": None}]}


def fans() -> dict[str, list[dict[str, Any]]]:
    return {"fans": [{"idols": [f"idol {each}" for each in range(number)]} for number in (0, 2, 3, 9)]}


class ReviewDay(
    Document,
    collection="review_days",
    rollup=Rollup(Review, keys={"product_id": "product_id", "day": Day("date", timezone="Europe/Berlin")}),
):
    product_id: Id
    day: datetime
    count: Annotated[int, Count()] = 0
    average: Annotated[float | None, Average("rating")] = None


class Reading(
    Document,
    collection="readings",
    bucket=Bucket(key="sensor", time="ts", limit=4, stats="temp", adopt="single"),
):
    sensor: str
    ts: datetime
    temp: float


class Measurement(
    Document, collection="measurements", timeseries=TimeSeries(time="ts", key="sensor", adopt="single")
):
    sensor: str
    ts: datetime
    temp: float


def readings() -> dict[str, list[dict[str, Any]]]:
    """One document per reading, as somebody stored them before."""
    return {
        "single": [
            {"sensor": "a", "ts": datetime(2026, 1, 1, number, tzinfo=UTC), "temp": number / 2}
            for number in range(9)
        ]
    }


def orders() -> dict[str, list[dict[str, Any]]]:
    ada, ben = ObjectId(), ObjectId()
    return {
        "customers": [
            {"_id": ada, "name": "Ada", "tier": "gold"},
            {"_id": ben, "name": "Ben", "tier": "silver"},
        ],
        "orders": [
            {"customer_id": each, "lines": [{"customer_id": ada}, {"customer_id": ben}]}
            for each in (ada, ben)
        ],
    }


def reviews(targets: str) -> Callable[[], dict[str, list[dict[str, Any]]]]:
    def made() -> dict[str, list[dict[str, Any]]]:
        keys = [ObjectId() for _ in range(3)]
        return {
            targets: [{"_id": key, "name": "a"} for key in keys],
            # The last target has none.
            "reviews": [
                {
                    "product_id": key,
                    "rating": number % 5,
                    "price": Decimal128(f"{number}.10"),
                    "date": datetime(2026, 1, 1 + number, tzinfo=UTC),
                }
                for number in range(8)
                for key in keys[:2]
            ],
        }

    return made


class Category(Document, collection="categories", tree=AncestorArray(parent="up", ancestors="above")):
    name: str
    up: Id | None = None
    above: list[Id] = []


class Section(Document, collection="sections", tree=ParentReference(parent="up")):
    name: str
    up: Id | None = None


class Folder(Document, collection="folders", tree=MaterializedPath(path="path", segment="name", parent="up")):
    name: str
    up: Id | None = None
    path: str = ""


class Shelved(Document, collection="shelved", tree=ChildReferences(children="children")):
    name: str
    children: list[Id] = []


def nodes(collection: str) -> Callable[[], dict[str, list[dict[str, Any]]]]:
    """A chain of four, an orphan, and a list that names nobody."""

    def made() -> dict[str, list[dict[str, Any]]]:
        keys = [ObjectId() for _ in range(5)]
        parents = [None, *keys[:3], ObjectId()]
        documents: list[dict[str, Any]] = [
            {"_id": key, "name": f"n{number}", "up": parent}
            for number, (key, parent) in enumerate(zip(keys, parents, strict=True))
        ]
        if collection == "shelved":
            for document, child in zip(documents, [*keys[1:4], ObjectId(), ObjectId()], strict=True):
                del document["up"]
                document["children"] = [child]
        return {collection: documents}

    return made


class Policy(Document, collection="policies", history=History()):
    holder: str
    premium: int = 0


def policies() -> dict[str, list[dict[str, Any]]]:
    return {"policies": [{"holder": "old", "premium": 1}, {"holder": "older"}]}


class Sale(
    Document, collection="sales", archive=Archive(by="date", after=timedelta(days=1), into="old_sales")
):
    date: datetime | None = None


def sales() -> dict[str, list[dict[str, Any]]]:
    """Documents that somebody copied to the archive, and forgot to delete."""
    documents: list[dict[str, Any]] = [{"_id": ObjectId(), "date": None} for _ in range(3)]
    return {"sales": documents, "old_sales": documents[:2]}


class Gadget(Document, collection="gadgets"):
    specs: Annotated[dict[str, int], Attributes()] = {}


def gadgets() -> dict[str, list[dict[str, Any]]]:
    """A dict as it was before, and a name that is there twice."""
    twice = [{"k": "size", "v": 1}, {"k": "size", "v": 2}]
    return {"gadgets": [{"specs": {"size": 1}}, {"specs": twice}, {"specs": [{"k": "size", "v": 1}]}]}


class Friend(Document, collection="friends", links=Links("friends")):
    friends: list[Id] = []


def friends() -> dict[str, list[dict[str, Any]]]:
    """Links from one end only, and one that leads nowhere."""
    keys = [ObjectId() for _ in range(3)]
    return {
        "friends": [
            {"_id": keys[0], "friends": [keys[1]]},
            {"_id": keys[1], "friends": []},
            {"_id": keys[2], "friends": [ObjectId()]},
        ]
    }


@dataclass(frozen=True)
class Sample:
    """Models that use a pattern, and documents that lack what it maintains."""

    models: tuple[type[Document], ...]
    documents: Callable[[], Mapping[str, list[dict[str, Any]]]]


SAMPLES = {
    "slug": Sample((outside.Page,), outside.pages),
    "ancestor_array": Sample((Category,), nodes("categories")),
    "child_references": Sample((Shelved,), nodes("shelved")),
    "approximation": Sample((Article,), articles),
    "bucket": Sample((Reading,), readings),
    "computed": Sample((Review, Product), reviews("products")),
    "extended_reference": Sample((Customer, Order), orders),
    "archive": Sample((Sale,), sales),
    "attributes": Sample((Gadget,), gadgets),
    "links": Sample((Friend,), friends),
    "history": Sample((Policy,), policies),
    "materialized_path": Sample((Folder,), nodes("folders")),
    "outlier": Sample((Fan,), fans),
    "parent_reference": Sample((Section,), nodes("sections")),
    "rollup": Sample((Review, ReviewDay), reviews("products")),
    "time_series": Sample((Measurement,), readings),
    "subset": Sample((Review, Shelf), reviews("shelves")),
}


def sample(name: str) -> Sample:
    assert name in SAMPLES, f"tests/test_every_pattern.py has no sample for {name!r}; add one to SAMPLES"
    return SAMPLES[name]


# -- the pieces -------------------------------------------------------------------------------


def test_every_file_and_folder_of_patterns_holds_a_pattern():
    held = {each.__module__.split(".")[2] for name in DECLARED for each in PATTERNS[name]}
    there = {each.name for each in pkgutil.iter_modules(treadle.patterns.__path__)}
    assert set() == there - held - set(SHAPES), "no public subclass of Pattern with a name in `pattern`"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_module_says_what_it_is(module):
    assert (module.__doc__ or "").strip(), f"{module.__name__} has no docstring"


@pytest.mark.parametrize("name", DECLARED)
def test_each_declaration_can_be_bound(name):
    for each in PATTERNS[name]:
        assert (each.__doc__ or "").strip(), f"{each.__name__} has no docstring"
        assert "bind" in {key for base in each.__mro__[:-2] for key in vars(base)}, (
            f"{each.__name__} has no bind()"
        )


def type_checking_imports() -> set[tuple[str, str]]:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    return {
        (node.module or "", alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("name", DECLARED)
def test_each_pattern_is_exported(name):
    for each in PATTERNS[name]:
        public = each.__name__
        assert public in treadle.__all__, f"{public} is not in __all__ of src/treadle/__init__.py"
        home = each.__module__.removeprefix("treadle.")
        assert home == treadle._HOMES.get(public), f"{public} is not in _HOMES of __init__.py"
        assert each is getattr(treadle, public)
        assert (each.__module__, public) in type_checking_imports(), (
            f"__init__.py does not import {public} under TYPE_CHECKING"
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_pattern_has_a_test_and_a_quick_one(name):
    folder = ROOT / "tests" / "patterns"
    # Several patterns may share a package, and its tests.
    packages = {each.__module__.split(".")[2] for each in PATTERNS.get(name, [])} | {name}
    files = [*folder.rglob(f"test_{name}.py")]
    files += [path for package in packages for path in folder.glob(f"{package}/test_*.py")]
    assert files, f"tests/patterns/test_{name}.py or tests/patterns/{name}/ is missing"
    assert any("@pytest.mark.quick" in path.read_text() for path in files), f"no test of {name} is quick"


@pytest.mark.parametrize("name", NAMES)
def test_the_pattern_has_a_page(name):
    path = ROOT / "docs" / "patterns" / f"{name.replace('_', '-')}.md"
    assert path in PAGES, f"{path.relative_to(ROOT)} is missing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_the_same_headings(page):
    assert HEADINGS == re.findall(r"^## (.+?) *$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_says_where_its_cost_was_measured(page):
    """By the name of a family of benchmarks, and without figures of its own, which would grow old."""
    cost = page.read_text().partition("\n## Cost measured\n")[2]
    assert "(../../benchmarks/RESULTS.md)" in cost
    named = re.findall(r"famil(?:y|ies) (`.+?`) (?:in|to)\b", cost)
    families = re.findall(r"`(\w+)`", " ".join(named))
    assert families, f"{page.stem} names no family"
    for family in families:
        assert (ROOT / "benchmarks" / f"{family}.py").exists(), f"there is no family {family}"
    assert [] == re.findall(r"\b\d[\d,.]*(?: ?(?:µs|ms|seconds|times|%|percent|MB))", cost)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_a_story_to_run(name):
    page = (ROOT / "docs" / "patterns" / f"{name.replace('_', '-')}.md").read_text()
    (story,) = re.findall(r"^A story to run: \[.+\]\(\.\./\.\./examples/(\w+)\.py\)\.$", page, re.MULTILINE)
    told = (ROOT / "examples" / f"{story}.py").read_text().lower()
    assert name.replace("_", "") in re.sub(r"[ _]", "", told)


# -- the interface ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECLARED)
def test_the_samples_use_every_declaration(name):
    graph = Graph(sample(name).models)
    used = {type(mark) for entry in graph.entries.values() for _, mark in declarations(entry)}
    assert set() == {each.__name__ for each in PATTERNS[name]} - {each.__name__ for each in used}


# Patterns that say how a model is stored watch and maintain no fields.
LAYOUTS = ["bucket", "time_series"]


@pytest.mark.parametrize("name", [name for name in BEHAVING if name not in LAYOUTS])
def test_each_rule_answers_the_interface(name):
    graph = Graph(sample(name).models)
    rules = [rule for rule in graph.rules if name_of(rule.pattern) == name]
    assert rules, f"no rule of {name} is bound by its sample"
    for rule in rules:
        told = f"{type(rule).__name__} of {rule.place.label}"
        assert set(rule.needs) <= EVERYTHING, told
        assert not hasattr(rule, "needs_transactions"), f"{told}: say needs = TRANSACTIONS"
        watched = rule.reads()
        assert isinstance(watched, Mapping), told
        assert watched, f"{told} reads nothing"
        assert set(watched) <= set(graph.by_collection), told
        assert all(paths is None or isinstance(paths, Set) for paths in watched.values()), told
        owned = {each.path for each in rule.owns()}
        assert owned, f"{told} owns nothing"
        assert owned <= set(rule.target.paths.owned), f"{told} owns what callers may write"
        for entry, index in rule.storage().indexes:
            assert entry in graph.entries.values(), told
            assert isinstance(index, IndexModel), told
        assert rule.level > 0, told


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_each_rule_class_is_a_rule(module):
    """Whatever a file calls a rule stands below Rule, where the defaults are."""
    named = [each for each in defined(module) if each.__name__.endswith("Rule")]
    assert [] == [each.__name__ for each in named if not issubclass(each, Rule)]


# -- the behaviour ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BEHAVING)
def test_a_second_set_up_finds_nothing_to_do(name, run):
    store = run.store(sample(name).models)
    assert store.setup()
    assert [] == store.setup()
    assert [] == store.setup(dry_run=True)


@pytest.mark.quick
@pytest.mark.parametrize("name", BEHAVING)
def test_old_data_is_rebuilt_and_twice_equals_once(name, run, database):
    models = sample(name).models
    for collection, documents in sample(name).documents().items():
        database[collection].insert_many(documents)
    store = run.store(models)
    store.setup()
    found = store.verify()
    # Old data may also be of another shape than the model's.
    seen = {each.pattern for each in found} - {"validation"}
    assert {each.pattern for each in PATTERNS[name]} == seen
    store.rebuild()
    once = stored(database, models)
    assert [] == store.verify()
    store.rebuild()
    assert once == stored(database, models)
    assert [] == store.verify()
    assert 0 == store.repair()


@pytest.mark.parametrize("name", BEHAVING)
def test_repair_mends_what_verify_finds(name, run, database):
    models = sample(name).models
    for collection, documents in sample(name).documents().items():
        database[collection].insert_many(documents)
    store = run.store(models)
    store.setup()
    wrong = {each.document_id for each in store.verify()}
    assert wrong
    assert len(wrong) == store.repair()
    assert [] == store.verify()


def stored(database: Any, models: tuple[type[Document], ...]) -> dict[str, list[dict[str, Any]]]:
    """All documents, without the count of their rewrites."""
    found: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        collection = model.__treadle__.collection
        found[collection] = list(database[collection].find().sort("_id"))
        for document in found[collection]:
            document.get("_treadle", {}).pop("n", None)
    return found
