"""Transactions of the asyncio shell, run again after a transient failure.

They are retried until the caller's deadline, or for as long as the server may hold the locks of a client
that was killed; then the caller gets `TimedOut`. The driver's own loop ends after two minutes whatever
the client's options say, and waits for a server before it aborts a failed transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import ExecutionTimeout, PyMongoError, ServerSelectionTimeoutError

from treadle.plan.server_errors import (
    OUTCOME_UNKNOWN,
    is_outcome_unknown,
    is_transient,
    lacks_sessions,
    surely_not_committed,
)
from treadle.store import common, deadline
from treadle.store.deadline import Retries, TimedOut

# How long the abort of a failed transaction may take.
ABORT_SECONDS = 0.5

R = TypeVar("R")


async def in_transaction(
    session: AsyncClientSession, work: Callable[[AsyncClientSession], Awaitable[R]], lock_seconds: float
) -> R:
    """Run `work` and commit. Returns what it returns; raises `TimedOut` where conflicts do not end."""
    retries = Retries(lock_seconds)
    while True:
        await session.start_transaction(**common.TRANSACTION_OPTIONS)
        try:
            result = await work(session)
            # One that is over already was ended by the work itself.
            if session.in_transaction:
                await commit(session, retries)
            return result
        except BaseException as error:
            await abort(session, error)
            may_run_again = _may_run_again(error)
            if retries.over() and (may_run_again or (retries.has_deadline and _ran_out_of_time(error))):
                raise retries.timed_out() from error
            if not may_run_again:
                raise
        await asyncio.sleep(retries.pause(random.random()))


async def commit(session: AsyncClientSession, retries: Retries) -> None:
    """Commit, and again while the outcome is unknown. Raises the first error of these, which says so."""
    lost: PyMongoError | None = None
    while True:
        try:
            return await session.commit_transaction()
        except PyMongoError as error:
            if is_transient(error) and not is_outcome_unknown(error):
                # The server says that it never was, and never will be.
                raise
            unknown = is_outcome_unknown(error)
            if lost is None and not unknown and session._transaction.attempt > 1:
                # The driver has sent it twice by itself, and tells of the second time alone.
                error._add_error_label(OUTCOME_UNKNOWN)
                unknown = True
            if lost is None and not unknown:
                raise
            # A later one may say for certain that nothing was committed, and means its own attempt.
            lost = lost or error
            out_of_time = isinstance(error, (ServerSelectionTimeoutError, ExecutionTimeout))
            if out_of_time or retries.over() or not (unknown or lacks_sessions(error)):
                raise lost from None
        await asyncio.sleep(retries.pause(random.random()))


async def abort(session: AsyncClientSession, error: BaseException | None = None) -> None:
    """Abort a transaction, so that it releases its documents, even after its caller's deadline."""
    if not session.in_transaction:
        return
    # Where no server was found to run it on, none is found to abort it on.
    unreachable = isinstance(error, ServerSelectionTimeoutError)
    with (
        contextlib.suppress(PyMongoError),
        deadline.instead(deadline.AT_ONCE_SECONDS if unreachable else ABORT_SECONDS),
    ):
        await session.abort_transaction()


def _may_run_again(error: BaseException) -> bool:
    # The client's options say how long to wait for a server, and that time has passed.
    if isinstance(error, ServerSelectionTimeoutError):
        return False
    return lacks_sessions(error) or (is_transient(error) and not is_outcome_unknown(error))


def _ran_out_of_time(error: BaseException) -> bool:
    """Whether the driver ended a command because of a deadline, and nothing was committed."""
    if not isinstance(error, PyMongoError) or isinstance(error, TimedOut):
        return False
    return error.timeout and surely_not_committed(error)
