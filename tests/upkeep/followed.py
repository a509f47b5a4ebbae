"""Sales and shops whose totals the worker keeps, and how to let it catch up."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Annotated, Any

from treadle import Average, Count, Document, Id, Store, Sum
from treadle.upkeep.stream import Follower

Raw = dict[str, Any]


def settled(store: Any) -> int:
    """Let the worker catch up; nothing is wrong then."""
    handled = store.worker().run_until_idle()
    assert [] == store.verify()
    return handled


def has_former_states(database: Any, collection: str) -> bool:
    """Whether the server keeps them for a collection."""
    (listed,) = database.list_collections(filter={"name": collection})
    return bool(listed["options"].get("changeStreamPreAndPostImages", {}).get("enabled"))


def without_former_states(database: Any, *collections: str) -> None:
    """Let the server keep none, if it ever did."""
    for name in filter(lambda name: has_former_states(database, name), collections):
        database.command({"collMod": name, "changeStreamPreAndPostImages": {"enabled": False}})


@contextlib.contextmanager
def leading(store: Store) -> Generator[tuple[Follower, Any]]:
    """A follower that leads, to be stepped by hand, and what performs its plans."""
    with store.runner.database.client.start_session() as session:
        follower = store.worker()._following(store._capabilities(), session, "follower")
        assert store.runner.run(follower.lead(), session)
        yield follower, lambda plan: store.runner.run(plan, session)


def read(follower: Follower, run: Any) -> list[Any]:
    """The next events, once there are any."""
    batch: list[Any] = []
    while not batch:
        batch = run(follower._read(0.5))
    return batch


class Sale(Document, collection="sales"):
    shop_id: Id | None = None
    amount: int = 0
    open: bool = True


class Shop(Document, collection="shops"):
    name: str = "shop"
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream", where={"open": True})] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    mean: Annotated[float | None, Average(Sale, "amount", by="shop_id", maintain="stream")] = None


def of(database: Any, collection: str, key: Any) -> Raw:
    found = database[collection].find_one({"_id": key})
    assert found is not None
    return {name: value for name, value in found.items() if name not in ("_id", "_treadle")}
