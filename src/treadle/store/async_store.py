"""AsyncStore: the asyncio shell. It performs commands; what to do is in the plans."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase

from treadle import upkeep
from treadle.engine.bulk import BulkWrite
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.operations import Bulk, Insert, Operation, Replace, Returns, Upserted
from treadle.graph.outcomes import Action, Report, Summary
from treadle.graph.versions import WriteVersions
from treadle.model.document import Document
from treadle.plan import Raw, database_command
from treadle.query.filters import Sort
from treadle.store import caller_transactions, common
from treadle.store.async_array import AsyncArray
from treadle.store.async_counter import AsyncCounter
from treadle.store.async_operations import AsyncOperations
from treadle.store.async_transactions import abort, commit
from treadle.store.async_tree import AsyncTreeHandle
from treadle.store.async_worker import AsyncWorker
from treadle.store.counter_buffer import only_one
from treadle.store.deadline import Retries
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

    # -- documents --------------------------------------------------------------

    async def insert(self, document: D, session: Session = None) -> D:
        """Store a new document; what is returned is what is stored, maintained fields included."""
        calls = self._calls_of(document)
        if self._is_steady and self._may_share(session):
            plain = calls.plain_insert(document)
            if plain is not None:
                await self._share_insert(calls, plain.command)
                stored: D = plain.stored
                return stored
        return await self._write(calls.insert(document), session)

    async def insert_many(
        self, documents: Iterable[D], session: Session = None, *, ordered: bool = True
    ) -> list[D]:
        """Store new documents of one model, or of several kinds of one collection.

        All or none, up to the size of one commit. With `ordered=False` the
        others are stored where some are refused, and `BulkFailed` lists these.
        """
        model, listed = common.one_model(self.graph, documents)
        if model is None:
            return []
        return await self._write(self._calls(model).insert_many(listed, ordered), session)

    async def update(
        self,
        model: type[D],
        id_or_filter: Any,
        update: Any,
        session: Session = None,
        *,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> D | None:
        """Update one document with MongoDB's operators; the document after, or before, or None."""
        plan = self._calls(model).update(id_or_filter, update, sort, returns, array_filters)
        return await self._write(plan, session)

    async def update_many(
        self, model: type[Document], filter: Any, update: Any, session: Session = None
    ) -> int:
        """Update all matching documents. Returns the number that matched."""
        return await self._write(self._calls(model).update_all(filter, update), session)

    async def upsert(
        self, model: type[D], filter: Any, update: Any, insert: D, session: Session = None
    ) -> Upserted[D]:
        """Update the document that matches, or store `insert` as it is where there is none."""
        return await self._write(self._calls(model).upsert(filter, update, insert), session)

    async def replace(self, document: D, session: Session = None) -> D:
        """Write a whole document over the stored one; raises if that is gone."""
        return await self._write(self._calls_of(document).replace(document), session)

    async def change(self, document: D, /, session: Session = None, **fields: Any) -> D:
        """Write these fields of a document, by their Python names, and no others; the document after."""
        return await self._write(self._calls_of(document).change(document, fields), session)

    async def change_kind(self, document: D, was: type[Document], session: Session = None) -> D:
        """Write a document over one that is stored as another kind, if it is of the kind `was`."""
        return await self._write(self._calls_of(document).change_kind(document, was), session)

    async def delete(self, model: type[D], id_or_filter: Any, session: Session = None) -> D | None:
        """Delete one document. Returns it, or None."""
        return await self._write(self._calls(model).delete(id_or_filter), session)

    async def delete_many(self, model: type[Document], filter: Any, session: Session = None) -> int:
        """Delete all matching documents. Returns the number deleted."""
        return await self._write(self._calls(model).delete_all(filter), session)

    async def restore(self, model: type[D], id: Any, session: Session = None) -> D | None:
        """Restore a document that was archived or soft-deleted. Returns it, or None."""
        return await self._write(self._calls(model).restore(id), session)

    async def purge(
        self, model: type[Document], before: datetime | None = None, session: Session = None
    ) -> int:
        """Remove soft-deleted documents for good, or those deleted before a moment. Returns their number."""
        return await self._write(self._calls(model).purge(before), session)

    async def bulk(
        self, operations: Iterable[Operation], session: Session = None, *, ordered: bool = True
    ) -> Bulk:
        """Writes of several models, many in one commit, which updates each target once.

        An ordered bulk ends at the first chunk of which an operation is
        refused. Any other continues, and `BulkFailed` lists the refused ones.
        """
        return await self._write(
            BulkWrite(self.write_path, self._named, operations, ordered).perform(), session
        )

    def _named(self, operation: Any) -> Layout[Any]:
        """Return the layout of the model that an operation names."""
        if isinstance(operation, Insert | Replace):
            return self._calls_of(operation.document)
        return self._calls(operation.model)

    # -- readings ---------------------------------------------------------------------

    async def summary(
        self, model: type[Document], key: Any, start: Any = None, end: Any = None, session: Session = None
    ) -> list[Summary]:
        """Statistics of a series from `start` to before `end`: one entry per bucket, readings unread."""
        return await self._read(self._calls(model).summary(key, start, end), session)

    async def readings(
        self,
        model: type[Document],
        key: Any,
        start: Any = None,
        end: Any = None,
        fields: Sequence[str] | None = None,
        session: Session = None,
    ) -> list[tuple[Any, ...]]:
        """A series from `start` to before `end` as tuples, time first; much quicker than models."""
        return await self._read(self._calls(model).tuples(key, start, end, fields), session)

    # -- versions -----------------------------------------------------------------------

    async def migrate(
        self,
        model: type[Document],
        to: int | None = None,
        dry_run: bool = False,
        batch: int | None = None,
        throttle: upkeep.jobs.Throttle = None,
        retry: bool = False,
        stop: Callable[[], bool] | None = None,
        progress: Report | None = None,
    ) -> upkeep.migrations.run.Migrated:
        """Convert all documents of a model to a version, up or down, while readers and writers continue."""
        batch = self.graph.limits.migration_batch if batch is None else batch
        entry = self.graph.entry(model)
        server = await self._capabilities()
        if dry_run:
            options = upkeep.migrations.run.Options("", common.is_dead, batch, None, retry, stop, progress)
            return await self.runner.run(
                upkeep.migrations.perform.perform(self.graph, server, entry, to, dry_run, options)
            )
        async with self._recorded("migrate", [model], throttle, progress) as job:
            options = upkeep.migrations.run.Options(
                job.owner, common.is_dead, batch, throttle, retry, stop, job
            )
            return await self.runner.run(
                upkeep.migrations.perform.perform(self.graph, server, entry, to, dry_run, options)
            )

    async def migration_status(self, model: type[Document]) -> dict[int, int]:
        """Return the number of documents of each version."""
        return await self.runner.run(upkeep.migrations.run.status(self.graph.entry(model)))

    async def migration_failures(self, model: type[Document]) -> list[upkeep.migrations.run.SetAside]:
        """Return the documents that could not be migrated, and why."""
        return await self.runner.run(upkeep.migrations.run.set_aside(self.graph.entry(model)))

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
        with caller_transactions.enter(self, session):
            yield
        self.runner.transactions.require_open(session)

    def collection(self, model: type[Document]) -> AsyncCollection[Raw]:
        """PyMongo's own collection of a model, with aware dates and majority writes."""
        return self.runner.collection(self.graph.entry(model).collection)
