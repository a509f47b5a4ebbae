"""A declaration is changed under load, by processes that are killed: nobody sees what neither would give."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import DuplicateKeyError, PyMongoError

from tests import mill
from tests.faults import Heard
from tests.upkeep.changed_shop import FIELDS, Before, During, Review, given, shown
from treadle import Limits, Store
from treadle.errors import TreadleError

pytestmark = pytest.mark.heavy

WAIT_SECONDS_MAX = 60.0
WRITES = ["insert", "update", "findAndModify", "commitTransaction"]
LIMITS = Limits(rebuild_page=4, swap_page=4)
PRODUCTS, KILLS, WRITERS = 12, 3, 2


def change_until(uri: str, database: str, back: bool, skip: int) -> None:
    """Build and swap, or take it back, and die just before a write, after `skip` of them."""
    heard = Heard()
    client: MongoClient[Any] = MongoClient(uri, event_listeners=[heard])
    store = Store(client[database], [Review, During], limits=LIMITS)
    store.recover()
    heard.clear()
    heard.before(WRITES, skip, lambda: os.kill(os.getpid(), signal.SIGKILL))
    change(store, back)


def change(store: Store, back: bool) -> None:
    if not back:
        store.rebuild(During, shadow=True)
        return
    for each in store.changes():
        if each.shows == "new" or each.state == "swapping":
            store.undo_rebuild(each.rule)


class Load:
    """Writers that go on whatever happens, and a reader who compares what one moment shows."""

    def __init__(self, uri: str, name: str, keys: list[Any]) -> None:
        self.uri, self.name, self.keys = uri, name, keys
        self.stop = threading.Event()
        self.wrong: list[Any] = []
        self.seen: set[str] = set()
        self.looks = 0
        works = [(self._write, number) for number in range(WRITERS)]
        self.threads = [threading.Thread(target=work, args=(number,)) for work, number in works]
        self.threads.append(threading.Thread(target=self._read))

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT_SECONDS_MAX)

    def _write(self, number: int) -> None:
        chance, mine = random.Random(number), list[Any]()
        with MongoClient[Any](self.uri) as client:
            store = Store(client[self.name], [Review, During])
            while not self.stop.wait(0.005):
                identity, rating = ObjectId(), chance.randint(1, 5)
                try:
                    if mine and chance.random() < 0.4:
                        store.update(Review, chance.choice(mine), {"$set": {"rating": rating}})
                    elif mine and chance.random() < 0.3:
                        store.delete(Review, mine.pop())
                    else:
                        new = Review(id=identity, product_id=chance.choice(self.keys), rating=rating)
                        store.insert(new)
                        mine.append(identity)
                except (PyMongoError, TreadleError, DuplicateKeyError):
                    # Sessions of those that were killed are ended with everybody's; it goes on with others.
                    continue

    def _read(self) -> None:
        with MongoClient[Any](self.uri) as client:
            database = client[self.name]
            while not self.stop.is_set():
                try:
                    with client.start_session(snapshot=True) as session:
                        products = list(database["products"].find(session=session))
                        reviews = list(database["reviews"].find(session=session))
                except PyMongoError:
                    continue
                self.looks += 1
                for each in products:
                    self._compare(
                        each, [one["rating"] for one in reviews if one["product_id"] == each["_id"]]
                    )

    def _compare(self, product: Any, ratings: list[int]) -> None:
        stored, old, new = shown(product), given(ratings, "old"), given(ratings, "new")
        for name in FIELDS:
            if not any(_same(stored[name], each[name]) for each in (old, new)):
                self.wrong.append((name, stored[name], old[name], new[name]))
            elif old[name] != new[name]:
                self.seen.add("old" if _same(stored[name], old[name]) else "new")


def _same(one: Any, other: Any) -> bool:
    close = isinstance(one, float) and isinstance(other, float) and abs(one - other) < 1e-9
    return close or one == other


def test_no_reader_sees_what_neither_declaration_would_give(server, database):
    store = Store(database, [Review, Before])
    store.setup()
    keys = [each.id for each in store.insert_many([Before() for _ in range(PRODUCTS)])]
    store.insert_many([Review(product_id=key, rating=number % 5 + 1) for key in keys for number in range(3)])
    both, chance = Store(database, [Review, During], limits=LIMITS), random.Random(5)
    both.setup()
    with Load(server.uri, database.name, keys) as load:
        for back in (False, True, False):
            for _ in range(KILLS):
                skip = chance.randrange(1, 90)
                process = mill.start(change_until, server.uri, database.name, back, skip)
                process.join(WAIT_SECONDS_MAX)
                assert process.exitcode in (0, -signal.SIGKILL)
                # What it held locked is let go at once, and not after a minute.
                database.client.admin.command({"killAllSessions": []})
            change(both, back)
            assert {"old" if back else "new"} == {each.shows for each in both.changes()}
    assert [] == load.wrong[:5]
    assert {"old", "new"} == load.seen
    assert load.looks > KILLS
    assert [] == both.verify()
    ratings: dict[Any, list[int]] = {key: [] for key in keys}
    for each in database["reviews"].find():
        ratings[each["product_id"]].append(each["rating"])
    for each in database["products"].find():
        expected = given(ratings[each["_id"]], "new")
        assert all(_same(expected[name], shown(each)[name]) for name in FIELDS)
