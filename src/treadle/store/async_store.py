"""AsyncStore: the asyncio shell. It performs commands; what to do is in the plans."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase

from treadle import upkeep
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Action
from treadle.graph.versions import WriteVersions
from treadle.model.document import Document
from treadle.plan import Raw, database_command
from treadle.store import call_context, common
from treadle.store.async_array import AsyncArray
from treadle.store.async_counter import AsyncCounter
from treadle.store.async_operations import AsyncOperations
from treadle.store.async_runner import abort, commit
from treadle.store.async_tree import AsyncTreeHandle
from treadle.store.async_worker import AsyncWorker
from treadle.store.call_context import Retries
from treadle.store.counter_buffer import only_one
from treadle.upkeep.position import NAME as WORKER

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncStore(AsyncOperations):
    """Models in a MongoDB database, on asyncio.

    Making one asks the server nothing. What a crash left half done is finished
    when the store is entered as a context, at its first write that others
    follow, or by `recover()`.
    """

    def __init__(
        self,
        database: AsyncDatabase[Any],
        models: Iterable[type[Any]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(database, models, write_versions, limits, timeout)
        self._counters: dict[Any, AsyncCounter] = {}
        self._owned_client: AsyncMongoClient[Any] | None = None
        self._stop_server: Callable[[], None] | None = None

    @classmethod
    def open(
        cls,
        uri: str,
        models: Iterable[type[Any]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
        timeout: float | None = None,
        **client_options: Any,
    ) -> AsyncStore:
        """A store on the database that the URI's path names; further options are the client's."""
        graph = list(models)
        name = common.database_name(uri)
        options = common.client_options(uri, client_options)
        client: AsyncMongoClient[Any] = AsyncMongoClient(uri, **options)
        try:
            store = cls(client[name], graph, write_versions, limits, timeout)
        except BaseException:
            if False:  # BLOCKING
                # It began to connect at once; that of asyncio waits for its first call.
                client.close()
            raise
        store._owned_client = client
        return store

    @classmethod
    def local(
        cls,
        models: Iterable[type[Any]],
        path: str | Path | None = None,
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> AsyncStore:
        """A store on a private local server that ends with this process."""
        from treadle.server import local as server

        running = server.start(path)
        try:
            store = cls.open(common.local_uri(running.uri), models, write_versions, limits)
        except BaseException:
            running.stop()
            raise
        store._stop_server = running.stop
        return store

    async def close(self) -> None:
        """Flush the counters, and close what this store opened itself."""
        for counter in self._counters.values():
            await counter.close()
        if self._owned_client is not None:
            await self._owned_client.close()
        if self._stop_server is not None:
            self._stop_server()

    async def __aenter__(self) -> AsyncStore:
        try:
            return await self._ready()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, Any, AsyncStore]:
        # `await AsyncStore.open(...)` reads naturally beside the other calls.
        return self._ready().__await__()

    async def _ready(self) -> AsyncStore:
        if self.graph.derives:
            await self._capabilities()
        return self

    # -- set-up ---------------------------------------------------------------

    async def setup(
        self, dry_run: bool = False, *, validation: upkeep.set_up.Enforcement = None
    ) -> list[Action]:
        """Create and change what the models need. Returns what was done.

        The validator of a collection that holds documents and had none begins
        with warnings; `validation="enforce"` makes it binding, and
        `validation="keep"` changes no validator of a collection that is there.
        """
        done = await self.runner.run(upkeep.set_up.setup(self.graph, dry_run, validation))
        if not dry_run:
            self.write_path.index_check.clear()
        return done

    async def index_ready(self) -> list[Action]:
        """Return what `setup()` would still have to do; nothing where everything is as declared."""
        return await self.setup(dry_run=True)

    async def ping(self) -> float:
        """Return the milliseconds that one round trip to the server takes."""
        start = time.perf_counter()
        await self.runner.run(database_command({"ping": 1}, writes=False, admin=True))
        return (time.perf_counter() - start) * 1000

    # -- fields that are stored otherwise ---------------------------------------------------

    def array(self, model: type[Document], field: str, id: Any) -> AsyncArray:
        """The outlier array of one document, by the Python name of its field."""
        return AsyncArray(self, self.graph.entry(model), field, id)

    def counter(
        self, model: type[Document], field: str, random: Callable[[], float] | None = None
    ) -> AsyncCounter:
        """The counter of a model, one for the whole store; `random` is for sampled ones."""
        entry = self.graph.entry(model)
        return only_one(self._counters, (model, field), lambda: AsyncCounter(self, entry, field, random))

    # -- work beside the writers ---------------------------------------------------------

    def worker(self, name: str = WORKER) -> AsyncWorker:
        """Return the worker that maintains what is declared with `maintain="stream"`."""
        return AsyncWorker(self, name)

    def tree(self, model: type[D]) -> AsyncTreeHandle[D]:
        """The tree of a model that declares one."""
        return AsyncTreeHandle(self, model)

    # -- the driver beneath -------------------------------------------------------

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncClientSession]:
        """A transaction that the calls inside the block belong to.

        It commits at the end and aborts on an exception. The body cannot be
        run again after a conflict; `with_transaction` can. What it yields is
        PyMongo's session, for calls of the driver itself.
        """
        await self._require_transactions("transaction()")
        async with self.runner.database.client.start_session() as session:
            await session.start_transaction(**common.TRANSACTION_OPTIONS)
            try:
                with self._block(session):
                    yield session
                if session.in_transaction:
                    await commit(session, Retries(self.runner.lock_seconds))
            except BaseException as error:
                await abort(session, error)
                await self.runner.discard_session(session, error)
                raise

    async def with_transaction(self, work: Callable[[AsyncClientSession], Awaitable[R]]) -> R:
        """Run `work(session)` in a transaction, again after a conflict, and return its result.

        The calls inside belong to the transaction, as in a `transaction()` block.
        """
        await self._require_transactions("with_transaction()")

        async def attempt(session: AsyncClientSession) -> R:
            with self._block(session):
                return await work(session)

        return await self.runner.in_transaction(attempt)

    @contextmanager
    def _block(self, session: AsyncClientSession) -> Generator[None]:
        """Let the calls inside belong to a session's transaction.

        Raises at the end if nothing of it can be committed.
        """
        self.runner.transactions.begin(session)
        with call_context.enter(self, session):
            yield
        self.runner.transactions.require_open(session)

    def collection(self, model: type[Document]) -> AsyncCollection[Raw]:
        """PyMongo's own collection of a model, with aware dates and majority writes."""
        return self.runner.collection(self.graph.entry(model).collection)
