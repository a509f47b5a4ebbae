"""The worker's logic: follow the change stream, recompute what events made dirty.

One worker at a time leads, under a lease. Its position in the stream is kept
in `treadle.streams`, together with the number of its lease; the transaction
that ends a batch checks that number and moves the position. So whatever
happens, events are seen again rather than lost, and a leader that was
replaced without noticing moves nothing any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from bson.errors import BSONError
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.groups import differing
from treadle.engine.lease import Lease, LeaseLost
from treadle.engine.pages import page
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry, Rule
from treadle.plan import Plan, Raw, bulk_write, delete_many, find_one, find_one_and_update, update_one, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import CHANGE_STREAM_FATAL, HISTORY_LOST, TOO_LARGE, is_about_one_document
from treadle.query.keys import freeze
from treadle.query.paths import outermost
from treadle.upkeep import contributions
from treadle.upkeep.apply import apply
from treadle.upkeep.change_stream import (
    BEATS,
    UPHEAVALS,
    ChangeStream,
    beat,
    keeps_former_states,
    operation_time,
    pre_images,
)
from treadle.upkeep.dirty import Dirty, mark_targets
from treadle.upkeep.events import Watch
from treadle.upkeep.position import COLLECTION, first_row, signature
from treadle.upkeep.rebuild import mend
from treadle.upkeep.verify import examine

# How narrowly the stream is read after an event that was too large.
WITHOUT_DOCUMENTS = 2

log = logging.getLogger("treadle")


class Follower:
    """The state of one worker, and the plans that move it on."""

    def __init__(
        self,
        graph: Graph,
        server: Capabilities,
        *,
        name: str,
        owner: str,
        session: Any,
        is_dead: Callable[[str], bool],
    ) -> None:
        require_streams(server)
        self.graph = graph
        self.limits = graph.limits
        self.server = server
        self.name = name
        self.lease = Lease(graph.limits, name, graph.limits.worker_lease_seconds, owner, is_dead, session)
        self.watch: Watch
        self._signatures: dict[Rule, str] = {}
        self.position: Raw = {}
        self._ahead: Raw = {}
        # Collections whose backfill is pending; the row calls them `owed`.
        self.backfills: list[Raw] = []
        # Totals since this worker began, and what of them is not yet saved.
        self.totals: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._stream = ChangeStream()
        self._unsaved = 0
        self._quiet = 0
        # An event that is too large is looked for one by one, and then read without its documents.
        self._narrow = 0
        self._beats: set[Any] = set()
        # How often the position was given up for a later one, so that beats may have been skipped.
        self._skipped = 0
        self._warned: set[str] = set()

    # -- leading --------------------------------------------------------------------------

    def lead(self) -> Plan[bool]:
        """Become the one worker that is active, if nobody else is."""
        if not (yield from self.lease.take()):
            return False
        try:
            row = yield from find_one_and_update(
                COLLECTION,
                {"_id": self.name, "n": {"$lt": self.lease.token}},
                {"$set": {"n": self.lease.token}, "$setOnInsert": (yield from first_row())},
                upsert=True,
            )
            assert row is not None
            self.position = self._ahead = {"token": row["token"], "start": row["start"]}
            self.backfills = row["owed"]
            self._counts, self._unsaved, self._narrow = {}, 0, 0
            yield from self._look_around(row)
        except BaseException as error:
            # It does not lead without knowing what; the next attempt takes the same lease.
            self.lease.token = None
            if isinstance(error, DuplicateKeyError):
                # Somebody took the lease since, and was quicker.
                raise LeaseLost from None
            raise
        return True

    def _look_around(self, row: Raw) -> Plan[None]:
        """Find out how former states are known, and which rules are new here."""
        kept = (yield from pre_images()) if keeps_former_states(self.server) else []
        self.watch = Watch(self.graph, kept)
        self._stream = ChangeStream()
        self._signatures = {rule: signature(rule) for rule in self.watch.rules}
        ledgers = sorted({rule.source.collection for rule in self.watch.ledgered})
        # What another version of the application had built is not followed from here on, and no longer
        # counts as built; nor can its unfinished work be done here.
        known = set(row["rules"]) & {*self._signatures.values()}
        self.backfills = [each for each in self.backfills if each["collection"] in self.graph.by_collection]
        fresh = [rule for rule, signed in self._signatures.items() if signed not in known]
        fresh += [rule for rule in self.watch.ledgered if rule.source.collection not in row["ledgers"]]
        yield from contributions.forget([name for name in row["ledgers"] if name not in ledgers])
        self._plan_backfill(fresh, anew=False)
        if fresh or ledgers != row["ledgers"] or known != set(row["rules"]):
            yield from self._save({"ledgers": ledgers, "rules": sorted(known)})

    def resign(self) -> Plan[None]:
        """Save the position and let others lead."""
        try:
            if self.lease.token is not None and self._unsaved:
                yield from self._save()
            yield from self.lease.release()
        except LeaseLost:
            self.lease.token = None

    def _save(self, changes: Raw | None = None) -> Plan[None]:
        """Keep the position, and that it is kept."""
        yield from self._write_row(changes)
        self._saved()

    def _write_row(self, changes: Raw | None = None) -> Plan[None]:
        """Write the position and the pending backfills, if this worker still leads."""
        sets: Raw = {**(changes or {}), **self.position, "owed": self.backfills}
        update: Raw = {"$set": sets, "$currentDate": {"saved": True}}
        if self._counts:
            update["$inc"] = {f"counts.{name}": number for name, number in self._counts.items()}
        yield from self._write_if_leading(update)

    def _fence(self) -> Plan[None]:
        """Really write the position's row, so that a transaction of a leader that was replaced fails."""
        yield from self._write_if_leading({"$inc": {"fenced": 1}})

    def _write_if_leading(self, update: Raw) -> Plan[None]:
        held = yield from update_one(COLLECTION, {"_id": self.name, "n": self.lease.token}, update)
        if not held.matched_count:
            raise LeaseLost

    def _saved(self) -> None:
        self._counts = {}
        self._unsaved = 0
        self._quiet = 0

    def _count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number
        self.totals[name] = self.totals.get(name, 0) + number

    def _warn(self, kind: str, message: str, once: str | None = None) -> None:
        """Count something noteworthy, and log it; with `once` not again before things went well."""
        self._count(kind)
        if once is None or once not in self._warned:
            log.warning("%s", message)
        if once is not None:
            self._warned.add(once)

    def _warn_of(self, error: Exception) -> None:
        self._stream = ChangeStream()
        once = f"{type(error).__name__} {getattr(error, 'code', '')}"
        self._warn("errors", f"the worker continues after an error: {error}", once=once)

    # -- running ------------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> Plan[None]:
        """Lead or stand by until `stopping`."""
        backoff = self.limits.worker_backoff_seconds
        while not stopping():
            try:
                if not self.lease.held:
                    if not (yield from self.lead()):
                        yield from wait(self.limits.worker_standby_seconds)
                        continue
                    log.info("worker %s leads", self.lease.owner)
                yield from self.step(self.limits.worker_await_seconds, linger=True)
                backoff = self.limits.worker_backoff_seconds
                self._warned.clear()
            except LeaseLost:
                self.lease.token = None
                self._warn("lease_lost", "the lease went to another worker; this one stands by")
            except Exception as error:
                # Whatever it was, it must not end the worker: it would only meet it again.
                self._warn_of(error)
                yield from wait(backoff)
                backoff = min(backoff * 2, self.limits.worker_backoff_max_seconds)
        try:
            yield from self.resign()
        except PyMongoError as error:
            # The lease runs out by itself.
            log.warning("the worker could not resign: %s", error)

    def run_until_idle(self) -> Plan[int]:
        """Handle everything that was written before this call, and what follows from it."""
        handled, attempts = 0, 0
        # Each round carries effects one level further along a chain.
        for _ in range(2 + len({rule.level for rule in self.watch.rules})):
            awaited, skipped = (yield from beat()), self._skipped
            before = handled
            while awaited not in self._beats or self.backfills:
                try:
                    handled += yield from self.step(0.2, linger=False)
                    if skipped != self._skipped:
                        awaited, skipped = (yield from beat()), self._skipped
                except PyMongoError as error:
                    attempts += 1
                    if attempts > self.limits.worker_attempts_max:
                        raise
                    self._warn_of(error)
                    yield from wait(self.limits.worker_backoff_seconds)
            self._beats.clear()
            yield from delete_many(BEATS, {"_id": {"$lte": awaited}})
            if handled == before:
                break
        yield from self._save()
        return handled

    # -- one batch --------------------------------------------------------------------------------

    def step(self, await_seconds: float, *, linger: bool) -> Plan[int]:
        """Read what is there, bring right what it concerns; how many events concerned anybody."""
        if self.backfills:
            yield from self._backfill_page()
            await_seconds, linger = 0.001, False
        few = self.limits.worker_linger_below
        try:
            events = yield from self._read(await_seconds)
            if linger and 0 < len(events) < few and self._stream.cursor:
                # More will have come meanwhile, and are done in one go.
                yield from wait(self.limits.worker_linger_seconds)
                events += yield from self._read(0.001)
            while few <= len(events) < self.limits.worker_batch_max and self._stream.cursor:
                more = yield from self._read(0.001)
                events += more
                if len(more) < few:
                    # That was all for now. Whoever waits for none at all never begins beside busy writers.
                    break
        except OperationFailure as error:
            yield from self._answer(error)
            return 1
        if events:
            return (yield from self._handle(events))
        self.position, self._narrow = self._ahead, 0
        self._quiet += 1
        if self._unsaved or self._quiet >= self.limits.worker_heartbeat_reads:
            yield from self._save()
        return 0

    def _read(self, await_seconds: float) -> Plan[list[Raw]]:
        """The next events; opens the stream where it is not open, also after the server has ended it."""
        if self._stream.cursor is None:
            lean = self._narrow == WITHOUT_DOCUMENTS
            yield from self._stream.open(self.watch.pipeline(self.position, lean=lean))
        events = yield from self._stream.read(
            1 if self._narrow else self.limits.worker_batch_max, await_seconds
        )
        if self._stream.token is not None:
            # Where the position goes once the events are handled. The time serves where the token's own
            # event is no longer found, because it was of a collection that nobody watches any more.
            start = events[-1]["clusterTime"] if events else self._ahead["start"]
            self._ahead = {"token": self._stream.token, "start": start}
        return events

    def _handle(self, events: list[Raw]) -> Plan[int]:
        """Bring right what a batch concerns, and move the position past it."""
        dirty = Dirty()
        beats = self._note(events, dirty)
        concerned = len(events) - len(beats)
        rows = yield from contributions.settle(dirty)
        yield from mark_targets(dirty)
        if dirty.blind:
            names = ", ".join(sorted(set(dirty.blind.values())))
            self._warn(
                "blind",
                f"{names}: the server kept no former state of a changed document; what it feeds is verified "
                "now (run setup() if this comes again)",
                once=f"blind {names}",
            )
        unsettled = [*dirty.upset, *dirty.blind]
        self._plan_backfill(unsettled)
        earlier, counts = self.position, dict(self._counts)
        self.position = self._ahead
        self._count("events", concerned)
        self._unsaved += concerned

        def finish() -> Plan[None]:
            if rows:
                yield from bulk_write(contributions.COLLECTION, rows)
            yield from self._write_row()

        try:
            if dirty:
                done = yield from apply(self.graph, self.server, dirty, self._fence, finish)
                self._saved()
                self._count("recomputed", done)
                if dirty.aside:
                    self._count("set_aside", dirty.aside)
            elif self._unsaved > self.limits.worker_unsaved_max:
                yield from self._save()
        except BaseException:
            self.position, self._counts = earlier, counts
            self._stream = ChangeStream()
            raise
        self._beats.update(beats)
        if self._narrow == WITHOUT_DOCUMENTS:
            self._narrow, self._stream = 0, ChangeStream()
        if unsettled and (row := (yield from find_one(COLLECTION, {"_id": self.name}))) is not None:
            yield from self._look_around(row)
        return concerned

    def _note(self, events: list[Raw], dirty: Dirty) -> list[Any]:
        """Mark what events make dirty; the beats among them."""
        beats: list[Any] = []
        for event in events:
            where = (event.get("ns") or {}).get("coll")
            if event["operationType"] in UPHEAVALS:
                if where != BEATS:
                    kind = event["operationType"]
                    self._warn("upheavals", f"{where or 'the database'}: {kind}; what it fed is verified now")
            elif where == BEATS:
                beats.append(event["documentKey"]["_id"])
                continue
            self.watch.note(event, dirty)
        return beats

    def _answer(self, error: OperationFailure) -> Plan[None]:
        """What to do when the stream itself fails."""
        self._stream = ChangeStream()
        token, start = self.position["token"], self.position["start"]
        if error.code == CHANGE_STREAM_FATAL and token is not None and start:
            self._warn(
                "restarts", "the resume token is no longer found; the stream resumes by time", once="token"
            )
            self.position = self._ahead = {"token": None, "start": start}
        elif error.code in HISTORY_LOST:
            self._warn(
                "history_lost",
                "the stream's history is gone from the server, so changes were missed; every value that is "
                "maintained by stream is verified and repaired now (a larger oplog avoids this)",
            )
            self.position = self._ahead = {"token": None, "start": (yield from operation_time())}
            self._skipped += 1
            self._plan_backfill(self.watch.rules)
            yield from self._save()
        elif error.code in TOO_LARGE and self._narrow < WITHOUT_DOCUMENTS:
            self._narrow += 1
            if self._narrow == WITHOUT_DOCUMENTS:
                self._warn(
                    "oversized", "an event is too large for the stream; it is read without its documents"
                )
        else:
            raise error

    # -- backfill -----------------------------------------------------------------------------------

    def _plan_backfill(self, rules: Iterable[Rule], *, anew: bool = True) -> None:
        """Note which collections need a backfill; from the beginning if `anew`."""
        for rule in rules:
            fresh = {(rule.target.collection, False)}
            if rule in self.watch.ledgered:
                fresh.add((rule.source.collection, True))
            if anew or not fresh <= {_which(each) for each in self.backfills}:
                self.backfills = [each for each in self.backfills if _which(each) not in fresh]
                self.backfills += [
                    {"collection": name, "ledger": ledger, "after": None} for name, ledger in fresh
                ]
        # A target is looked at after the ledger knows its sources, never before.
        self.backfills.sort(key=lambda each: not each["ledger"])

    def _backfill_page(self) -> Plan[None]:
        """Backfill one page: note what its documents feed, or verify and mend them."""
        first = self.backfills[0]
        entry = self.graph.by_collection[first["collection"]]
        documents = yield from (self._fill_ledger if first["ledger"] else self._verify)(entry, first["after"])
        changes: Raw = {}
        if documents:
            # In a list, because an id may itself be null.
            self.backfills[0] = {**first, "after": [documents[-1]["_id"]]}
        else:
            self.backfills = self.backfills[1:]
            left = {each["collection"] for each in self.backfills}
            changes["rules"] = sorted(
                signed for rule, signed in self._signatures.items() if rule.target.collection not in left
            )
        yield from self._save(changes)

    def _fill_ledger(self, entry: Entry[Any], last: list[Any] | None) -> Plan[list[Raw]]:
        rules = [rule for rule in self.watch.ledgered if rule.source.collection == entry.collection]
        shown = dict.fromkeys(outermost({"_id"}.union(*(rule.key.paths for rule in rules))), 1)
        documents = yield from page(entry, last, self.limits.contributions_page, shown, whole=True)
        yield from contributions.record(entry, rules, documents)
        return documents

    def _verify(self, entry: Entry[Any], last: list[Any] | None) -> Plan[list[Raw]]:
        size = self.limits.worker_resync_page
        try:
            documents = yield from page(entry, last, size, whole=True)
            for exact, own in entry.by_class(documents):
                yield from self._verify_class(exact, own)
        except BSONError:
            # One of them cannot be read; each by itself, around that one.
            documents = yield from page(entry, last, size, entry.key_projection(), whole=True)
            for exact, own in entry.by_class(documents):
                yield from mend(self.graph, self.server, exact, [exact.key_of(each) for each in own])
        self._count("verified", len(documents))
        if not documents and entry.group is not None:
            # Groups without a document, which no page of documents shows.
            mended = yield from mend(self.graph, self.server, entry, (yield from differing(entry)))
            self._count("mended", len(mended))
        return documents

    def _verify_class(self, entry: Entry[Any], documents: list[Raw]) -> Plan[None]:
        keys = {freeze(each["_id"]): entry.key_of(each) for each in documents}
        if not keys:
            return
        try:
            findings = yield from examine(self.server, entry, documents)
            wrong = {freeze(each.document_id) for each in findings}
            keys = {frozen: key for frozen, key in keys.items() if frozen in wrong}
        except OperationFailure as error:
            if not is_about_one_document(error):
                raise
        self._count("mended", len((yield from mend(self.graph, self.server, entry, list(keys.values())))))


def _which(backfill: Raw) -> tuple[str, bool]:
    return backfill["collection"], backfill["ledger"]


def require_streams(server: Capabilities) -> None:
    """Refuse the worker on a server that has no change streams."""
    what = "the worker follows change streams and"
    server.require_transactions(what, "declare maintain='write'", code="streams-unavailable")
