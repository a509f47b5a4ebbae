"""A standalone server: what needs transactions is refused by name, before anything is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from tests.support import shared_server
from treadle import (
    AncestorArray,
    Approximate,
    AsyncStore,
    ChildReferences,
    DeclarationError,
    Document,
    Id,
    MaterializedPath,
    Outlier,
    ParentReference,
    Store,
)
from treadle.server.local import LocalServer


class Parented(Document, collection="parented", tree=ParentReference(parent="parent_id")):
    parent_id: Id | None = None


class Listed(Document, collection="listed", tree=ChildReferences(children="children")):
    children: list[Id] = []


class Array(Document, collection="array", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Pathed(Document, collection="pathed", tree=MaterializedPath(path="path", segment="name")):
    name: str = "root"
    path: str = ""


class Team(Document, collection="teams"):
    id: int = 1
    members: Annotated[list[int], Outlier(limit=3, overflow="team_members")] = []


class Page(Document, collection="pages"):
    id: int = 1
    shares: Annotated[int, Approximate(every=1, buffer="sampled")] = 0


class Post(Page, collection="posts"):
    likes: Annotated[int, Approximate(within=timedelta(hours=1), buffer="durable")] = 0


class Visited(Document, collection="visited"):
    id: int = 1
    views: Annotated[int, Approximate(within=timedelta(hours=1))] = 0


@dataclass(frozen=True)
class Case:
    """A write of a model, and what the message must name; of an AsyncStore the write is awaited."""

    name: str
    model: type[Document]
    label: str
    act: Callable[[Any], Any]


CASES = [
    Case(
        "parent-reference",
        Parented,
        "Parented (tree=): parent-reference",
        lambda store: store.insert(Parented()),
    ),
    Case(
        "child-references", Listed, "Listed (tree=): child-references", lambda store: store.insert(Listed())
    ),
    Case("ancestor-array", Array, "Array (tree=): ancestor-array", lambda store: store.insert(Array())),
    Case(
        "materialized-path", Pathed, "Pathed (tree=): materialized-path", lambda store: store.insert(Pathed())
    ),
    Case("outlier-insert", Team, "Team.members: outlier", lambda store: store.insert(Team())),
    Case(
        "outlier-append",
        Team,
        "Team.members: outlier",
        lambda store: store.array(Team, "members", 7).append(1),
    ),
    Case("counter-insert", Post, "Post.likes: approximation", lambda store: store.insert(Post())),
    Case("counter-add", Post, "Post.likes: approximation", lambda store: store.counter(Post, "likes").add(7)),
    Case("memory-insert", Visited, "Visited.views: approximation", lambda store: store.insert(Visited())),
    Case("memory-setup", Visited, "Visited.views: approximation", lambda store: store.setup()),
    Case("setup", Team, "Team.members: outlier", lambda store: store.setup()),
    Case("setup-dry-run", Post, "Post.likes: approximation", lambda store: store.setup(dry_run=True)),
]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def alone() -> Generator[LocalServer]:
    with shared_server(replica_set=False) as server:
        yield server


@pytest.fixture
def opened(alone: LocalServer) -> Generator[MongoClient[Any]]:
    """The database `refused` holds one document of each model, written without Treadle."""
    with MongoClient[Any](alone.uri) as client:
        client.drop_database("refused")
        for case in CASES:
            client["refused"][case.model.__treadle__.collection].update_one(
                {"_id": 7}, {"$set": {"members": [], "likes": 0}}, upsert=True
            )
        yield client


def contents(opened: MongoClient[Any]) -> dict[str, list[Any]]:
    database = opened["refused"]
    return {name: list(database[name].find()) for name in sorted(database.list_collection_names())}


def check(error: DeclarationError, case: Case) -> None:
    assert "transactions-needed" == error.code
    assert str(error).startswith(f"{case.label} needs transactions")
    assert "restart mongod with --replSet rs0, then run rs.initiate() once in mongosh" in str(error)


@EACH
def test_a_store_refuses_it(opened, case):
    before = contents(opened)
    with pytest.raises(DeclarationError) as refused:
        case.act(Store(opened["refused"], [case.model]))
    check(refused.value, case)
    assert before == contents(opened)


@EACH
def test_an_async_store_refuses_it(alone, opened, case):
    before = contents(opened)

    async def act() -> None:
        async with AsyncMongoClient[Any](alone.uri) as own:
            await case.act(AsyncStore(own["refused"], [case.model]))

    with pytest.raises(DeclarationError) as refused:
        asyncio.run(act())
    check(refused.value, case)
    assert before == contents(opened)


def test_a_flush_from_memory_is_refused_and_loses_nothing(alone, opened):
    before = contents(opened)

    async def act() -> None:
        async with AsyncMongoClient[Any](alone.uri) as own:
            counter = AsyncStore(own["refused"], [Visited]).counter(Visited, "views")
            await counter.add(7)
            with pytest.raises(DeclarationError) as refused:
                await counter.flush()
            check(refused.value, Case("", Visited, "Visited.views: approximation", print))
            assert {7: 1} == await counter.pending()

    asyncio.run(act())
    assert before == contents(opened)


def test_sampled_counters_are_kept(opened):
    opened.drop_database("refused")
    with Store(opened["refused"], [Page]) as store:
        store.setup()
        store.insert(Page())
        store.counter(Page, "shares").add(1)
    assert [(1, 1)] == [(each["_id"], each["shares"]) for each in contents(opened)["pages"]]


@EACH
def test_a_replica_set_takes_it(database, case):
    """So that it is the server, and not the declaration, that was refused."""
    database[case.model.__treadle__.collection].insert_one({"_id": 7, "members": [], "likes": 0})
    store = Store(database, [case.model])
    case.act(store)
    store.close()
