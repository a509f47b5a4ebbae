"""Counters and the life of processes: exit, SIGTERM, fork, kill -9.

Covers: store/counter_exit
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Annotated, Any

import pytest
from pymongo import MongoClient

from tests.kit import processes
from tests.kit.tiers import IS_FULL
from treadle import Approximate, Document, Store
from treadle.server.local import LocalServer, start

pytestmark = pytest.mark.heavy

NEVER = timedelta(hours=1)
KILLS = 20 if IS_FULL else 5
SECONDS_MAX = 60.0


class Post(Document, collection="posts"):
    id: int
    views: Annotated[int, Approximate(every=10**6, within=NEVER)] = 0
    likes: Annotated[int, Approximate(every=10**6, within=NEVER, buffer="durable")] = 0


@pytest.fixture(scope="module")
def fork_server() -> None:
    processes.prepare()


SCRIPT = f"""
import os, signal, sys, threading, time
from pymongo import MongoClient
from {__name__} import Post
from treadle import Store

store = Store(MongoClient(sys.argv[1])[sys.argv[2]], [Post])
counter = store.counter(Post, "views")
counter.add(1, 3)

def wait_for_a_signal():
    print('ready', flush=True)
    for _ in range(1200):  # A signal between two sleeps is handled after the next one.
        time.sleep(0.05)

"""


def script(server: LocalServer, database: Any, body: str, *, first: str = "") -> subprocess.Popen[str]:
    """A process that counts three views and then does something."""
    return subprocess.Popen(
        [sys.executable, "-c", first + SCRIPT + textwrap.dedent(body), server.uri, database.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
    )


def views(database: Any) -> int:
    return int(database["posts"].find_one({"_id": 1})["views"])


@pytest.fixture
def posts(database: Any) -> Any:
    Store(database, [Post]).insert(Post(id=1))
    return database


def test_what_is_pending_is_written_at_exit(server, posts):
    process = script(server, posts, "")
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert (0, "") == (process.returncode, errors)
    assert 3 == views(posts)


EARLIER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
"""
LATER = """
import signal

def last_words(number, frame):
    print('bye', flush=True)
    earlier(number, frame)

earlier = signal.signal(signal.SIGTERM, last_words)
"""
# Code before the counter is made, and after it; the exit status, and what is printed.
HANDLERS = {
    "none": ("", "", 143, ""),
    "one that was there": (EARLIER, "", 7, ""),
    "one that calls the one it replaced": ("", LATER, 143, "bye"),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_is_pending_is_written_on_sigterm(server, posts, handler):
    first, then, status, words = HANDLERS[handler]
    process = script(server, posts, f"{then}wait_for_a_signal()\n", first=first)
    assert process.stdout is not None
    assert "ready" == process.stdout.readline().strip()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SECONDS_MAX)
    assert (words, status, 3) == (output.strip(), process.returncode, views(posts))


def test_a_forked_child_begins_with_an_empty_buffer(server, posts):
    """Parent and child would otherwise both write the three."""
    body = """
    child = os.fork()
    if child == 0:
        assert {} == counter.pending(), counter.pending()
        store.runner.database.client.close()
        counter.add(1, 10)
        counter._store = Store(MongoClient(sys.argv[1])[sys.argv[2]], [Post])
        sys.exit(0)
    assert 0 == os.waitpid(child, 0)[1]
    assert {1: 3} == counter.pending()
    """
    process = script(server, posts, body)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert 0 == process.returncode, errors
    assert 13 == views(posts)


def test_a_child_of_multiprocessing_writes_at_its_end(server, posts):
    body = """
    import multiprocessing
    def work():
        counter._store = Store(MongoClient(sys.argv[1])[sys.argv[2]], [Post])
        counter.add(1, 10)
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert 0 == child.exitcode
    """
    process = script(server, posts, body)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert 0 == process.returncode, errors
    assert 13 == views(posts)


# -- kill -9 --------------------------------------------------------------------------------------


def like(uri: str, database: str, key: int, told: Any) -> None:
    """Add durable events for ever, and tell how many were acknowledged."""
    counter = Store(MongoClient[Any](uri)[database], [Post]).counter(Post, "likes")
    while True:
        counter.add(key)
        told.send(1)


def flush_for_ever(uri: str, database: str) -> None:
    counter = Store(MongoClient[Any](uri)[database], [Post]).counter(Post, "likes")
    while True:
        counter.flush()


@pytest.fixture(scope="module")
def brief() -> Generator[LocalServer]:
    """A server that soon gives up the transactions of killed clients."""
    with start(parameters={"enableTestCommands": 1, "transactionLifetimeLimitSeconds": 1}) as server:
        yield server


def test_two_flushers_and_many_kills_lose_and_double_nothing(brief, fork_server):
    """Writers are killed too: an event that was acknowledged is there, one that was not may be."""
    client = MongoClient[Any](brief.uri)
    store = Store(client["killed"], [Post])
    store.setup()
    store.insert_many([Post(id=1), Post(id=2)])
    chance = random.Random(5)
    acknowledged = started = kills = 0
    flushers: list[Any] = []
    writer: Any = None
    pipes: list[Any] = []
    while kills < KILLS:
        if writer is None:
            receiving, sending = processes.CONTEXT.Pipe(duplex=False)
            writer = processes.CONTEXT.Process(
                target=like, args=(brief.uri, "killed", 1 + started % 2, sending)
            )
            writer.start()
            sending.close()
            pipes.append(receiving)
            started += 1
        while len(flushers) < 2:
            flushers.append(processes.CONTEXT.Process(target=flush_for_ever, args=(brief.uri, "killed")))
            flushers[-1].start()
        pipes[-1].poll(SECONDS_MAX)
        time.sleep(chance.uniform(0.15, 0.4))
        end(flushers.pop(0))
        kills += 1
        if kills % 5 == 0:
            end(writer)
            writer = None
            kills += 1
            acknowledged += told(pipes[-1])
    for process in [*flushers, *([writer] if writer else [])]:
        end(process)
    if writer:
        acknowledged += told(pipes[-1])
    client.admin.command({"killAllSessions": []})
    store.counter(Post, "likes").flush()
    counted = sum(post.likes for post in store.find(Post))
    assert acknowledged > KILLS
    # Each killed writer may have been waiting for one answer.
    assert acknowledged <= counted <= acknowledged + started
    assert {} == store.counter(Post, "likes").pending()
    client.close()


def end(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS_MAX)


def told(pipe: Any) -> int:
    """How many events a writer that has ended heard of."""
    heard = 0
    try:
        while pipe.poll(0):
            heard += pipe.recv()
    except EOFError:
        pass
    return heard
