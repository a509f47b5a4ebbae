"""The net changes of one commit, without a server: what is added of one document becomes one change.

Covers: graph/changes, graph/batch, graph/events
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Generator
from typing import Any

from bson import Timestamp
from pymongo import MongoClient

from treadle import Document, Store, migration
from treadle.graph.batch import Batch
from treadle.graph.changes import NOT_READ, Changes, load_images
from treadle.graph.events import AFTER, BEFORE, Event


class Versioned(Document, collection="versioned", version=2):
    a: int = 0


class Soft(Document, collection="soft", soft_delete="gone"):
    gone: dt.datetime | None = None


@migration(Versioned, from_version=1, fields=("a", "old"))
def rename(document: dict[str, Any]) -> dict[str, Any]:
    document["a"] = document.pop("old")
    return document


with MongoClient[Any]("localhost:1", connect=False) as client:
    MODEL = Store(client["changes"], [Versioned]).graph.entry(Versioned)
    SOFT = Store(client["changes"], [Soft]).graph.entry(Soft)
OLD, NEW = {"_id": 1, "old": 5}, {"_id": 1, "schema_version": 2, "a": 6}


def result(plan: Generator[Any, Any, Any]) -> Any:
    """The result of a plan that needs no server."""
    try:
        next(plan)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the plan sent a command")


def test_images_are_in_the_current_version() -> None:
    changes = Changes()
    result(changes.add(MODEL, [(OLD, NEW)]))
    (change,) = changes.of(MODEL)
    assert change.before == ({"_id": 1, "schema_version": 2, "a": 5}, "versioned", True)
    assert change.after == (NEW, "versioned", False)
    assert 1 == change.id


def test_a_document_that_cannot_be_upgraded_is_taken_as_it_is_stored() -> None:
    (image,) = result(load_images(MODEL, [{"_id": 1, "schema_version": "two"}]))
    assert image == ({"_id": 1, "schema_version": "two"}, "versioned", True)


def test_several_changes_of_one_document_are_one() -> None:
    changes = Changes()
    assert not changes
    result(changes.add(MODEL, [(None, NEW)]))
    result(changes.add(MODEL, [(NEW, {**NEW, "a": 7})]))
    result(changes.add(MODEL, [({**NEW, "_id": 2}, None)]))
    pairs = [(change.before, change.after and change.after.document["a"]) for change in changes.of(MODEL)]
    assert [(None, 7), (({**NEW, "_id": 2}, "versioned", False), None)] == pairs


def test_a_document_that_was_not_read_is_not_a_missing_one() -> None:
    changes = Changes()
    result(changes.add(MODEL, [(NOT_READ, NEW)]))
    (change,) = changes.of(MODEL)
    assert change.before is NOT_READ


def test_an_archived_document_changes_its_collection() -> None:
    changes = Changes()
    result(changes.add(MODEL, [(NEW, NEW)], after_in="archive"))
    (change,) = changes.of(MODEL)
    assert ("versioned", "archive") == (change.before.collection, change.after.collection)  # type: ignore[union-attr]


def test_a_rule_takes_each_change_once() -> None:
    changes = Changes()
    result(changes.add(MODEL, [(None, NEW)]))
    assert [None] == [change.before for change in changes.take_unrecorded("rule", MODEL)]
    assert [] == changes.take_unrecorded("rule", MODEL)
    result(changes.add(MODEL, [(NEW, {**NEW, "a": 7})]))
    (change,) = changes.take_unrecorded("rule", MODEL)
    assert (6, 7) == (change.before.document["a"], change.after.document["a"])  # type: ignore[union-attr]
    assert 1 == len(changes.take_unrecorded("another", MODEL))


def test_generated_ids_are_known() -> None:
    changes = Changes()
    assert not changes.is_new_id(MODEL, 1)
    changes.note_new_ids(MODEL, [1])
    assert changes.is_new_id(MODEL, 1)
    assert not changes.is_new_id(MODEL, 2)


def test_what_a_batch_is_through_a_scope() -> None:
    """A soft deletion is no removal, but a departure."""
    scope = SOFT.targets
    here, gone = {"_id": 1}, {"_id": 1, "gone": True}
    batch = Batch(
        [(None, here), (here, gone), (gone, here), (here, here), (gone, None)], [True] + [False] * 4
    )
    assert ([here], [], [gone]) == (batch.new, batch.known, batch.removed)
    assert ([here, here], [here], [(here, here)]) == (
        batch.entering(scope),
        batch.leaving(scope),
        batch.staying(scope),
    )


def test_an_event_has_the_document_before_and_after() -> None:
    time = Timestamp(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 1)
    event = Event("update", 1, {"a.b"}, {BEFORE: {"_id": 1}, AFTER: None, "clusterTime": time})
    assert ({"_id": 1}, None) == (event.before, event.after)
    assert dt.datetime(2026, 1, 1, tzinfo=dt.UTC) == event.time
    assert event.touches(["a"])
    assert not event.touches(["b"])
