"""A client is killed inside of a transaction: writers of the same documents wait for the server to end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Annotated, Any

import pytest

from tests.support import transaction_lifetime
from treadle import Count, Document, Store
from treadle.server import start


class Order(Document, collection="orders"):
    id: int
    customer_id: int


class Customer(Document, collection="customers"):
    id: int
    orders: Annotated[int, Count(Order, by="customer_id")] = 0


def die_inside(uri: str) -> None:
    """Open a transaction on the customer and kill this process."""
    store = Store.open(uri, models=[Order, Customer])
    with store.transaction():
        store.insert(Order(id=1, customer_id=1))
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_killed_client(uri: str, *, in_transaction: bool) -> float:
    """Return how long an insert waited for the locks of a client that was killed."""
    with Store.open(uri, models=[Order, Customer]) as store:
        store.setup()
        store.insert(Customer(id=1))
        killed = subprocess.run([sys.executable, "-m", __name__, uri], check=False)
        assert -signal.SIGKILL == killed.returncode
        started, order = time.monotonic(), Order(id=2, customer_id=1)
        if in_transaction:
            store.with_transaction(lambda session: store.insert(order, session=session))
        else:
            store.insert(order)
        seconds = time.monotonic() - started
        assert (1, []) == (store.require(Customer, 1).orders, store.verify())
    return seconds


@pytest.mark.parametrize("in_transaction", [False, True])
def test_writers_wait_until_the_server_ends_a_killed_transaction(
    server: Any, database: Any, in_transaction: bool
) -> None:
    uri = server.uri.replace("/?", f"/{database.name}?")
    with transaction_lifetime(database.client, 1):
        seconds = wait_for_a_killed_client(uri, in_transaction=in_transaction)
    assert seconds > 0.1, "nothing was locked"


@pytest.mark.all
@pytest.mark.heavy
def test_writers_wait_for_as_long_as_a_server_with_defaults_takes() -> None:
    """Its limit is 60 s, and it looks every 30 s: a retry for a minute would be too short."""
    with start() as server:
        seconds = wait_for_a_killed_client(server.uri.replace("/?", "/killed?"), in_transaction=False)
    assert seconds > 60, "the locks ended earlier than a server with defaults ends them"


if __name__ == "__main__":
    die_inside(sys.argv[1])
