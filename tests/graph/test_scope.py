"""A scope without a server: conditions, and what a change is for those who see only this scope."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from treadle import Archive, Document, Store, migration
from treadle.graph.scope import Image, Scope, beside

DAY = datetime(2026, 1, 1, tzinfo=UTC)
ARCHIVE = Archive(by="at", after=timedelta(days=1), into="things_archive")


class Plain(Document, collection="plains"):
    n: int = 0


class Thing(Document, collection="things", discriminator="kind", soft_delete="gone", archive=ARCHIVE):
    id: int
    at: datetime = DAY
    gone: datetime | None = None


class Box(Thing, kind="box"): ...


class Jar(Thing, kind="jar"): ...


class BigJar(Jar, kind="big jar"): ...


class Uncounted(
    Document,
    collection="uncounted",
    archive=Archive(by="at", after=timedelta(days=1), into="rest", counted=False),
):
    at: datetime = DAY


class Versioned(Document, collection="versioned", version=2, soft_delete="gone"):
    a: int = 0
    gone: datetime | None = None


@migration(Versioned, from_version=1, fields=("a", "old"))
def rename(document: dict[str, Any]) -> dict[str, Any]:
    document["a"] = document.pop("old")
    return document


@pytest.fixture(scope="module")
def entries() -> Any:
    with MongoClient("localhost:1", connect=False) as client:
        yield Store(client["scope"], [Plain, Thing, Box, Jar, BigJar, Uncounted, Versioned]).graph.entry


def image(collection: str = "things", **document: Any) -> Image:
    return Image({"_id": 1, **document}, collection)


# -- conditions ---------------------------------------------------------------------------------------


def test_the_scope_of_a_plain_model_adds_nothing(entries):
    scope = entries(Plain).targets
    own = {"n": 1}
    assert scope.filter(own) == own
    assert scope.filter() == {}
    assert scope.filter() is scope.filter()


@pytest.mark.parametrize(
    ("model", "kind", "exact"),
    [
        (Thing, None, {"$nin": ["box", "jar", "big jar"]}),
        (Box, {"$eq": "box"}, {"$eq": "box"}),
        (Jar, {"$in": ["jar", "big jar"]}, {"$eq": "jar"}),
    ],
)
def test_kinds_and_soft_delete_stand_beside_the_callers_condition(entries, model, kind, exact):
    """A partial index is used only if its condition is not inside an `$and`."""
    scope = entries(model).targets
    kinds = {} if kind is None else {"kind": kind}
    assert {**kinds, "gone": None, "n": 1} == scope.filter({"n": 1})
    assert {"kind": exact, "gone": None} == scope.exact.filter()
    assert {"kind": exact} == scope.exact.with_deleted.filter() == scope.with_deleted.exact.filter()
    assert {**kinds, "gone": {"$ne": None}} == entries(model).deleted.filter()


def test_conditions_on_the_same_field_must_both_hold(entries):
    own = {"gone": {"$gt": DAY}, "n": 1}
    assert {"$and": [{"gone": None}, own]} == entries(Thing).targets.filter(own)
    assert {"$and": [{"$or": [1]}, {"$or": [2]}]} == beside({"$or": [1]}, {"$or": [2]})


def test_archived_documents_are_seen_by_role(entries):
    both = ("things", "things_archive")
    for model in (Thing, Box, Jar):
        entry = entries(model)
        assert [("things",), both, both, ("things",)] == [
            scope.collections for scope in (entry.targets, entry.sources, entry.everything, entry.deleted)
        ]
    uncounted = entries(Uncounted)
    assert uncounted.sources.archive is None
    assert "rest" == uncounted.everything.archive


@pytest.mark.parametrize(
    ("document", "held"),
    [
        ({"kind": "jar"}, True),
        ({"kind": "big jar", "gone": None}, True),
        ({"kind": "jar", "gone": DAY}, False),
        ({"kind": "box"}, False),
        ({"kind": "unknown"}, False),
        ({"kind": ["jar"]}, False),
        ({}, False),
    ],
)
def test_the_conditions_hold_in_python_as_on_the_server(entries, document, held):
    scope = entries(Jar).targets
    assert held == scope.admits(document)
    assert held == scope.holds(image(**document))
    assert not scope.holds(image("things_archive", **document)), "what is archived is no target"
    assert held == entries(Jar).sources.holds(image("things_archive", **document))


def test_a_document_of_an_unknown_kind_is_the_roots(entries):
    assert entries(Thing).targets.exact.admits({"kind": "unknown"})
    assert not entries(Thing).targets.exact.admits({"kind": "box"})
    assert not entries(Jar).targets.exact.admits({"kind": "big jar"})


# -- changes -------------------------------------------------------------------------------------------


JAR, GONE, BOX = image(kind="jar"), image(kind="jar", gone=DAY), image(kind="box")
ARCHIVED = image("things_archive", kind="jar")


@pytest.mark.parametrize(
    ("before", "after", "targets", "sources"),
    [
        (None, JAR, "insert", "insert"),
        (JAR, JAR, "update", "update"),
        (JAR, None, "delete", "delete"),
        (JAR, GONE, "delete", "delete"),
        (GONE, JAR, "insert", "insert"),
        (GONE, None, "nothing", "nothing"),
        (JAR, BOX, "delete", "delete"),
        (BOX, JAR, "insert", "insert"),
        (JAR, ARCHIVED, "delete", "update"),
        (ARCHIVED, JAR, "insert", "update"),
        (ARCHIVED, None, "nothing", "delete"),
    ],
)
def test_a_change_is_what_the_scope_sees_of_it(entries, before, after, targets, sources):
    def seen(scope: Scope) -> str:
        old, new = scope.through(before, after)
        if old is None:
            return "nothing" if new is None else "insert"
        return "delete" if new is None else "update"

    assert targets == seen(entries(Jar).targets)
    assert sources == seen(entries(Jar).sources)


# -- versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "reads", "splits"),
    [
        ({}, (), False),
        ({"b": 1}, (), False),
        ({"b": 1}, ("b", "c.d", "_id"), False),
        ({"a": 1}, (), True),
        ({"b": 1}, ("a.x",), True),
        ({"b": 1}, None, True),
    ],
)
def test_outdated_documents_are_upgraded_first_where_a_changed_field_is_read(entries, own, reads, splits):
    assert splits == entries(Versioned).targets.splits(own, reads)
    assert not entries(Plain).targets.splits(own, reads)


def test_the_condition_of_current_documents_names_the_version(entries):
    expected = {"schema_version": {"$eq": 2}, "gone": None, "a": 1}
    assert expected == entries(Versioned).targets.current({"a": 1})
