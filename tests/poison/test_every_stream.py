"""Every pattern's documents as sources that the worker follows, with each value among them.

Beside the pattern stands a copy of one of its fields that the worker keeps:
whatever is stored in the pattern's collection, the copies of healthy documents
are right, what is not is listed with its reason, and once it is mended a retry
brings it in.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import pytest
from bson import ObjectId

from tests.poison.test_every_pattern import stored_anyway
from tests.poison.test_every_write import NEIGHBOURS
from tests.poison.values import VALUES, replace
from tests.test_every_pattern import BEHAVING, SAMPLES
from treadle import Document, ExtendedReference, History, Store

# The worlds of test_pairs.py have hostile values in make test.
pytestmark = pytest.mark.all

# Readings are no documents that anybody refers to.
FOLLOWED = [name for name in BEHAVING if name not in ("bucket", "time_series")]
GOOD = 5


class FollowedPolicy(Document, collection="policies", history=History(maintain="stream")):
    """A history that the worker writes itself."""

    holder: str
    premium: int = 0


def spoilt(good: dict[str, Any], field: str, number: int, value: Any) -> dict[str, Any]:
    """A document with a value in the field that is copied, or in another one."""
    names = [*good, "_treadle"]
    return {
        "_id": ObjectId(f"{number:024x}"),
        **good,
        (field if number % 2 else names[number % len(names)]): value,
    }


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_worker_is_stopped_by_no_source(database, caplog, name):
    caplog.set_level(logging.CRITICAL, "treadle")
    model, fields = NEIGHBOURS[name]
    models = SAMPLES[name].models
    if name == "history":
        model, models = FollowedPolicy, (FollowedPolicy,)
    field = next(iter(fields(0)))
    stored = next(
        each.stored for each in Store(database, models).graph.entry(model).codec.fields if each.name == field
    )

    class Mirror(Document, collection="mirrors", validation="off"):
        id: int
        source_id: Any = None
        copied: Annotated[Any, ExtendedReference(model, by="source_id", field=field, maintain="stream")] = (
            None
        )

    store = Store(database, [*models, Mirror])
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    good = store.insert_many([model(**fields(number)) for number in range(GOOD)])
    collection = model.__treadle__.collection
    raw = {
        key: value
        for key, value in (database[collection].find_one() or {}).items()
        if key not in ("_id", "_treadle")
    }
    bad = [
        spoilt({**raw, **unlike(raw, number)}, stored, number, value)
        for number, value in enumerate(VALUES.values())
    ]
    taken = [each for each in bad if stored_anyway(database, collection, [each])]
    assert 40 <= len(taken)
    mirrors = [*(each.id for each in good), *(each["_id"] for each in taken)]
    database["mirrors"].insert_many({"_id": number, "source_id": key} for number, key in enumerate(mirrors))
    worker.run_until_idle()

    copies = {each["_id"]: each.get("copied") for each in database["mirrors"].find({"_id": {"$lt": GOOD}})}
    expected = {
        number: database[collection].find_one({"_id": each.id})[stored] for number, each in enumerate(good)
    }
    assert expected == copies
    listed = store.status()
    assert all(each.reason and each.attempts >= 1 for each in listed.aside)
    named = {repr(each.document_id) for each in listed.aside}
    wrong = [each for each in store.verify(Mirror) if each.pattern != "set-aside"]
    sources = {number: repr(key) for number, key in enumerate(mirrors)}
    assert [] == [
        each for each in wrong if {repr(each.document_id), sources[each.document_id]}.isdisjoint(named)
    ]

    assert listed.aside, "no value stood in the way of anything"
    for number, each in enumerate(taken):
        replace(database, collection, each["_id"], {**raw, **unlike(raw, number)})
    worker.run_until_idle()
    for item in store.set_aside():
        store.retry(item)
    store.repair()
    assert [] == store.verify(Mirror)
    assert [] == [each for each in store.set_aside() if each.collection in ("mirrors", collection)]


def unlike(raw: dict[str, Any], number: int) -> dict[str, Any]:
    """What has to differ between healthy documents."""
    changed = {key: f"mended {number}" for key in ("name", "title", "holder", "slug") if key in raw}
    return {**changed, **({"path": f",mended {number},"} if "path" in raw else {})}


def test_every_pattern_is_there():
    assert set(BEHAVING) == set(NEIGHBOURS)
