"""AsyncStore: the asyncio shell. It performs commands; what to do is in the plans."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from treadle.graph.layout import PageReader
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Action, Finding, Report, Summary
from treadle.graph.versions import WriteVersions
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.safety import Sort
from treadle.store import shell
from treadle.store.async_array import AsyncArray
from treadle.store.async_counter import AsyncCounter
from treadle.store.async_due import run_due
from treadle.store.async_found import AsyncFound, read_pages
from treadle.store.async_tree import AsyncTreeHandle
from treadle.store.async_worker import AsyncWorker
from treadle.store.async_writer import AsyncWriter
from treadle.store.counter_buffer import only_one
from treadle.upkeep import position, rebuild, set_up, status, validation
from treadle.upkeep.migrations import perform as migrate
from treadle.upkeep.migrations import run as migration
from treadle.upkeep.migrations.run import Migrated, SetAside
from treadle.upkeep.schedule import Ran
from treadle.upkeep.status import Status

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncStore(AsyncWriter):
    """Models in a MongoDB database, on asyncio.

    Making one asks the server nothing. What a crash left half done is finished
    when the store is entered as a context, at its first write that others
    follow, or by `recover()`.
    """

    def __init__(
        self,
        database: AsyncDatabase[Any],
        models: Iterable[type[Document]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(database, models, write_versions, limits)
        self._counters: dict[Any, AsyncCounter] = {}
        self._owned_client: AsyncMongoClient[Any] | None = None
        self._stop_server: Callable[[], None] | None = None

    @classmethod
    def open(
        cls,
        uri: str,
        models: Iterable[type[Document]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> AsyncStore:
        """A store on the database that the URI's path names."""
        graph = list(models)
        name = shell.database_name(uri)
        client: AsyncMongoClient[Any] = AsyncMongoClient(uri)
        try:
            store = cls(client[name], graph, write_versions, limits)
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
        models: Iterable[type[Document]],
        path: str | Path | None = None,
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> AsyncStore:
        """A store on a private local server that ends with this process."""
        from treadle.server import local as server

        running = server.start(path)
        try:
            store = cls.open(shell.local_uri(running.uri), models, write_versions, limits)
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

    async def setup(self, dry_run: bool = False) -> list[Action]:
        """Create and change what the models need; the list of what was done."""
        return await self.runner.run(set_up.setup(self.graph, dry_run))

    # -- documents --------------------------------------------------------------

    async def insert(self, document: D, session: Session = None) -> D:
        """Store a new document; what is returned is what is stored, maintained fields included."""
        return await self.runner.run(self._calls(type(document)).insert(document), session)

    async def insert_many(self, documents: Iterable[D], session: Session = None) -> list[D]:
        """Store new documents of one model, or of several kinds of one collection."""
        model, listed = shell.one_model(documents)
        return [] if model is None else await self.runner.run(self._calls(model).insert_many(listed), session)

    async def get(self, model: type[D], id: Any, session: Session = None) -> D | None:
        """The document with this id, or None."""
        return await self.runner.run(self._calls(model).get(id), session)

    async def find_one(
        self, model: type[D], filter: Any = None, sort: Sort | None = None, session: Session = None
    ) -> D | None:
        """The first matching document, or None."""
        return await self.runner.run(self._calls(model).first(filter, sort), session)

    def find(
        self,
        model: type[D],
        filter: Any = None,
        sort: Sort | None = None,
        skip: int = 0,
        limit: int | None = None,
        session: Session = None,
    ) -> AsyncFound[D]:
        """The matching documents, streamed; never all in memory at once."""
        return self._found(self._calls(model).reader(filter, sort, skip, limit), session)

    def search(
        self,
        model: type[D],
        text: str,
        filter: Any = None,
        limit: int | None = None,
        session: Session = None,
    ) -> AsyncFound[D]:
        """The documents that hold these words, the best match first; words only, no operators."""
        return self._found(self._calls(model).search(text, filter, limit), session)

    def _found(self, reader: PageReader[D], session: Session) -> AsyncFound[D]:
        cursor = self.runner.open(reader.command, session)
        return AsyncFound(cursor, read_pages(cursor, reader, self.runner, session))

    async def count(self, model: type[Document], filter: Any = None, session: Session = None) -> int:
        """How many documents match."""
        return await self.runner.run(self._calls(model).count(filter), session)

    async def update(
        self, model: type[D], id_or_filter: Any, update: Any, session: Session = None
    ) -> D | None:
        """Update one document with MongoDB's operators; the document after, or None."""
        return await self.runner.run(self._calls(model).update(id_or_filter, update), session)

    async def update_many(
        self, model: type[Document], filter: Any, update: Any, session: Session = None
    ) -> int:
        """Update all matching documents; how many matched."""
        return await self.runner.run(self._calls(model).update_all(filter, update), session)

    async def replace(self, document: D, session: Session = None) -> D:
        """Write a whole document over the stored one; raises if that is gone."""
        return await self.runner.run(self._calls(type(document)).replace(document), session)

    async def change_kind(self, document: D, was: type[Document], session: Session = None) -> D:
        """Write a document over one that is stored as another kind, if it is of the kind `was`."""
        return await self.runner.run(self._calls(type(document)).change_kind(document, was), session)

    async def delete(self, model: type[D], id_or_filter: Any, session: Session = None) -> D | None:
        """Delete one document; the deleted document, or None."""
        return await self.runner.run(self._calls(model).delete(id_or_filter), session)

    async def delete_many(self, model: type[Document], filter: Any, session: Session = None) -> int:
        """Delete all matching documents; how many there were."""
        return await self.runner.run(self._calls(model).delete_all(filter), session)

    # -- readings ---------------------------------------------------------------------

    async def summary(
        self, model: type[Document], key: Any, start: Any = None, end: Any = None, session: Session = None
    ) -> list[Summary]:
        """Statistics of a series from `start` to before `end`: one entry per bucket, readings unread."""
        return await self.runner.run(self._calls(model).summary(key, start, end), session)

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
        return await self.runner.run(self._calls(model).tuples(key, start, end, fields), session)

    # -- versions -----------------------------------------------------------------------

    async def migrate(
        self,
        model: type[Document],
        to: int | None = None,
        dry_run: bool = False,
        batch: int | None = None,
        throttle: float | None = None,
        retry: bool = False,
        stop: Callable[[], bool] | None = None,
        progress: Report | None = None,
    ) -> Migrated:
        """Bring all documents of a model to a version, up or down, while readers and writers go on."""
        owner = f"{shell.owner()}/{ObjectId()}"
        batch = self.graph.limits.migration_batch if batch is None else batch
        options = migration.Options(owner, shell.is_dead, batch, throttle, retry, stop, progress)
        entry, server = self.graph.entry(model), await self._capabilities()
        return await self.runner.run(migrate.perform(self.graph, server, entry, to, dry_run, options))

    async def migration_status(self, model: type[Document]) -> dict[int, int]:
        """How many documents there are of each version."""
        return await self.runner.run(migration.status(self.graph.entry(model)))

    async def migration_failures(self, model: type[Document]) -> list[SetAside]:
        """The documents that could not be migrated, and why."""
        return await self.runner.run(migration.set_aside(self.graph.entry(model)))

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

    # -- proof and repair ---------------------------------------------------------------

    async def verify(self, *models: type[Document], progress: Report | None = None) -> list[Finding]:
        """Every stored value that is not what it should be; of all models, or of these."""
        entries = self.graph.chosen(models)
        findings = await self.runner.run(
            status.verify_and_note(self.graph, await self._capabilities(), entries, progress)
        )
        return findings + await self.runner.run(validation.findings(entries))

    async def repair(self, *models: type[Document], progress: Report | None = None) -> int:
        """Mend what `verify` finds, while writers go on; how many documents were mended."""
        entries = self.graph.chosen(models)
        return await self.runner.run(
            rebuild.repair(self.graph, await self._capabilities(), entries, progress)
        )

    async def rebuild(self, *models: type[Document], progress: Report | None = None) -> int:
        """Recompute every maintained value, as after a pattern was added to old data."""
        entries = self.graph.chosen(models)
        return await self.runner.run(
            rebuild.rebuild(self.graph, await self._capabilities(), entries, progress)
        )

    def worker(self, name: str = position.NAME) -> AsyncWorker:
        """The worker that keeps what is declared with `maintain="stream"` right."""
        return AsyncWorker(self, name)

    async def run_due(self, now: datetime | None = None, dry_run: bool = False) -> list[Ran]:
        """Do the scheduled work that is due, by the server's clock or at `now`; what was done."""
        return await run_due(self, now, dry_run)

    async def status(self) -> Status:
        """How the maintenance stands: per rule its mode, how far behind, last run, last findings."""
        async with self.runner.database.client.start_session() as session:
            return await self.runner.run(status.status(self.graph, await self._capabilities()), session)

    def tree(self, model: type[D]) -> AsyncTreeHandle[D]:
        """The tree of a model that declares one."""
        return AsyncTreeHandle(self, model)

    # -- the driver beneath -------------------------------------------------------

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncClientSession]:
        """A transaction; pass what it yields as `session=`.

        It commits at the end and aborts on an exception. The body cannot be
        run again after a conflict; `with_transaction` can.
        """
        async with self.runner.database.client.start_session() as session:
            await session.start_transaction(**shell.TRANSACTION_OPTIONS)
            try:
                yield session
            except BaseException as error:
                if session.in_transaction:
                    await session.abort_transaction()
                if isinstance(error, PyMongoError) and shell.clear(error) is not error:
                    raise shell.clear(error) from None
                raise
            most = self.graph.limits.commit_attempts_max
            for attempt in range(most):
                try:
                    if session.in_transaction or attempt:
                        await session.commit_transaction()
                    return
                except PyMongoError as error:
                    if not shell.may_commit_again(error, attempt, most):
                        raise shell.clear(error) from error.__cause__

    async def with_transaction(self, work: Callable[[AsyncClientSession], Awaitable[R]]) -> R:
        """Run `work(session)` in a transaction, again after a conflict."""
        async with self.runner.database.client.start_session() as session:
            try:
                return await session.with_transaction(work, **shell.TRANSACTION_OPTIONS)
            except PyMongoError as error:
                raise shell.clear(error) from error.__cause__

    def collection(self, model: type[Document]) -> AsyncCollection[Raw]:
        """PyMongo's own collection of a model, with aware dates and majority writes."""
        return self.runner.collection(self.graph.entry(model).collection)
