"""Ids that no document can have: refused when they are added, or reported by the flush; the others count."""

from __future__ import annotations

import multiprocessing
from decimal import Decimal
from typing import Annotated, Any

import pytest

from tests.patterns.approximation.products import NEVER
from treadle import Approximate, Document, Store, UsageError

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


@pytest.mark.parametrize("key", [LONE, LONG, "a" + LONE], ids=["lone", "long", "part"])
def test_one_odd_id_jams_nobody(run, database, key, caplog):
    """Single events are not looked at when they come; the flush reports them and goes on."""
    counter = opened(run).counter(Page, "views")
    counter.add("a")
    for each in (key, "a", "bé", key, "a"):
        counter.add(each)
    done = counter.flush()
    assert ({key: 2}, 2) == (done.unknown, done.documents)
    assert {key: 2} == counter.unknown
    assert {} == counter.pending()
    assert len(caplog.text) < 2_000
    counter.add("a")
    assert {} == counter.flush().unknown
    assert {"a": 4, "bé": 1} == {each["_id"]: each["views"] for each in database.pages.find()}
    assert [] == list(database["treadle.batches"].find({"n": {"$lt": 1}}))


def test_a_whole_number_beyond_64_bits(run, database):
    counter = opened(run).counter(Room, "views")
    counter.add(1)
    for key in (1, 2**70, -(2**63) - 1, 1):
        counter.add(key)
    assert {2**70: 1, -(2**63) - 1: 1} == counter.flush().unknown
    assert 3 == database.rooms.find_one()["views"]


@pytest.mark.parametrize("field", ["views", "likes", "hits"])
def test_what_is_looked_at_anyhow_is_refused(run, database, field):
    """Several at once, durable and sampled: nothing of the call is counted."""
    store = opened(run)
    counter = store.counter(Page, field)
    for key in (LONE, LONG):
        with pytest.raises(UsageError) as caught:
            counter.add_many({"a": 5, key: 2})
        assert ("id-invalid", True) == (caught.value.code, len(str(caught.value)) < 500)
        with pytest.raises(UsageError):
            counter.read(key)
    counter.add_many({"a": 2})
    counter.flush()
    assert 2 == counter.read("a", exact=True)
    with pytest.raises(UsageError):
        store.counter(Room, "views").add_many({2**70: 3})
    for key in (Decimal("NaN"), Decimal("1" * 40), Decimal("sNaN"), ["no", "id"]):
        with pytest.raises(UsageError):
            store.counter(Priced, "views").add(key)
    with pytest.raises(UsageError):
        store.counter(Visited, "views").add_many({b"x" * 16_000: 1})


def test_many_long_ids_go_in_several_commands(run, database, constants):
    """Each may be sent, all of them together may not."""
    constants(counter_key_bytes_max=3_000_000)
    counter = opened(run).counter(Visited, "views")
    keys = [b"%d" % number + b"x" * 40_000 for number in range(450)]
    for key in keys:
        counter.add(key)
    assert {} == counter.flush().unknown
    assert 450 == database.visited.count_documents({"views": 1})


def _count_in_child(uri: str, name: str) -> None:
    store = Store.open(f"{uri.split('/?')[0]}/{name}?{uri.partition('?')[2]}", models=[Page])
    counter = store.counter(Page, "views")
    for key in ("a", LONE, "a", LONG):
        counter.add(key)
    # No flush: the end of the process does it.


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.all)])
def test_at_the_end_of_a_process_the_others_are_counted(server, database, method):
    with Store(database, models=[Page]) as store:
        store.setup()
        store.insert(Page(id="a"))
    process = multiprocessing.get_context(method).Process(
        target=_count_in_child, args=(server.uri, database.name)
    )
    process.start()
    process.join(60)
    assert 0 == process.exitcode
    assert 2 == database.pages.find_one()["views"]
