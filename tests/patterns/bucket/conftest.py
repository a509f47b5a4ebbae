"""A store that holds readings."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import MongoClient

from tests.kit.command_log import CommandLog
from tests.patterns.bucket.sensors import at, reading_with
from treadle import Document


@pytest.fixture
def filled(run):
    def fill(**options: Any) -> tuple[Any, type[Document]]:
        measured = reading_with(**options)
        store = run.store([measured])
        store.setup()
        store.insert_many(
            [
                measured(
                    sensor_id=key,
                    ts=at(minute),
                    temp=minute if minute % 3 else None,
                    label="$ts" if minute == 20 else "",
                )
                for minute in range(0, 180, 10)
                for key in ("a", "b")
            ]
        )
        store.rebuild()
        return store, measured

    return fill


@pytest.fixture
def overheard(server, database):
    """A database whose client notes its commands, and can do something just before one of them."""
    listener = CommandLog()
    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        client.admin.command("ping")
        yield client[database.name], listener
