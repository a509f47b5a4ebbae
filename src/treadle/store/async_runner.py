"""The runner of the asyncio shell: it performs the commands of plans and knows no pattern."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from treadle.model.bson_types import CODEC_OPTIONS, NAIVE_CODEC_OPTIONS
from treadle.plan import (
    Aside,
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
    require_fresh,
    unwind,
)
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.store import shell

R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncRunner:
    """Performs the commands of plans on a `pymongo` database."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        facts: Callable[[], Awaitable[Capabilities]] | None = None,
        share: Callable[[Any, bool, Session], Awaitable[Any]] | None = None,
    ) -> None:
        # Where there is no Store: the facts are asked for each time, and nothing is shared.
        self._facts = facts or (lambda: self.run(read_capabilities()))
        self._share = share
        self.database = database.with_options(codec_options=CODEC_OPTIONS, write_concern=shell.MAJORITY)
        self._collections: dict[str, AsyncCollection[Raw]] = {}

    def collection(self, name: str) -> AsyncCollection[Raw]:
        collection = self._collections.get(name)
        if collection is None:
            collection = self._collections[name] = self.database[name]
        return collection

    async def run(self, plan: Plan[R], session: Session = None) -> R:
        """Perform a fresh plan; inside `session`'s transaction if it has one."""
        require_fresh(plan)
        try:
            command = next(plan)
            while True:
                try:
                    result = await self._perform(command, session)
                except Exception as error:
                    if session is not None and session.in_transaction:
                        unwind(plan, error)
                    command = plan.throw(error)
                else:
                    command = plan.send(result)
        except StopIteration as stop:
            value: R = stop.value
            return value
        finally:
            plan.close()

    async def _perform(self, command: Command, session: Session) -> Any:
        if type(command) is Call:
            method = getattr(self.collection(command.collection), command.method)
            return await method(*command.arguments, session=session, **command.options)
        if type(command) is Read:
            return await (await self.opened(command, session)).to_list()
        if type(command) is Transact:
            return await self.transact(command.make, session)
        if type(command) is DatabaseCommand:
            database = self.database.client.admin if command.admin else self.database
            return await database.command(
                dict(command.document), session=session, codec_options=CODEC_OPTIONS
            )
        if type(command) is Aside:
            beside = session is None or not session.in_transaction
            return await self.run(command.make(), session) if beside else None
        if type(command) is Outside:
            return await self.run(command.make())
        if type(command) is ServerFacts:
            return await self._facts()
        if type(command) is IsInside:
            return session is not None and session.in_transaction
        if type(command) is Share and self._share is not None:
            return await self._share(command.work, command.alone, session)
        if type(command) is Wait:
            return await asyncio.sleep(command.seconds)
        raise TypeError(f"{command!r} is not a command that this runner knows")

    def open(self, command: Read, session: Session) -> Any:
        """The cursor of a `find`, for results that stream."""
        collection = self.collection(command.collection)
        if command.naive:
            collection = collection.with_options(codec_options=NAIVE_CODEC_OPTIONS)
        method = getattr(collection, command.method)
        return method(*command.arguments, session=session, **command.options)

    async def opened(self, command: Read, session: Session) -> Any:
        """The cursor of any read."""
        if True:  # ASYNC
            if command.method != "find":
                # Only find() gives its cursor without a round trip.
                return await self.open(command, session)
        return self.open(command, session)

    async def transact(self, make: Callable[[], Plan[R]], session: Session = None) -> R:
        """Run the plan that `make` makes in a transaction, or in the one under way."""
        if session is not None and session.in_transaction:
            return await self.run(make(), session)
        if session is None:
            async with self.database.client.start_session() as own:
                return await self.transact(make, own)
        try:
            return await session.with_transaction(
                lambda current: self.run(make(), current), **shell.TRANSACTION_OPTIONS
            )
        except PyMongoError as error:
            raise shell.clear(error) from error.__cause__
