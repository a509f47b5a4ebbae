"""What the demo does, without a word of how it is shown.

Everything that it does to the data after the naive beginning goes through
Treadle's public calls, apart from what it breaks on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pymongo.database import Database

from treadle.advisor import Report
from treadle.advisor.rule import Finding as Advice
from treadle.demo.data import Shop
from treadle.demo.measure import Cost, measure, prepare_profiler
from treadle.demo.models import MODELS
from treadle.demo.requests import REQUESTS, Request
from treadle.graph.reports import Action, Finding, Progress
from treadle.store.blocking.store import Store

FINDINGS_SHOWN_MAX = 6


@dataclass(frozen=True, slots=True)
class Naive:
    """What the requests cost and answer before anything is changed."""

    costs: Mapping[str, Cost]
    answers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Adopted:
    """What adopting the patterns did."""

    actions: Sequence[Action]
    rebuilt: Mapping[str, int]
    documents_before: Mapping[str, int]
    documents_after: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Compared:
    """One request before and after, with the advice that led from one to the other."""

    request: Request
    title: str
    advice: Advice
    before: Cost
    after: Cost


@dataclass(frozen=True, slots=True)
class Mended:
    """What was written behind Treadle's back, what verify named, and what repair left."""

    written: Sequence[str]
    found: Sequence[Finding]
    documents: int
    left: int

    @property
    def shown(self) -> list[Finding]:
        """The first of each place, since equal ones say no more; Treadle's own state last."""
        first: dict[tuple[str, str, str], Finding] = {}
        for each in sorted(self.found, key=lambda each: each.path.startswith("_treadle")):
            first.setdefault((each.pattern, each.model, each.path), each)
        return list(first.values())[:FINDINGS_SHOWN_MAX]


def work_a_while(database: Database[Any], shop: Shop, tell: Callable[[str, int, int], None]) -> Naive:
    """Let the naive shop do its requests, with the profiler on for the advisor, and measure them."""
    prepare_profiler(database)
    costs, answers = {}, {}
    for number, request in enumerate(REQUESTS):
        tell(request.pattern, number, len(REQUESTS))
        work = partial(request.before, database, shop)
        costs[request.code], answers[request.code] = _measure(database, shop, request, work)
    return Naive(costs, answers)


def _measure(
    database: Database[Any], shop: Shop, request: Request, work: Callable[[], Any]
) -> tuple[Cost, Any]:
    """Measure a request; where it counts something, make sure that everything was counted."""
    before = request.counted(database, shop) if request.counted else 0
    cost, answer = measure(database, work, request.seen, request.times)
    if request.counted:
        grown = request.counted(database, shop) - before
        if grown != answer * (request.seen + request.times):
            raise AssertionError(f"{request.pattern} counted {grown:,}: {request.title(shop)}")
    return cost, answer


def named(report: Report) -> dict[str, Advice]:
    """The findings that the demo knows how to follow, by their codes."""
    known = {request.code for request in REQUESTS}
    found: dict[str, Advice] = {}
    for each in report.findings:
        if each.code in known:
            found.setdefault(each.code, each)
    return found


def adopt(store: Store, progress: Callable[[Progress], None]) -> Adopted:
    """Set up what the models declare, and fill it from what is there."""
    before = _counts(store)
    actions = store.setup()
    rebuilt = {model.__name__: store.rebuild(model, progress=progress) for model in MODELS}
    return Adopted(actions, rebuilt, before, _counts(store))


def _counts(store: Store) -> dict[str, int]:
    collections = [store.collection(model) for model in MODELS]
    return {each.name: each.count_documents({}) for each in collections}


def compare(store: Store, shop: Shop, request: Request, naive: Naive, advice: Advice) -> Compared:
    """Measure a request as it is now, and hold its answer against the old one."""
    after, answer = _measure(store.database, shop, request, partial(request.after, store, shop))
    if answer != naive.answers[request.code]:
        raise AssertionError(f"{request.pattern} gives another answer than before: {request.title(shop)}")
    return Compared(request, request.title(shop), advice, naive.costs[request.code], after)


def break_and_mend(store: Store, shop: Shop) -> Mended:
    """Write to the database as a program would that knows nothing of Treadle; find it, mend it."""
    written = _break(store.database, shop)
    found = store.verify()
    documents = store.repair()
    return Mended(written, found, documents, len(store.verify()))


def _break(database: Database[Any], shop: Shop) -> list[str]:
    order = database["orders"].find_one(sort=[("placed_at", -1), ("_id", 1)])
    assert order is not None
    database["customers"].update_one({"_id": order["customer_id"]}, {"$set": {"name": "Nobody"}})
    database["products"].update_one({"_id": shop.popular}, {"$inc": {"review_count": 1_000}})
    newest = database["reviews"].find_one({"product_id": {"$ne": shop.popular}}, sort=[("date", -1)])
    assert newest is not None
    database["reviews"].delete_one({"_id": newest["_id"]})
    database["readings"].update_one({"sensor_id": shop.sensor}, {"$set": {"stats.temp.max": 99.9}})
    return [
        "a customer was renamed, and the copies in the orders were not",
        "the review count of a product was raised by 1,000",
        "the newest review of a product was deleted",
        "the maximum of an hour was set to 99.9 degrees",
    ]
