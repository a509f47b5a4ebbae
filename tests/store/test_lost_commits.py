"""Commits whose replies are lost, or that are cut off: done once, told truly, and nobody else is held up.

Covers: store/async_runner, plan/server_errors
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pymongo
import pytest
from benchmarks.torture.journal import outcome_of
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import AutoReconnect, ConfigurationError, ExecutionTimeout, OperationFailure, PyMongoError
from pymongo.synchronous.client_session import ClientSession

from tests.kit import faults
from tests.kit.command_log import CommandLog
from tests.support import long_transactions
from treadle import AsyncStore, Document, Store
from treadle.plan.server_errors import OUTCOME_UNKNOWN


class Note(Document, collection="notes"):
    id: int
    edits: int = 0


def edit(store: Store) -> Callable[[Any], Any]:
    return lambda session: store.update(Note, 1, {"$inc": {"edits": 1}}, session=session)


@pytest.fixture
def store(database: Any) -> Store:
    made = Store(database, [Note])
    made.insert(Note(id=1))
    return made


def losing_the_reply(monkeypatch: pytest.MonkeyPatch, *then: PyMongoError) -> list[PyMongoError]:
    """The first commit is done and its reply lost; those after it fail as told, before anything is sent."""
    commit, errors = ClientSession.commit_transaction, [None, *then]

    def lossy(session: ClientSession) -> None:
        if not errors:
            return commit(session)
        error = errors.pop(0)
        if error is None:
            commit(session)
            error = AutoReconnect("the reply was lost")
            error._add_error_label(OUTCOME_UNKNOWN)
        raise error

    monkeypatch.setattr(ClientSession, "commit_transaction", lossy)
    return errors


def test_a_member_that_has_only_just_started_makes_nobody_commit_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of no sessions yet, which before the first commit would be a reason to begin again."""
    left = losing_the_reply(
        monkeypatch, ConfigurationError("Sessions are not supported by this MongoDB deployment")
    )
    store.with_transaction(edit(store))
    assert [] == left
    assert 1 == store.require(Note, 1).edits


def test_a_later_error_does_not_say_that_nothing_was_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing_the_reply(monkeypatch, OperationFailure("not authorized", 13))
    with pytest.raises(AutoReconnect) as raised:
        store.with_transaction(edit(store))
    assert "unknown" == outcome_of(raised.value)
    assert 1 == store.require(Note, 1).edits


def test_a_session_that_was_given_up_is_lent_to_nobody(store: Store) -> None:
    """Ending it would interrupt whatever they do."""
    sessions = []

    def too_late(session: ClientSession) -> None:
        edit(store)(session)
        sessions.append(session.session_id)
        raise ExecutionTimeout("too late", 50)

    with pytest.raises(ExecutionTimeout):
        store.with_transaction(too_late)
    with store.database.client.start_session() as session:
        assert session.session_id not in sessions


def test_a_commit_that_is_cancelled_before_it_is_sent_holds_nothing(
    server: Any, store: Store, monkeypatch: pytest.MonkeyPatch, constants: Any
) -> None:
    """The driver takes it for committed, and the server would hold its documents for a minute."""
    finish = AsyncClientSession._finish_transaction_with_retry

    async def cancelled(session: AsyncClientSession, command: str) -> Any:
        if command == "commitTransaction":
            raise asyncio.CancelledError
        return await finish(session, command)

    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri) as client:
            constants(discard_seconds=60.0)
            awaited = AsyncStore(client[store.database.name], [Note])
            update = {"$inc": {"edits": 1}}
            with pytest.raises(asyncio.CancelledError):
                await awaited.with_transaction(
                    lambda session: awaited.update(Note, 1, update, session=session)
                )

    monkeypatch.setattr(AsyncClientSession, "_finish_transaction_with_retry", cancelled)
    with long_transactions(store.database.client):
        asyncio.run(scenario())
        with pymongo.timeout(30):
            store.update(Note, 1, {"$inc": {"edits": 1}})
    assert 1 == store.require(Note, 1).edits


def in_a_block(store: Store, work: Callable[[Any], Any]) -> None:
    with store.transaction() as session:
        work(session)


@pytest.mark.parametrize("begin", [Store.with_transaction, in_a_block])
def test_a_transaction_whose_abort_is_lost_holds_nothing(server: Any, store: Store, begin: Any) -> None:
    name = store.database.name
    with (
        long_transactions(store.database.client),
        faults.Proxy(server) as proxy,
        MongoClient[Any](proxy.uri) as client,
    ):
        lossy = Store(client[name], [Note])

        def refused(session: ClientSession) -> None:
            edit(lossy)(session)
            raise ZeroDivisionError

        lost = proxy.close_before(0, names=["abortTransaction"], times=10**6)
        with lost, pytest.raises(ZeroDivisionError):
            begin(lossy, refused)
        # It is ended at once if the server can be reached in time, else before the next transaction.
        lossy.with_transaction(lambda session: None)
        with pymongo.timeout(30):
            store.update(Note, 1, {"$inc": {"edits": 1}})
    assert 1 == store.require(Note, 1).edits


def test_the_second_attempt_of_the_driver_itself_does_not_say_that_nothing_was_committed(
    server: Any, store: Store
) -> None:
    """A new primary may know nothing of the commit, and have no majority behind it that would tell."""
    name, heard = store.database.name, CommandLog()
    with (
        faults.Proxy(server) as proxy,
        MongoClient[Any](proxy.uri, appname="twice", event_listeners=[heard]) as client,
    ):
        lossy = Store(client[name], [Note])
        lossy.update(Note, 1, {"$inc": {"edits": 1}})
        no_such: dict[str, Any] = {"errorCode": 251, "errorLabels": []}
        refused = faults.fail_point(
            store.database.client,
            heard,
            skip=1,
            times=1,
            app="twice",
            commands=["commitTransaction"],
            **no_such,
        )
        with proxy.drop_reply(0, names=["commitTransaction"]), refused:
            lossy.with_transaction(edit(lossy))
    assert 2 == store.require(Note, 1).edits


@pytest.mark.parametrize("times", [1, 2])
def test_what_was_given_up_is_ended_by_the_next_if_one_is_cancelled_while_it_does_so(
    server: Any, store: Store, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    command = AsyncDatabase.command
    cuts = [asyncio.CancelledError(), ExecutionTimeout("too late", 50)][:times]

    async def cut_off(database: AsyncDatabase[Any], document: Any, *arguments: Any, **options: Any) -> Any:
        if "killSessions" in document and cuts:
            raise cuts.pop()
        return await command(database, document, *arguments, **options)

    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri) as client, client.start_session() as session:
            awaited = AsyncStore(client[store.database.name], [Note])
            await session.start_transaction()
            await awaited.update(Note, 1, {"$inc": {"edits": 1}}, session=session)
            awaited.runner._abandoned.append(session.session_id)
            for _ in range(times):
                with contextlib.suppress(asyncio.CancelledError):
                    await awaited.runner._end_abandoned()
            assert [session.session_id] == list(awaited.runner._abandoned)
            with pymongo.timeout(30):
                await awaited.with_transaction(
                    lambda current: awaited.update(Note, 1, {"$inc": {"edits": 1}}, session=current)
                )

    monkeypatch.setattr(AsyncDatabase, "command", cut_off)
    with long_transactions(store.database.client):
        asyncio.run(scenario())
    assert 1 == store.require(Note, 1).edits
