"""The runner of the asyncio shell: it performs the commands of plans and knows no pattern.

Transactions are run again after a transient failure, until the caller's deadline or for as long as the server
may hold the locks of a client that was killed; then the caller gets `TimedOut`. The driver's own loop ends
after two minutes whatever the client's options say, and waits for a server before it aborts a failed
transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, TypeGuard, TypeVar

from bson.errors import InvalidBSON
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    ConnectionFailure,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from treadle.graph.limits import Limits
from treadle.graph.shards import Shards
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS, NAIVE_CODEC_OPTIONS, not_storable
from treadle.plan import (
    Call,
    Command,
    DatabaseCommand,
    IsInside,
    Outside,
    Plan,
    Raw,
    Read,
    ServerFacts,
    Share,
    Transact,
    Wait,
    not_fresh,
    unwind,
)
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.plan.decoding import (
    RAW_CODEC_OPTIONS,
    Unreadable,
    codec_options,
    decode_documents,
    unreadable_result,
)
from treadle.plan.server_errors import (
    OUTCOME_UNKNOWN,
    is_outcome_unknown,
    is_passing,
    is_transient,
    lacks_sessions,
    surely_not_committed,
)
from treadle.store import call_context, common
from treadle.store.async_batching import AsyncBatcher
from treadle.store.call_context import Retries, TimedOut, Transactions
from treadle.store.shared_commands import Shareable, lane_of, perform_together

# How long the abort of a failed transaction may take.
ABORT_SECONDS = 0.5
# How long its caller waits, if there is time, where the server may not have received that.
DISCARD_SECONDS = 3.0

R = TypeVar("R")
Session = AsyncClientSession | None
# Sessions of transactions that were given up, of which the latest are remembered.
ABANDONED_MAX = 1_000
# Groups of reads or of inserts by id that are under way at once, each full but the first.
COMMAND_GROUPS_MAX = 4


def _is_shared(command: Command, answers: bool) -> TypeGuard[Shareable]:
    """Whether a command may go together with others: of reads, only those that answer a caller."""
    if type(command) is Call:
        return bool(command.ids) and (answers or command.writes)
    return type(command) is Read and answers and bool(command.ids)


class AsyncRunner:
    """Performs the commands of plans on a `pymongo` database."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        facts: Callable[[], Awaitable[Capabilities]] | None = None,
        share: Callable[[Any, bool, Session], Awaitable[Any]] | None = None,
        limits: Limits | None = None,
        shards: Shards | None = None,
    ) -> None:
        # Only where there is anything to add to a command.
        self._shards = shards if shards is not None and shards.keys else None
        self._limits = limits or Limits()
        # Where there is no Store: the facts are asked for each time, and nothing is shared.
        self._facts = facts or (lambda: self.run(read_capabilities()))
        self._share = share
        # For the caller's own reads, which follow the client's read preference and concern.
        self.database = database.with_options(codec_options=CODEC_OPTIONS, write_concern=common.MAJORITY)
        # For everything else: what a write or a proof is decided by is never read from a secondary.
        self._primary = self.database.with_options(**common.OWN_READS)
        # The sessions of transactions that may still be open, the latest of them.
        self._abandoned: deque[Any] = deque(maxlen=ABANDONED_MAX)
        # For how long transactions are retried; of a server of which nothing is known yet, by its defaults.
        self.lock_seconds = Capabilities().lock_seconds
        # What callers' transactions have changed, and which of them are over before their block is.
        self.transactions = Transactions()
        self._collections: dict[str, AsyncCollection[Raw]] = {}
        self._own_collections: dict[str, AsyncCollection[Raw]] = {}
        # Whether commands go together; linearizable reads are those of one document.
        self.shares = (
            self._shards is None
            and self._limits.together_max > 1
            and database.read_concern.level != "linearizable"
        )
        # The commands that share round trips: by collection, and by kind of command.
        self._lanes: dict[tuple[str, str], AsyncBatcher] = {}

    def collection(self, name: str, *, own: bool = False) -> AsyncCollection[Raw]:
        """The collection as the caller's own reads see it, or with `own` as Treadle's own decide."""
        collections = self._own_collections if own else self._collections
        collection = collections.get(name)
        if collection is None:
            collection = collections[name] = (self._primary if own else self.database)[name]
        return collection

    def run(self, plan: Plan[R], session: Session = None, *, answers: bool = False) -> Awaitable[R]:
        """Perform a plan; inside `session`'s transaction if it has one.

        Everything is read from the primary, unless the plan answers the caller.
        """
        if getgeneratorstate(plan) != GEN_CREATED:
            raise not_fresh()
        return self._drive(plan, session, answers)

    def call(self, plan: Plan[R], session: Session = None, *, answers: bool = False) -> Awaitable[R]:
        """The same for a call of the Store, which has just made the plan; says what cannot be encoded."""
        return self._drive(plan, session, answers, called=True)

    async def _drive(self, plan: Plan[R], session: Session, answers: bool, called: bool = False) -> R:
        result: Any
        # Many calls may wait here at once: no layer and no local that can be left out.
        if self._shards is not None:
            plan = self._shards.targeted(plan)
        try:
            command = next(plan)
            while True:
                try:
                    if (
                        session is None
                        and self.shares
                        and _is_shared(command, answers)
                        and not call_context.has_driver_session()
                    ):
                        result = await self.share(command)
                    else:
                        result = await self._perform(command, session, answers)
                except Exception as error:
                    # Any error is thrown into the plan, which may answer it.
                    if session is not None and session.in_transaction and not isinstance(error, Unreadable):
                        unwind(plan, error)
                    command = plan.throw(error)
                else:
                    command = plan.send(result)
        except StopIteration as stop:
            value: R = stop.value
            return value
        except ENCODING_ERRORS as error:
            if not called:
                raise
            raise not_storable(error, "a document or a command") from error
        finally:
            plan.close()

    async def _perform(self, command: Command, session: Session, answers: bool = False) -> Any:
        """Perform a command. Reads that answer the caller are sent where the caller chose to read."""
        if type(command) is Call:
            if session is not None and command.writes:
                self.transactions.note(session, command)
            return await self._call(command, session, own=command.writes or not answers)
        if type(command) is Read:
            return await self._listed(command, session, own=not answers)
        if type(command) is Transact:
            return await self.transact(command.make, session)
        if type(command) is Share and self._share is not None:
            return await self._share(command.work, command.alone, session)
        if type(command) is DatabaseCommand:
            return await self._command(command, session)
        if type(command) is Outside:
            return await self.run(command.make())
        if type(command) is ServerFacts:
            return await self._facts()
        if type(command) is IsInside:
            return session is not None and session.in_transaction
        if type(command) is Wait:
            return await asyncio.sleep(call_context.pause(command.seconds))
        raise TypeError(f"{command!r} is not a command that this runner knows")

    async def _call(self, command: Call, session: Session, *, own: bool) -> Any:
        collection = self.collection(command.collection, own=own)
        method = getattr(collection, command.method)
        try:
            return await method(*command.arguments, session=session, **command.options)
        except InvalidBSON as error:
            if command.method != "find_one":
                raise unreadable_result(command, error) from error
            # Read again to name the document that cannot be decoded.
            raws = collection.with_options(codec_options=RAW_CODEC_OPTIONS)
            raw = await raws.find_one(*command.arguments, session=session, **command.options)
            found = [] if raw is None else [raw]
            return next(iter(decode_documents(command.collection, found, CODEC_OPTIONS)), None)

    def share(self, command: Shareable) -> Awaitable[Any]:
        """Return the result of a command that may share a round trip; its caller has no session."""
        batcher = self._lanes.get((command.collection, command.method))
        return (batcher or self._lane(command)).submit(command)

    def _lane(self, command: Shareable) -> AsyncBatcher:
        """Return the queue of the commands that may share a round trip with this one."""
        lane = lane_of(command)
        reads, limits = lane[1] == "find", self._limits

        async def perform(commands: Sequence[Shareable], _: int | None) -> list[Any]:
            if len(commands) == 1:
                return [await self._perform(commands[0], None, answers=True)]
            return await self.run(perform_together(commands), answers=reads)

        batcher = AsyncBatcher(
            perform,
            size_max=limits.together_max,
            wait_seconds=limits.together_wait_seconds,
            groups_max=COMMAND_GROUPS_MAX,
            reads=reads,
        )
        batcher = self._lanes.setdefault(lane, batcher)
        return self._lanes.setdefault((command.collection, command.method), batcher)

    async def _command(self, command: DatabaseCommand, session: Session) -> Any:
        """The reply to a command of the database; the driver itself repeats none of them."""
        database = self.database.client.admin if command.admin else self.database
        document = dict(command.document)
        if command.writes and command.changes_schema:
            document["writeConcern"] = common.MAJORITY.document
        options = RAW_CODEC_OPTIONS if command.raw else CODEC_OPTIONS
        retries = Retries(self.lock_seconds)
        while True:
            try:
                return await database.command(document, session=session, codec_options=options)
            except PyMongoError as error:
                inside = session is not None and session.in_transaction
                if inside or not command.is_idempotent or retries.over() or not is_passing(error):
                    raise
            await asyncio.sleep(retries.pause(random.random()))

    async def _listed(self, command: Read, session: Session, *, own: bool = False) -> list[Raw]:
        """Return all documents of a read; decoded one by one where the driver cannot decode them together."""
        try:
            return await (await self.opened(command, session, own=own)).to_list()  # type: ignore[no-any-return]
        except InvalidBSON:
            raws = await (await self.opened(command, session, own=own, raw=True)).to_list()
            return decode_documents(command.collection, raws, codec_options(command))

    async def aimed(self, command: Read, session: Session) -> Read:
        """The command of a cursor that streams; with the shard key where there is one."""
        if self._shards is None:
            return command
        return await self.run(self._shards.aimed(command), session, answers=True)

    async def opened(self, command: Read, session: Session, *, own: bool = False, raw: bool = False) -> Any:
        """The cursor of a read, the caller's unless it is Treadle's own; its documents as bytes if `raw`."""
        collection = self.collection(command.collection, own=own)
        if raw:
            collection = collection.with_options(codec_options=RAW_CODEC_OPTIONS)
        elif command.naive:
            collection = collection.with_options(codec_options=NAIVE_CODEC_OPTIONS)
        cursor: Any = getattr(collection, command.method)(
            *command.arguments, session=session, **command.options
        )
        if True:  # ASYNC
            if command.method != "find":
                # Only find() gives its cursor without a round trip.
                cursor = await cursor
        return cursor

    async def transact(self, make: Callable[[], Plan[R]], session: Session = None) -> R:
        """Run the plan that `make` makes in a transaction, or in the one under way."""
        if session is not None and session.in_transaction:
            return await self.run(make(), session)
        return await self.in_transaction(lambda current: self.run(make(), current), session)

    async def in_transaction(
        self, work: Callable[[AsyncClientSession], Awaitable[R]], session: Session = None
    ) -> R:
        """Commit `work` in a transaction and return its result; repeat it after a conflict or an election."""
        if session is None:
            async with self.database.client.start_session() as own:
                return await self.in_transaction(work, own)

        async def attempt(current: AsyncClientSession) -> R:
            # Before each attempt: it may wait for documents of a transaction that was given up since.
            if self._abandoned:
                await self._end_abandoned()
            return await work(current)

        try:
            return await _run_again(session, attempt, self.lock_seconds)
        except BaseException as error:
            await self.discard_session(session, error)
            raise

    async def discard_session(self, session: AsyncClientSession, error: BaseException) -> None:
        """End a failed transaction of which it is not known whether the server received its abort."""
        if isinstance(error, TimedOut) and error.__cause__ is not None:
            # What ended the last attempt tells whether the server heard of the abort.
            error = error.__cause__
        lost = isinstance(error, ConnectionFailure) or (isinstance(error, PyMongoError) and error.timeout)
        # Cancelled, perhaps before the commit or the abort was sent.
        cut_off = not isinstance(error, Exception)
        if session.has_ended or not (lost or cut_off or session._server_session.dirty):
            return
        self._abandoned.append(session.session_id)
        # The driver would lend it to other writes, and these would be interrupted when it is ended.
        session._server_session.mark_dirty()
        waits = call_context.remaining() is None and not isinstance(error, ServerSelectionTimeoutError)
        if waits or cut_off:
            # The driver needs half a second to find a server again whose connection was lost.
            with call_context.instead(DISCARD_SECONDS):
                await self._end_abandoned()

    async def end_refused(self, session: AsyncClientSession) -> None:
        """Abort a transaction of the caller of which a call was refused half way."""
        self.transactions.end(session)
        with contextlib.suppress(PyMongoError), call_context.instead(ABORT_SECONDS):
            # By the server, as after an error of its own: the driver behaves as if it were open.
            await self.database.client.admin.command("abortTransaction", session=session)

    async def _end_abandoned(self) -> None:
        """End transactions that were given up while their server did not answer.

        Otherwise their documents stay locked until the server's own limit for a transaction.
        """
        abandoned, over = [self._abandoned.popleft() for _ in range(len(self._abandoned))], False
        try:
            await self.database.client.admin.command({"killSessions": abandoned})
            over = True
        except PyMongoError as error:
            # Without the right to do so, the server's own limit does it.
            over = isinstance(error, OperationFailure) and not error.timeout
        finally:
            if not over:
                # Out of time or cancelled, too: other writers may wait for them.
                self._abandoned.extend(abandoned)


async def _run_again(
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
    """Abort a transaction, so that it releases its documents, even after its caller's call_context."""
    if not session.in_transaction:
        return
    # Where no server was found to run it on, none is found to abort it on.
    unreachable = isinstance(error, ServerSelectionTimeoutError)
    with (
        contextlib.suppress(PyMongoError),
        call_context.instead(call_context.AT_ONCE_SECONDS if unreachable else ABORT_SECONDS),
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
