"""The part of the asyncio shell that writes documents, and learns what the server can do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure, PyMongoError

from treadle import upkeep
from treadle.engine.bulk import BulkWrite
from treadle.engine.document_layout import layout_of
from treadle.engine.indexes import check_sharded
from treadle.engine.lease import release_all
from treadle.engine.write_path import WritePath
from treadle.errors import TreadleError
from treadle.graph.graph import Graph
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.operations import Bulk, Insert, Operation, Replace, Returns, Upserted
from treadle.graph.versions import WriteVersions
from treadle.graph.write import Write
from treadle.model.document import Document
from treadle.plan import Call, Plan
from treadle.plan.capabilities import Capabilities, greet, read_capabilities
from treadle.query.filters import Sort
from treadle.store import call_context, common
from treadle.store.async_batching import AsyncBatcher
from treadle.store.async_runner import AsyncRunner

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncWriter:
    """What a store and its handles write through. Making one asks the server nothing."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        models: Iterable[type[Any]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
        timeout: float | None = None,
    ) -> None:
        common.check_database(database, AsyncDatabase)
        # How long a call may take whose caller set no deadline.
        self._seconds = common.call_seconds(database, timeout)
        self.graph = Graph(models, write_versions, limits)
        self.write_path = WritePath(self.graph)
        self._layouts: dict[type[Document], Layout[Any]] = {
            entry.model: layout_of(entry, self.write_path) for entry in self.graph.entries.values()
        }
        check_sharded(self.graph)
        self.runner = AsyncRunner(
            database, self._capabilities, self._share, self.graph.limits, self.graph.shards
        )
        self.database = database
        self._known: Capabilities | None = None
        self._uses = set(self.graph.uses)
        # Whether a server must have change streams.
        self._streams = any(rule.maintain == "stream" for rule in self.graph.rules)
        # Whether the server was found recent enough, and whose capabilities are known.
        self._greeted = self._recovered = False
        self._primaries: common.Primaries = frozenset()
        self._topology: Any = None
        bounds = self.graph.limits
        self._group_commit = AsyncBatcher(
            self._commit,
            size_max=bounds.combined_max,
            wait_seconds=bounds.together_wait_seconds,
            targets=attrgetter("targets"),
        )

    # -- the calls that write ------------------------------------------------------------

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

    # -- how a call is performed ---------------------------------------------------------

    def _calls(self, model: type[D]) -> Layout[D]:
        """Return the layout of a model, which answers its calls."""
        layout = self._layouts.get(model) if isinstance(model, type) else None
        # The graph refuses any other model.
        return self._layouts[self.graph.entry(model).model] if layout is None else layout

    def _calls_of(self, document: D) -> Layout[D]:
        """Return the layout of a document's model."""
        layout = self._layouts.get(type(document))
        if layout is None:
            raise self.graph.not_a_document(document)
        return layout

    def _within(self, session: Session) -> Session:
        """Return the session of a call: the caller's, or that of the transaction block around it."""
        if session is not None:
            call_context.refuse_other(self, session)
            return session
        inherited: Session = call_context.current(self)
        return inherited

    async def _write(self, plan: Plan[R], session: Session = None) -> R:
        """Perform a plan that writes, inside the caller's transaction if one is open."""
        with call_context.within(self._seconds):
            if not self._is_steady:
                await self._look()
            within = self._within(session)
            if within is not None and within.in_transaction:
                return await self._write_inside(plan, within)
            return await self.runner.call(plan, within)

    async def _write_inside(self, plan: Plan[R], session: AsyncClientSession) -> R:
        """Perform a plan inside a transaction of the caller, which is over if the plan fails half way."""
        transactions = self.runner.transactions
        transactions.require_open(session)
        changes = transactions.changes(session)
        try:
            return await self.runner.call(plan, session)
        except BaseException as error:
            # Cancelled or cut off, too: its caller may catch that and go on.
            ended = isinstance(error, OperationFailure) and not isinstance(error, TreadleError)
            if not ended and transactions.changes(session) > changes:
                await self.runner.end_refused(session)
            raise

    async def _read(self, plan: Plan[R], session: Session = None) -> R:
        """Perform a plan that reads as the caller chose to read."""
        with call_context.within(self._seconds):
            if not self._greeted:
                await self._greet()
            return await self.runner.call(plan, self._within(session), answers=True)

    async def _perform(self, plan: Plan[R], *, answers: bool = False) -> R:
        """Perform a plan within the caller's time, and outside of its transaction."""
        with call_context.within(self._seconds):
            return await self.runner.call(plan, answers=answers)

    async def _share_insert(self, calls: Layout[Any], command: Call) -> None:
        """Store a document by a command that may share a round trip."""
        try:
            await self.runner.share(command)
        except Exception as error:
            # Whatever failed, in the caller's words; an error that is clear enough stays as it is.
            better = calls.refusal(error, command)
            if better is error:
                raise
            raise better from error

    def _may_share(self, session: Session) -> bool:
        """Whether a call without a session may share a round trip, as one command without a plan."""
        return (
            session is None
            and self._seconds is None
            and self._greeted
            and self.runner.shares
            and call_context.is_outside()
        )

    @property
    def _is_steady(self) -> bool:
        """Whether the server is still the one that was looked at."""
        return self._known is not None and self.database.client.topology_description is self._topology

    async def _share(self, write: Write[Any], alone: bool, session: Session) -> Any:
        """Return the outcome of a write, committed together with concurrent ones."""
        if session is None and not alone:
            return await self._group_commit.submit(write)
        inside = session is not None and session.in_transaction
        (outcome,) = await self.runner.run(self.write_path.commit([write], inside=inside), session)
        return outcome

    async def _commit(self, writes: Sequence[Write[Any]], attempts_max: int | None) -> list[Any]:
        return await self.runner.run(self.write_path.commit(writes, attempts_max=attempts_max))

    @asynccontextmanager
    async def _owning(self) -> AsyncGenerator[str]:
        """Give a name for one piece of work; however it ends, no lease stays under that name."""
        with common.owning() as owner:
            try:
                yield owner
            except BaseException:
                # Ctrl-C and a cancelled task too. If it fails, the lease runs out by itself.
                with contextlib.suppress(PyMongoError):
                    await self.runner.run(release_all(owner))
                raise

    # -- the server ----------------------------------------------------------------------

    async def _capabilities(self) -> Capabilities:
        """Return what the server can do; the first call also recovers what a crash left."""
        if not self._recovered:
            await self._recover()
        else:
            await self._look()
        assert self._known is not None
        return self._known

    async def _capabilities_with(self, *names: str) -> Capabilities:
        """Return the same, with capabilities that no declaration uses."""
        known = await self._capabilities()
        if self._uses.issuperset(names):
            return known
        found = await self.runner.run(read_capabilities(self._uses.union(names)))
        self._uses.update(names)
        return self._learn(found)

    def _learn(self, found: Capabilities) -> Capabilities:
        """Keep what the server can do; refuse one that lacks what a declaration needs."""
        self._known = self.graph.check_server(found)
        self.runner.lock_seconds = found.lock_seconds
        return self._known

    async def _require_transactions(self, what: str) -> None:
        """Refuse a server without transactions; learn for how long this one may hold locks."""
        await self._look()
        assert self._known is not None
        self._known.require_transactions(what, "use Store.local()")

    async def _greet(self) -> None:
        """Refuse a server that is too old, or that lacks change streams where a rule follows them."""
        if self._streams:
            await self._look()
        else:
            await self.runner.run(greet())
            self._greeted = True

    async def _look(self) -> None:
        """See what the server can do, and refuse one that lacks what a declaration needs.

        Asked once, and again after a failover. Until the new primary answers,
        what the former one could do will serve.
        """
        if self._is_steady:
            return
        topology = self.database.client.topology_description
        primaries = common.primaries(topology) or self._primaries
        if self._known is None or primaries != self._primaries:
            try:
                known = await self.runner.run(read_capabilities(self._uses))
            except PyMongoError:
                if self._known is None:
                    raise
                return
            self._learn(known)
            self.write_path.forget_server()
            self._greeted = True
            topology = self.database.client.topology_description
            primaries = common.primaries(topology)
        self._topology, self._primaries = topology, primaries

    def _assume(self, known: Capabilities) -> None:
        """Take what another Store learned of this server, and probe nothing until a failover."""
        self._learn(replace(known, database=self.database.name))
        self._greeted = True
        self._topology = self.database.client.topology_description
        self._primaries = common.primaries(self._topology)

    async def _recover(self) -> int:
        if self._known is None:
            await self._look()
        self._recovered = True
        return await self.runner.run(self.write_path.recover())

    async def recover(self) -> int:
        """Finish what a crash interrupted, and retry what was set aside. Returns the number of both."""
        done = await self._recover()
        return done + await self.runner.run(upkeep.retries.retry_all(self.graph, await self._capabilities()))
