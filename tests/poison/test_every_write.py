"""Every pattern, with each value written through the Store: refused by name, or stored and possible to delete.

Poison of other writers lies beside it all the time, and stops none of the writes that it is no part of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson import ObjectId
from pymongo.errors import OperationFailure

from tests import outside
from tests import test_every_pattern as samples
from tests.poison.test_every_pattern import spoilt, stored_anyway
from tests.poison.values import VALUES, Element
from tests.test_every_pattern import BEHAVING, SAMPLES
from treadle import Document, Store
from treadle.errors import TreadleError

# The worlds of test_pairs.py have hostile values in make test.
pytestmark = pytest.mark.all

KEY = ObjectId()
MOMENT = datetime(2026, 2, 1, tzinfo=UTC)


def _review(number: int) -> dict[str, Any]:
    return {"product_id": KEY, "rating": number % 5, "price": Decimal(number), "date": MOMENT}


def _node(number: int) -> dict[str, Any]:
    return {"name": f"new {number}", "up": None}


def _reading(number: int) -> dict[str, Any]:
    return {"sensor": "s", "ts": MOMENT + timedelta(hours=number), "temp": 1.5}


# Per pattern a model and the fields of a healthy document, by Python names.
NEIGHBOURS: dict[str, tuple[type[Document], Callable[[int], dict[str, Any]]]] = {
    "ancestor_array": (samples.Category, _node),
    "approximation": (samples.Article, lambda number: {"title": f"new {number}"}),
    "archive": (samples.Sale, lambda number: {"date": MOMENT}),
    "attributes": (samples.Gadget, lambda number: {"specs": {"size": number}}),
    "bucket": (samples.Reading, _reading),
    "child_references": (samples.Shelved, lambda number: {"name": f"new {number}", "children": []}),
    "computed": (samples.Review, _review),
    "extended_reference": (samples.Customer, lambda number: {"name": f"new {number}", "tier": "gold"}),
    "history": (samples.Policy, lambda number: {"holder": f"new {number}", "premium": number}),
    "links": (samples.Friend, lambda number: {"friends": []}),
    "materialized_path": (samples.Folder, _node),
    "outlier": (samples.Fan, lambda number: {"idols": ["a"] * (number % 6)}),
    "parent_reference": (samples.Section, _node),
    "rollup": (samples.Review, _review),
    "slug": (outside.Page, lambda number: {"title": f"new {number}", "section": "news"}),
    "subset": (samples.Review, _review),
    "time_series": (samples.Measurement, _reading),
}


def attempt(call: Callable[..., Any], *given: Any) -> Any:
    """What a call gives, or None where it is refused; any other error is no answer."""
    try:
        return call(*given)
    except (TreadleError, OperationFailure) as error:
        assert str(error)
        return None


@pytest.mark.parametrize("name", BEHAVING)
def test_no_write_is_stopped_by_a_value_beside_it(database, caplog, name):
    caplog.set_level(logging.CRITICAL, "treadle")
    store = Store(database, SAMPLES[name].models)
    documents = SAMPLES[name].documents()
    for collection, good in documents.items():
        stored_anyway(database, collection, [each for one in good[:1] for each in spoilt({"_id": 0, **one})])
    store.setup()
    store.rebuild()
    model, fields = NEIGHBOURS[name]
    for number, value in enumerate(VALUES.values()):
        if isinstance(value, Element):
            # No program can hand it to a Store.
            continue
        given = fields(number)
        field = [*given, "id"][number % (len(given) + 1)]
        odd = model.model_construct(**given)
        odd.__dict__[field] = value
        stored = attempt(store.insert, odd)
        if stored is not None and name != "time_series":
            attempt(store.delete_many, model, {"_id": stored.id})
        neighbour = store.insert(model(**fields(1000 + number)))
        if field != "id":
            attempt(store.update, model, neighbour.id, {"$set": {field: value}})
            attempt(store.update_many, model, {"_id": neighbour.id}, {"$set": {field: value}})
        # The id of a reading follows from its series and its moment.
        if name != "time_series" and not (name == "bucket" and field != "temp"):
            assert 1 == store.delete_many(model, {"_id": neighbour.id}), (field, value)
    for collection in documents:
        database[collection].delete_many({"_id": {"$regex": "^bad "}})
    store.repair()
    store.repair()
    assert [] == [each for each in store.verify() if each.pattern != "validation"]
    assert [] == store.set_aside()
