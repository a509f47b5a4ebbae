"""The documents of a scope, on a server: all versions, kinds and collections.

Covers: graph/scope, graph/stored_pages
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from treadle import Archive, Document, Store, migration
from treadle.graph.scope import Image, Scope
from treadle.graph.stored_pages import matching

DAY = datetime(2026, 1, 1, tzinfo=UTC)


class Part(
    Document,
    collection="parts",
    version=2,
    discriminator="type",
    soft_delete="gone",
    archive=Archive(by="at", after=timedelta(days=1), into="parts_archive"),
):
    id: Any
    owner: int = 0
    n: int = 0
    at: datetime = DAY
    gone: datetime | None = None


class Bolt(Part, kind="bolt"):
    pass


class Nut(Part, kind="nut"):
    pass


@migration(Part, from_version=1)
def rename_all(document: dict[str, Any]) -> dict[str, Any]:
    """The discriminator and the date of deletion have other names in the older version."""
    document["type"] = document.pop("sort")
    document["gone"] = document.pop("removed", None)
    document["owner"] = document.pop("boss")
    document["n"] = int(document.pop("number"))
    return document


def old(key: Any, sort: str = "bolt", boss: int = 1, number: Any = 1, **more: Any) -> dict[str, Any]:
    return {"_id": key, "sort": sort, "boss": boss, "number": number, **more}


def new(key: Any, kind: str = "bolt", owner: int = 1, n: int = 1, **more: Any) -> dict[str, Any]:
    return {"_id": key, "type": kind, "owner": owner, "n": n, "gone": None, "schema_version": 2, **more}


@pytest.fixture
def store(database) -> Store:
    store = Store(database, [Part, Bolt, Nut])
    store.setup()
    database["parts"].insert_many(
        [
            new(1, n=5),
            new(2, "nut"),
            new(3, gone=DAY),
            new(4, owner=2),
            old(11, number=3),
            old(12, "nut"),
            old(13, removed=DAY),
            old(14, boss=2),
        ]
    )
    database["parts_archive"].insert_many([new(21, n=4), old(22, number=2), old(23, "nut")])
    return store


def found(store: Store, scope: Scope, own: Any, **options: Any) -> list[Image]:
    return store.runner.run(scope.find(own, **options))


def ids(images: list[Image]) -> list[Any]:
    return sorted(each.document["_id"] for each in images)


@pytest.mark.parametrize("commands", range(1, 8))
def test_a_document_that_moves_between_two_reads_is_found_once(store, database, commands):
    """One is archived and two are migrated after so many commands of a find outside of a snapshot."""

    def moving() -> Any:
        plan, answer = store.graph.entry(Bolt).sources.find({"owner": 1}), None
        for number in itertools.count():
            if number == commands:
                database["parts"].delete_one({"_id": 1})
                database["parts"].replace_one({"_id": 11}, new(11, n=3))
                database["parts_archive"].insert_one(new(1, n=5))
                database["parts_archive"].replace_one({"_id": 22}, new(22, n=2))
            try:
                answer = yield plan.send(answer)
            except StopIteration as stop:
                return stop.value

    assert [1, 11, 21, 22] == ids(store.runner.run(moving()))


def test_find_sees_all_versions_in_all_collections(store):
    entry = store.graph.entry(Bolt)
    own = {"owner": 1}
    images = found(store, entry.sources, own)
    assert {
        (1, "parts", False),
        (11, "parts", True),
        (21, "parts_archive", False),
        (22, "parts_archive", True),
    } == {(each.document["_id"], each.collection, each.outdated) for each in images}
    assert {"bolt"} == {each.document["type"] for each in images}
    assert [1, 11] == ids(found(store, entry.targets, own))
    assert [3, 13] == ids(found(store, entry.deleted, own))
    assert [2, 12] == ids(found(store, store.graph.entry(Nut).targets, {"n": 1}))


@pytest.mark.parametrize("chunk", [1, 2, 500])
def test_group_gives_a_set_of_rows_for_each_part(store, chunk):
    """The caller merges them: a transaction takes no `$unionWith`."""
    scope = store.graph.entry(Part).sources
    scope.chunk = chunk
    stages = [{"$group": {"_id": "$owner", "sum": {"$sum": "$n"}, "count": {"$sum": 1}}}]
    with store.transaction() as session:
        rows = store.runner.run(scope.group({"type": "bolt"}, stages), session)
    assert (14, 4) == tuple(sum(row[name] for row in rows if row["_id"] == 1) for name in ("sum", "count"))
    assert (2, 2) == tuple(sum(row[name] for row in rows if row["_id"] == 2) for name in ("sum", "count"))


def test_a_page_shows_what_the_scope_sees_once_it_is_upgraded(store):
    scope = store.graph.entry(Bolt).targets
    last, seen = None, []
    while True:
        page = store.runner.run(scope.page(last, 3))
        last = page.last
        if last is None:
            break
        seen += [(each.document["_id"], each.outdated) for each in page.images]
    assert [(1, False), (4, False), (11, True), (14, True)] == seen
    archived = store.runner.run(store.graph.entry(Bolt).sources.page(None, 10, collection="parts_archive"))
    assert [21, 22] == [each.document["_id"] for each in archived.images]


def test_what_cannot_be_upgraded_is_quarantined_and_hides_nothing(store, database):
    database["parts"].insert_many([old(15, number="many"), new(16)])
    scope = store.graph.entry(Bolt).targets
    page = store.runner.run(scope.page(None, 50))
    assert [1, 4, 11, 14, 16] == sorted(each.document["_id"] for each in page.images)
    ((key, reason),) = page.failed
    assert (15, True) == (key, "ValueError" in reason)
    failed: list[Any] = []
    assert 16 in [each.document["_id"] for each in found(store, scope, {"owner": 1}, failed=failed)]
    assert [15] == [key for key, _ in failed]
    row = database["treadle.set_aside"].find_one()
    assert (15, "parts", "migration-failed") == (row["_id"]["key"], row["_id"]["collection"], row["code"])


def test_what_cannot_be_decoded_is_quarantined_and_hides_nothing(store, database):
    body = bson.encode(new(17, note="abc")).replace(b"abc", b"a\xffc")
    database["parts"].insert_one(RawBSONDocument(body))
    scope = store.graph.entry(Bolt).targets
    page = store.runner.run(scope.page(None, 50))
    assert [1, 4, 11, 14] == sorted(each.document["_id"] for each in page.images)
    assert [17] == [key for key, _ in page.failed]
    assert [1, 11] == ids(found(store, scope, {"owner": 1}))
    assert 17 == database["treadle.set_aside"].find_one()["_id"]["key"]


def test_pages_follow_the_ids_whatever_their_types(store, database):
    keys = [None, 1.5, "a", "$b", {"x": 1}, True, float("nan")]
    database["odd"].insert_many([{"_id": key} for key in keys])
    last, seen = None, []
    while True:
        rows = store.runner.run(matching("odd", {}, last, 2))
        if not rows:
            break
        last = [rows[-1]["_id"]]
        seen += rows
    assert len(keys) == len(seen)
