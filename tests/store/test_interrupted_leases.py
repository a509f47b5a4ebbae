"""Ctrl-C, or a cancelled task, in the middle of long work: its lease is free at once, for every process."""

from __future__ import annotations

import asyncio
import datetime as dt
from datetime import timedelta
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient

from treadle import AsyncStore, Count, Document, Store, migration
from treadle.engine import lease


class Thing(Document, collection="things", version=2):
    group_id: int = 0
    name: str = ""


PAUSE: list[Any] = []


@migration(Thing, from_version=1)
def _interrupted(document: dict[str, Any]) -> dict[str, Any]:
    if PAUSE:
        raise PAUSE[0]
    return document


class Group(Document, collection="groups"):
    id: int
    number: Annotated[int, Count(Thing, by="group_id", maintain="stream")] = 0


class Later(Document, collection="later"):
    id: int
    number: Annotated[int, Count(Thing, by="group_id", maintain="schedule", every=timedelta(minutes=1))] = 0


MODELS = [Thing, Group, Later]
WORKS = {
    "migrate": lambda store: store.migrate(Thing),
    "worker": lambda store: store.worker().run_until_idle(),
    "run_due": lambda store: store.run_due(now=dt.datetime.now(dt.UTC)),
}


@pytest.fixture
def prepared(database):
    store = Store(database, MODELS)
    store.setup()
    store.insert_many([Group(id=0), Later(id=0)][:1])
    store.insert(Later(id=0))
    database["things"].insert_one({"group_id": 0, "name": "old"})
    PAUSE.clear()
    yield store
    PAUSE.clear()


def held(database: Any) -> list[str]:
    return [row["_id"] for row in database[lease.COLLECTION].find({"owner": {"$ne": ""}})]


@pytest.mark.parametrize("work", WORKS)
def test_ctrl_c(database, prepared, work):
    PAUSE.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        WORKS[work](prepared)
    assert [] == held(database)
    PAUSE.clear()
    WORKS[work](prepared)
    assert [] == held(database)


@pytest.mark.parametrize("work", WORKS)
def test_a_cancelled_task(server, database, prepared, work):
    async def cancelled() -> list[str]:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            PAUSE.append(asyncio.CancelledError())
            with pytest.raises(asyncio.CancelledError):
                await WORKS[work](store)
            free = held(database)
            PAUSE.clear()
            await WORKS[work](store)
            return free

    assert [] == asyncio.run(cancelled())
