"""What the demo does; `narration.py` shows it.

After the naive beginning, everything that it does to the data goes through
Treadle's public calls, apart from what it breaks on purpose.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from pymongo.database import Database

from treadle.advisor import Report
from treadle.advisor.interface import Finding as Advice
from treadle.advisor.model_text import render
from treadle.advisor.proposals import merge
from treadle.demo.data import Shop
from treadle.demo.measure import Cost, measure, prepare_profiler
from treadle.demo.requests import REQUESTS, Request
from treadle.graph.outcomes import Action, Finding, Progress
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.document import Document
from treadle.store.blocking.store import Store

FINDINGS_SHOWN_MAX = 6
# Readings that are copied in one call.
READINGS_MAX = 10_000
# How the advisor names a collection of buckets, after that of the readings.
BUCKETS = "_buckets"

# What each request costs and answers before anything is changed, by its code.
Baseline = Mapping[str, tuple[Cost, Any]]


@dataclass(frozen=True, slots=True)
class Adoption:
    """What adopting the patterns did."""

    actions: Sequence[Action]
    rebuilt: Mapping[str, int]
    documents_before: Mapping[str, int]
    documents_after: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request before and after."""

    request: Request
    title: str
    before: Cost
    after: Cost
    # How the advisor declares it.
    declared: str = ""

    @property
    def speed(self) -> str:
        """How the times compare, also where nothing was gained."""
        ratio = self.before.seconds / self.after.seconds
        if ratio >= 1.1:
            return f"{ratio:.0f} times as fast" if ratio >= 10 else f"{ratio:.1f} times as fast"
        return "about as fast" if ratio > 0.9 else f"{1 / ratio:.1f} times as slow"


@dataclass(frozen=True, slots=True)
class Repair:
    """What was written behind Treadle's back, what verify found, and what repair left."""

    writes: Sequence[str]
    findings: Sequence[Finding]
    documents: int
    remaining: int

    @property
    def examples(self) -> list[Finding]:
        """The first of each place, since similar ones say no more; Treadle's own state last."""
        first: dict[tuple[str, str, str], Finding] = {}
        for each in sorted(self.findings, key=lambda each: each.path.startswith("_treadle")):
            first.setdefault((each.pattern, each.model, each.path), each)
        return list(first.values())[:FINDINGS_SHOWN_MAX]


def measure_baseline(
    database: Database[Any], shop: Shop, progress: Callable[[str, int, int], None]
) -> Baseline:
    """Let the naive shop do its requests, with the profiler on for the advisor, and measure them."""
    prepare_profiler(database)
    baseline = {}
    for number, request in enumerate(REQUESTS):
        progress(request.pattern, number, len(REQUESTS))
        work = partial(request.before, database, shop)
        baseline[request.code] = _measure(database, shop, request, work)
    return baseline


def _measure(
    database: Database[Any], shop: Shop, request: Request, work: Callable[[], Any]
) -> tuple[Cost, Any]:
    """Measure a request; where it counts something, check that everything was counted."""
    before = request.read_count(database, shop) if request.read_count else 0
    cost, answer = measure(database, work, request.profiled_runs, request.timed_runs)
    if request.read_count:
        count = request.read_count(database, shop) - before
        if count != answer * (request.profiled_runs + request.timed_runs):
            raise AssertionError(f"{request.pattern} counted {count:,}: {request.title(shop)}")
    return cost, answer


def select_advice(report: Report) -> dict[str, Advice]:
    """The first finding of each code that the demo knows how to follow."""
    known = {request.code for request in REQUESTS}
    return {each.code: each for each in reversed(report.findings) if each.code in known}


def declare(report: Report) -> str:
    """The advisor's own declarations of all that the demo follows, as one module."""
    return render(report.scan, merge(each.draft for each in select_advice(report).values()))


def declared_as(text: str, call: str) -> str:
    """The line of the declarations that uses a pattern, however it is broken."""
    for each in ast.walk(ast.parse(text)):
        is_field = isinstance(each, (ast.AnnAssign, ast.keyword))
        if is_field and f"{call}(" in (source := ast.unparse(each)) and not isinstance(each, ast.ClassDef):
            return source.replace("'", '"')
    return ""


def adopt(store: Store, progress: Callable[[Progress], None]) -> Adoption:
    """Set up what the models declare, and fill it from what is there."""
    sources = {name: name.removesuffix(BUCKETS) for name in _collections(store)}
    before = {name: store.database[source].count_documents({}) for name, source in sources.items()}
    actions = store.setup()
    for model, entry in store.graph.entries.items():
        if sources[entry.collection] != entry.collection:
            _copy_readings(store, model, sources[entry.collection], progress)
    rebuilt = {model.__name__: store.rebuild(model, progress=progress) for model in list(store.graph.entries)}
    after = {name: store.database[name].count_documents({}) for name in sources}
    return Adoption(actions, rebuilt, before, after)


def _copy_readings(
    store: Store, model: type[Document], source: str, progress: Callable[[Progress], None]
) -> None:
    """Insert the single documents of a collection as readings, as the advisor says."""
    codec = store.graph.entry(model).codec
    readings = store.database[source].with_options(codec_options=CODEC_OPTIONS)
    total, done = readings.estimated_document_count(), 0
    with readings.find() as cursor:
        while raws := list(islice(cursor, READINGS_MAX)):
            store.insert_many([codec.load(raw) for raw in raws])
            done += len(raws)
            progress(Progress(model.__name__, done, total))


def _collections(store: Store) -> list[str]:
    return [entry.collection for entry in store.graph.entries.values()]


def compare(store: Store, shop: Shop, request: Request, baseline: Baseline, declared: str) -> Comparison:
    """Measure a request with its pattern, and check that the answer is the same."""
    before, expected = baseline[request.code]
    after, answer = _measure(store.database, shop, request, partial(request.after, store, shop))
    if answer != expected:
        raise AssertionError(f"{request.pattern} gives another answer than before: {request.title(shop)}")
    return Comparison(request, request.title(shop), before, after, declared)


def break_and_repair(store: Store, shop: Shop) -> Repair:
    """Write to the database like a program that knows nothing of Treadle; verify, then repair."""
    writes = _break(store, shop)
    findings = store.verify()
    documents = store.repair()
    return Repair(writes, findings, documents, len(store.verify()))


def _break(store: Store, shop: Shop) -> list[str]:
    """What is broken; of a pattern that the advisor did not find this time, nothing."""
    database, written = store.database, list[str]()
    maintained = {(rule.target.collection, rule.path) for rule in store.graph.rules}
    if ("orders", "customer") in maintained:
        order = database["orders"].find_one(sort=[("placed_at", -1), ("_id", 1)])
        assert order is not None
        database["customers"].update_one({"_id": order["customer_id"]}, {"$set": {"name": "Stale"}})
        written.append("a customer was renamed, and the copies in the orders were not")
    if ("products", "review_count") in maintained:
        database["products"].update_one({"_id": shop.popular}, {"$inc": {"review_count": 1_000}})
        written.append("the review count of a product was raised by 1,000")
    newest = database["reviews"].find_one({"product_id": {"$ne": shop.popular}}, sort=[("date", -1)])
    assert newest is not None
    database["reviews"].delete_one({"_id": newest["_id"]})
    written.append("the newest review of a product was deleted")
    for entry in store.graph.entries.values():
        if entry.collection.endswith(BUCKETS):
            stored = database[entry.collection]
            stored.update_one({"sensor_id": shop.sensor}, {"$set": {"stats.temp.max": 99.9}})
            written.append("the maximum of an hour was set to 99.9 degrees")
    return written
