"""Every pattern, with each value in each field of its sample documents: no sweep stops, nothing is left over."""

from __future__ import annotations

import logging
from typing import Any

import bson
import pytest
from bson import ObjectId
from pymongo.errors import OperationFailure

from tests.poison.values import VALUES, document
from tests.test_every_pattern import BEHAVING, SAMPLES
from treadle import Store

# The worlds of test_pairs.py have hostile values in make test.
pytestmark = pytest.mark.all


def spoilt(good: dict[str, Any]) -> list[dict[str, Any]]:
    """The same document with each value in one of its fields, in turn, and in Treadle's own."""
    names = [*(name for name in good if name != "_id"), "_treadle"]
    return [
        {"_id": f"bad {number}", **good, **{"_id": f"bad {number}", names[number % len(names)]: value}}
        for number, value in enumerate(VALUES.values())
    ]


def stored_anyway(database: Any, collection: str, documents: list[dict[str, Any]]) -> int:
    """Store documents past validators; how many the server took."""
    taken = 0
    for each in documents:
        command = {"insert": collection, "documents": [document(each)], "bypassDocumentValidation": True}
        try:
            reply = database.command(command, codec_options=bson.DEFAULT_CODEC_OPTIONS)
        except OperationFailure:
            continue
        taken += "writeErrors" not in reply
    return taken


@pytest.mark.parametrize("name", BEHAVING)
def test_no_sweep_is_stopped_by_one_document(database, caplog, name):
    caplog.set_level(logging.CRITICAL, "treadle")
    sample = SAMPLES[name]
    store = Store(database, sample.models)
    documents = sample.documents()
    for collection, good in documents.items():
        for each in good:
            each.setdefault("_id", ObjectId())
        taken = stored_anyway(
            database, collection, [each for one in good[:1] for each in spoilt({"_id": 0, **one})]
        )
        # A time series holds nothing without a date, and refuses the rest itself.
        assert taken or not good or name == "time_series"
        assert len(good) == stored_anyway(database, collection, good)
    store.setup()
    for sweep in (store.rebuild, store.repair, store.verify, store.run_due, store.recover, store.status):
        sweep()
    assert store.status().set_aside == len(store.set_aside())
    assert all(each.reason for each in store.set_aside())
    for collection in documents:
        database[collection].delete_many({"_id": {"$regex": "^bad "}})
    # Readings become buckets, and what is old another collection's.
    ids = {each["_id"] for good in documents.values() for each in good}
    left = {each["_id"] for collection in documents for each in database[collection].find({}, {"_id": 1})}
    assert ids <= left or name in ("bucket", "time_series")
    store.repair()
    store.repair()
    # What a bucket has adopted, its validator need not like.
    assert [] == [each for each in store.verify() if each.pattern != "validation"]
    assert [] == store.set_aside()
