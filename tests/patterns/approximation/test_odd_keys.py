"""Ids that no document can have are refused when they are added; the others count.

Covers: patterns/approximation/counter_field
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import pytest

from tests.patterns.approximation.products import NEVER
from treadle import Approximate, Document, UsageError

LONE, LONG = "\ud800", "x" * 17_000_000


class Page(Document, collection="pages"):
    id: str
    views: Annotated[int, Approximate(every=10**6, within=NEVER)] = 0
    likes: Annotated[int, Approximate(every=10**6, within=NEVER, buffer="durable")] = 0
    hits: Annotated[int, Approximate(every=1, buffer="sampled")] = 0


class Room(Document, collection="rooms"):
    id: int
    views: Annotated[int, Approximate(every=10**6, within=NEVER)] = 0


class Priced(Document, collection="priced"):
    id: Decimal
    views: Annotated[int, Approximate(every=10**6, within=NEVER)] = 0


class Visited(Document, collection="visited"):
    page: bytes
    views: Annotated[int, Approximate(every=10**6, within=NEVER, by="page", upsert=True)] = 0


def opened(run: Any, **options: Any) -> Any:
    store = run.store([Page, Room, Priced, Visited], **options)
    store.setup()
    store.insert(Page(id="a"))
    store.insert(Page(id="bé"))
    store.insert(Room(id=1))
    return store


@pytest.mark.parametrize("field", ["views", "likes", "hits"])
def test_an_id_that_cannot_be_stored_is_refused_when_it_is_added(run, database, field):
    """Alone and among others, of which nothing is counted; those before and after it are."""
    store = opened(run)
    counter = store.counter(Page, field)
    counter.add("a")
    for key in (LONE, LONG, "a" + LONE):
        for add in (lambda key=key: counter.add(key), lambda key=key: counter.add_many({"a": 5, key: 2})):
            with pytest.raises(UsageError) as refused:
                add()
            assert ("id-invalid", True) == (refused.value.code, len(str(refused.value)) < 500)
        with pytest.raises(UsageError):
            counter.read(key)
    counter.add("bé")
    counter.flush()
    assert {"a": 1, "bé": 1} == {each["_id"]: each[field] for each in database["pages"].find()}
    assert {} == counter.unknown


def test_keys_of_other_types_are_bounded_too(run, database):
    store = opened(run)
    rooms = store.counter(Room, "views")
    rooms.add(1)
    for key in (2**63, 2**70, -(2**63) - 1):
        with pytest.raises(UsageError):
            rooms.add(key)
        with pytest.raises(UsageError):
            rooms.add_many({key: 3})
    rooms.add(1)
    assert ({}, 2) == (rooms.flush().unknown, database["rooms"].find_one()["views"])
    for key in (Decimal("NaN"), Decimal("1" * 40), Decimal("sNaN"), ["no", "id"]):
        with pytest.raises(UsageError):
            store.counter(Priced, "views").add(key)
    with pytest.raises(UsageError):
        store.counter(Visited, "views").add(b"x" * 16_000)


def test_many_long_ids_go_in_several_commands(run, database, constants):
    """Each may be sent, all of them together may not."""
    constants(counter_key_bytes_max=3_000_000)
    counter = opened(run).counter(Visited, "views")
    keys = [b"%d" % number + b"x" * 40_000 for number in range(450)]
    for key in keys:
        counter.add(key)
    assert {} == counter.flush().unknown
    assert 450 == database.visited.count_documents({"views": 1})
