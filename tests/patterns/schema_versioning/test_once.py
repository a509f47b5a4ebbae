"""One-off migrations: once per database, under a lease, and in the log."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from treadle import AsyncStore, Document, Limits, Store, UsageError

NAME = "2026-11 fill slugs"
CALLERS = 4
# Killed in the middle of its work, with the lease in its hands.
KILLED = """
import os, signal, sys
from treadle import Store
def work(store):
    os.kill(os.getpid(), signal.SIGKILL)
Store.open(sys.argv[1], []).migrate_once("killed", work)
"""


class Note(Document, collection="notes"):
    text: str = ""


def uri_of(server: Any, database: Any) -> str:
    return str(server.uri.replace("/?", f"/{database.name}?"))


def test_whoever_comes_second_waits_and_finds_it_done(server, database):
    ran: list[int] = []
    inside = threading.Semaphore()

    def work(store: Store) -> int:
        assert inside.acquire(blocking=False), "two at a time"
        store.insert(Note(text="once"))
        ran.append(1)
        inside.release()
        return 7

    def call(outcomes: list[bool]) -> None:
        with Store.open(uri_of(server, database), [Note]) as store:
            outcomes.append(store.migrate_once(NAME, work))

    outcomes: list[bool] = []
    threads = [threading.Thread(target=call, args=(outcomes,)) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [False] * (CALLERS - 1) + [True] == sorted(outcomes)
    assert 1 == database["notes"].count_documents({})
    store = Store(database, [Note])
    assert not store.migrate_once(NAME, work)
    (row,) = store.migration_log()
    assert (NAME, "done", 7, None) == (row.once, row.outcome, row.migrated, row.model)
    assert row.seconds is not None


def test_work_that_fails_is_begun_again(database):
    store = Store(database, [Note])

    def fail(_: Store) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.migrate_once(NAME, fail)
    assert store.migrate_once(NAME, lambda each: each.insert(Note(text="again")))
    assert ["done", "ZeroDivisionError"] == [each.outcome for each in store.migration_log()]


def test_work_that_was_killed_is_begun_again(server, database):
    process = subprocess.run([sys.executable, "-c", KILLED, uri_of(server, database)], check=False)
    assert -9 == process.returncode
    store = Store(database, [Note])
    assert store.migrate_once("killed", lambda each: None)
    assert {"done", None} == {each.outcome for each in store.migration_log()}


def test_what_was_done_is_never_forgotten(database):
    store = Store(database, [Note], limits=Limits(migrations_kept=2))
    for number in range(5):
        assert store.migrate_once(str(number), lambda each: None)
    for number in range(5):
        assert not store.migrate_once(str(number), lambda each: None)


def test_the_same_with_asyncio(server, database):
    async def work(store: Any) -> None:
        await store.insert(Note(text="async"))

    async def call() -> list[bool]:
        async with AsyncStore.open(uri_of(server, database), [Note]) as store:
            return [await store.migrate_once(NAME, work) for _ in range(2)]

    assert [True, False] == asyncio.run(call())
    assert 1 == database["notes"].count_documents({})


@pytest.mark.parametrize("name", ["", "  ", "x" * 201, 7])
def test_a_name_that_is_none_is_refused(database, name):
    with pytest.raises(UsageError, match="migration-option"):
        Store(database, [Note]).migrate_once(name, lambda each: None)


@pytest.mark.parametrize("work", [None, 3, "work"])
def test_work_that_is_no_function_is_refused(run, database, work):
    store = run.store([Note])
    with pytest.raises(UsageError, match="migration-option"):
        store.migrate_once("wrong", work)
    assert 0 == database["treadle.migrations"].count_documents({})
    assert 0 == database["treadle.leases"].count_documents({})


def test_work_of_the_other_shell_is_refused_and_not_taken_for_done(server, database):
    async def awaited(store: Any) -> None:
        raise AssertionError("never begun")

    with pytest.raises(UsageError, match="migration-option"):
        Store(database, [Note]).migrate_once("wrong", awaited)

    async def main() -> None:
        async with AsyncStore.open(uri_of(server, database), [Note]) as store:
            with pytest.raises(UsageError, match="migration-option"):
                await store.migrate_once("wrong", lambda store: None)

    asyncio.run(main())
    assert Store(database, [Note]).migrate_once("wrong", lambda store: store.insert(Note()))
