"""The worker's logic: follow the change stream, recompute what events made doubtful.

One worker at a time leads, under a lease. Its position in the stream is kept
in `treadle.streams`, together with the number of its lease; the transaction
that ends a batch checks that number and moves the position. So whatever
happens, events are seen again rather than lost, and a leader that was
replaced without noticing moves nothing any more.

The stream is read with plain commands rather than with the driver's own
object, so that the same plan serves both shells, and so that the position on
quiet collections is known too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from bson import ObjectId
from bson.errors import BSONError
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine import lease
from treadle.engine.groups import differing
from treadle.engine.indexes import existing_collections
from treadle.engine.pages import page
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry, Rule
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    database_command,
    delete_many,
    find,
    find_one,
    find_one_and_update,
    insert_one,
    update_one,
    wait,
)
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import CHANGE_STREAM_FATAL, HISTORY_LOST, TOO_LARGE, is_about_one_document
from treadle.query.keys import GroupKey, freeze
from treadle.query.paths import outermost
from treadle.upkeep import contributions
from treadle.upkeep.apply import apply
from treadle.upkeep.events import BEATS, PRE_IMAGES_SINCE, UPHEAVALS, Doubt, Watch
from treadle.upkeep.position import COLLECTION, operation_time, resume, signature
from treadle.upkeep.rebuild import mend
from treadle.upkeep.verify import examine

# How narrowly the stream is read after an event that was too large.
WITHOUT_DOCUMENTS = 2

log = logging.getLogger("treadle")


class LeaseLost(Exception):
    """Another worker leads; whatever this one was about to do is not done."""


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
        self.owner = owner
        self.session = session
        self.is_dead = is_dead
        self.watch = Watch(graph)
        # The number of the lease while this worker leads; `lost` when somebody saw that it is gone.
        self.token: int | None = None
        self.lost = False
        self.position: Raw = {}
        self._ahead: Raw = {}
        self.owed: list[Raw] = []
        # Totals since this worker began, and what of them is not yet saved.
        self.totals: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._cursor: int | None = None
        self._unsaved = 0
        self._quiet = 0
        # An event that is too large is looked for one by one, and then read without its documents.
        self._narrow = 0
        self._beats: set[Any] = set()
        # How often the position was given up for a later one, so that beats may have been skipped.
        self._skipped = 0
        self._told: set[str] = set()

    # -- leading --------------------------------------------------------------------------

    def lead(self) -> Plan[bool]:
        """Become the one worker that is active, if nobody else is."""
        limits, seconds = self.limits, self.limits.worker_lease_seconds
        token = yield from lease.attempt(limits, self.name, self.owner, seconds, self.is_dead, self.session)
        if token is None:
            return False
        start = yield from operation_time()
        first = {"start": start, "token": None, "rules": [], "owed": [], "ledgers": []}
        try:
            row = yield from find_one_and_update(
                COLLECTION,
                {"_id": self.name, "n": {"$lt": token}},
                {"$set": {"n": token}, "$setOnInsert": first},
                upsert=True,
            )
        except DuplicateKeyError:
            # Somebody took the lease since, and was quicker.
            raise LeaseLost from None
        assert row is not None
        self.position = self._ahead = {"token": row["token"], "start": row["start"]}
        self.owed = row["owed"]
        self._counts, self._unsaved, self._cursor, self._narrow = {}, 0, None, 0
        self.token, self.lost = token, False
        try:
            yield from self._look_around(row)
        except BaseException:
            # It does not lead without knowing what; the next attempt takes the same lease.
            self.token = None
            raise
        return True

    def _look_around(self, row: Raw) -> Plan[None]:
        """Find out how former states are known, and which rules are new here."""
        kept: list[str] = []
        if self.server.version >= PRE_IMAGES_SINCE:
            kept = yield from pre_images()
        self.watch = Watch(self.graph, kept)
        self._cursor = None
        ledgers = sorted({rule.source.collection for rule in self.watch.ledgered})
        # What another version of the application had built is not followed from here on, and no longer
        # counts as built; nor can its unfinished work be done here.
        known = set(row["rules"]) & {signature(rule) for rule in self.watch.rules}
        self.owed = [each for each in self.owed if each["collection"] in self.graph.by_collection]
        fresh: list[Rule] = [rule for rule in self.watch.rules if signature(rule) not in known]
        fresh += [rule for rule in self.watch.ledgered if rule.source.collection not in row["ledgers"]]
        yield from contributions.forget([name for name in row["ledgers"] if name not in ledgers])
        self._owe(fresh, anew=False)
        if fresh or ledgers != row["ledgers"] or known != set(row["rules"]):
            yield from self._save({"ledgers": ledgers, "rules": sorted(known)})

    def resign(self) -> Plan[None]:
        """Save the position and let others lead."""
        if self.token is None:
            return
        try:
            if self._unsaved:
                yield from self._save({})
            yield from lease.release(self.name, self.token)
        except LeaseLost:
            pass
        self.token = None

    def _owe(self, rules: list[Rule], *, anew: bool = True) -> None:
        """Write down what must be gone over; from the beginning if `anew`."""
        for rule in rules:
            debts = [{"collection": rule.target.collection, "ledger": False, "after": None}]
            if isinstance(rule, GatherRule) and rule in self.watch.ledgered:
                debts.insert(0, {"collection": rule.source.collection, "ledger": True, "after": None})
            # A target is looked at after the ledger knows its sources, never before.
            if anew or not all(self._is_owed(debt) for debt in debts):
                self.owed = [*(each for each in self.owed if not _same_debt(each, debts)), *debts]
        self.owed.sort(key=lambda each: not each["ledger"])

    def _is_owed(self, debt: Raw) -> bool:
        return any(_same_debt(each, [debt]) for each in self.owed)

    def _save(self, changes: Raw) -> Plan[None]:
        """Keep the position and what is owed, if this worker still leads."""
        sets: Raw = {**changes, **self.position, "owed": self.owed}
        update: Raw = {"$set": sets, "$currentDate": {"saved": True}}
        if self._counts:
            update["$inc"] = {f"counts.{name}": number for name, number in self._counts.items()}
        held = yield from update_one(COLLECTION, {"_id": self.name, "n": self.token}, update)
        if not held.matched_count:
            raise LeaseLost

    def _fence(self) -> Plan[None]:
        """Really write the position's row, so that a transaction of a leader that was replaced fails."""
        held = yield from update_one(COLLECTION, {"_id": self.name, "n": self.token}, {"$inc": {"fenced": 1}})
        if not held.matched_count:
            raise LeaseLost

    def _saved(self) -> None:
        self._counts = {}
        self._unsaved = 0
        self._quiet = 0

    def _count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number
        self.totals[name] = self.totals.get(name, 0) + number

    def _tell(self, kind: str, message: str, once: str | None = None) -> None:
        """Count something noteworthy, and log it; with `once` not again before things went well."""
        self._count(kind)
        if once is None or once not in self._told:
            log.warning("%s", message)
        if once is not None:
            self._told.add(once)

    def _tell_error(self, error: Exception) -> None:
        self._cursor = None
        self._tell(
            "errors",
            f"the worker goes on after an error: {error}",
            once=f"{type(error).__name__} {getattr(error, 'code', '')}",
        )

    # -- running ------------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool], aside: Callable[[], Plan[None]] | None = None) -> Plan[None]:
        """Lead or stand by until `stopping`; `aside` is done between the batches."""
        backoff = self.limits.worker_backoff_seconds
        while not stopping():
            try:
                if self.token is None or self.lost:
                    self.token = None
                    if not (yield from self.lead()):
                        yield from wait(self.limits.worker_standby_seconds)
                        continue
                    log.info("worker %s leads", self.owner)
                yield from self.step(self.limits.worker_await_seconds, linger=True)
                if aside is not None:
                    yield from aside()
                backoff = self.limits.worker_backoff_seconds
                self._told.clear()
            except LeaseLost:
                self.token = None
                self._tell("lease_lost", "the lease went to another worker; this one stands by")
            except Exception as error:
                # Whatever it was, it must not end the worker: it would only meet it again.
                self._tell_error(error)
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
            beat, skipped = (yield from self._beat()), self._skipped
            before = handled
            while beat not in self._beats or self.owed:
                try:
                    handled += yield from self.step(0.2, linger=False)
                    if skipped != self._skipped:
                        beat, skipped = (yield from self._beat()), self._skipped
                except PyMongoError as error:
                    attempts += 1
                    if attempts > self.limits.worker_attempts_max:
                        raise
                    self._tell_error(error)
                    yield from wait(self.limits.worker_backoff_seconds)
            self._beats.clear()
            yield from delete_many(BEATS, {"_id": {"$lte": beat}})
            if handled == before:
                break
        yield from self._save({})
        self._saved()
        return handled

    def _beat(self) -> Plan[Any]:
        """Write something whose event says that all before it has been seen."""
        beat = ObjectId()
        yield from insert_one(BEATS, {"_id": beat})
        return beat

    # -- one batch --------------------------------------------------------------------------------

    def step(self, await_seconds: float, *, linger: bool) -> Plan[int]:
        """Read what is there, bring right what it concerns; how many events concerned anybody."""
        if self.owed:
            yield from self._resync_page()
            await_seconds, linger = 0.001, False
        few = self.limits.worker_linger_below
        try:
            events = yield from self._read(await_seconds)
            if linger and 0 < len(events) < few and self._cursor:
                # More will have come meanwhile, and are done in one go.
                yield from wait(self.limits.worker_linger_seconds)
                events += yield from self._read(0.001)
            while few <= len(events) < self.limits.worker_batch_max and self._cursor:
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
            yield from self._save({})
            self._saved()
        return 0

    def _read(self, await_seconds: float) -> Plan[list[Raw]]:
        """The next events; opens the stream where it is not open."""
        if self._cursor is None:
            lean = self._narrow == WITHOUT_DOCUMENTS
            pipeline = self.watch.pipeline(resume(self.position), [BEATS], lean=lean)
            reply = yield from database_command(
                {"aggregate": 1, "pipeline": pipeline, "cursor": {"batchSize": 0}}, writes=False
            )
            self._cursor = reply["cursor"]["id"]
        command: Raw = {
            "getMore": self._cursor,
            "collection": "$cmd.aggregate",
            "batchSize": 1 if self._narrow else self.limits.worker_batch_max,
            "maxTimeMS": max(1, int(await_seconds * 1000)),
        }
        reply = yield from database_command(command, writes=False)
        cursor = reply["cursor"]
        # An invalidated stream is closed; the next read opens another after its end.
        self._cursor = cursor["id"] or None
        events: list[Raw] = cursor["nextBatch"]
        token = cursor.get("postBatchResumeToken") or (events[-1]["_id"] if events else None)
        if token is not None:
            # Where the position goes once the events are handled. The time serves where the token's own
            # event is no longer found, because it was of a collection that nobody watches any more.
            start = events[-1]["clusterTime"] if events else self._ahead["start"]
            self._ahead = {"token": token, "start": start}
        return events

    def _handle(self, events: list[Raw]) -> Plan[int]:
        """Bring right what a batch concerns, and move the position past it."""
        doubt = Doubt()
        beats: list[Any] = []
        concerned = 0
        for event in events:
            if event["operationType"] in UPHEAVALS:
                where = (event.get("ns") or {}).get("coll") or "the database"
                if where != BEATS:
                    self._tell(
                        "upheavals", f"{where}: {event['operationType']}; what it fed is gone over again"
                    )
            elif event["ns"]["coll"] == BEATS:
                beats.append(event["documentKey"]["_id"])
                continue
            concerned += 1
            self.watch.note(event, doubt)
        rows = yield from contributions.settle(doubt)
        yield from self._look_up(doubt)
        if doubt.blind:
            names = ", ".join(sorted(set(doubt.blind.values())))
            self._tell(
                "blind",
                f"{names}: the server kept no former state of a changed document; what it fed is gone over "
                "again (run setup() if this comes again)",
                once=f"blind {names}",
            )
        unsettled = [*doubt.upset, *doubt.blind]
        self._owe(unsettled)
        earlier, counts = self.position, dict(self._counts)
        self.position = self._ahead
        self._count("events", concerned)
        self._unsaved += concerned
        try:
            if doubt:

                def finish() -> Plan[None]:
                    if rows:
                        yield from bulk_write(contributions.COLLECTION, rows)
                    yield from self._save({})

                done = yield from apply(self.graph, self.server, doubt, self._fence, finish)
                self._saved()
                self._count("recomputed", done)
                if doubt.aside:
                    self._count("set_aside", doubt.aside)
            elif self._unsaved > self.limits.worker_unsaved_max:
                yield from self._save({})
                self._saved()
        except BaseException:
            self.position, self._counts = earlier, counts
            self._cursor = None
            raise
        self._beats.update(beats)
        if self._narrow == WITHOUT_DOCUMENTS:
            self._narrow, self._cursor = 0, None
        if unsettled:
            row = yield from find_one(COLLECTION, {"_id": self.name})
            if row is not None:
                yield from self._look_around(row)
        return concerned

    def _look_up(self, doubt: Doubt) -> Plan[None]:
        """Mark the targets that changed sources feed now."""
        for rule, keys in doubt.lookups.items():
            there = {"_id": {"$in": list(keys.values())}}
            shown = dict.fromkeys(outermost(rule.key.paths), 1)
            documents = yield from find(rule.source.collection, there, shown)
            if isinstance(rule.key, GroupKey):
                targets = yield from contributions.groups_of(rule, documents)
            else:
                targets = [target for each in documents for target in rule.keys_of(each)]
            for target in targets:
                doubt.mark(rule.target, target, sourced=True)
        for entry, keys in doubt.documents.items():
            there = {"_id": {"$in": list(keys.values())}}
            for document in (yield from find(entry.collection, there, entry.key_projection())):
                doubt.mark(entry, entry.key_of(document), sourced=False)
            if entry.group is not None and entry.group.key.identity:
                for key in keys.values():
                    doubt.mark(entry, [key], sourced=False)

    def _answer(self, error: OperationFailure) -> Plan[None]:
        """What to do when the stream itself fails."""
        self._cursor = None
        token, start = self.position["token"], self.position["start"]
        if error.code == CHANGE_STREAM_FATAL and token is not None and start:
            self._tell(
                "restarts", "the stream's token is not found any more; it goes on by time", once="token"
            )
            self.position = self._ahead = {"token": None, "start": start}
        elif error.code in HISTORY_LOST:
            self._tell(
                "history_lost",
                "the stream's history is gone from the server, so changes were missed; every value that is "
                "maintained by stream is verified and repaired now (a larger oplog avoids this)",
            )
            self.position = self._ahead = {"token": None, "start": (yield from operation_time())}
            self._skipped += 1
            self._owe(list(self.watch.rules))
            yield from self._save({})
            self._saved()
        elif error.code in TOO_LARGE and self._narrow < WITHOUT_DOCUMENTS:
            self._narrow += 1
            if self._narrow == WITHOUT_DOCUMENTS:
                self._tell(
                    "oversized", "an event is too large for the stream; it is read without its documents"
                )
        else:
            raise error

    # -- going over everything ------------------------------------------------------------------

    def _resync_page(self) -> Plan[None]:
        """Verify and mend a page of what is owed."""
        owed = self.owed[0]
        entry = self.graph.by_collection[owed["collection"]]
        size = self.limits.worker_resync_page
        if owed["ledger"]:
            rules = [rule for rule in self.watch.ledgered if rule.source.collection == entry.collection]
            documents = yield from contributions.sources(entry, owed["after"], rules)
            yield from contributions.record(entry, rules, documents)
        else:
            try:
                documents = yield from page(entry, owed["after"], size, whole=True)
                for exact, own in entry.by_class(documents):
                    yield from self._resync(exact, own)
            except BSONError:
                # One of them cannot be read; each by itself, around that one.
                shown = entry.key_projection()
                documents = yield from page(entry, owed["after"], size, shown, whole=True)
                for exact, own in entry.by_class(documents):
                    yield from mend(self.graph, self.server, exact, [exact.key_of(each) for each in own])
            self._count("verified", len(documents))
            if not documents and entry.group is not None:
                # Groups without a document, which no page of documents shows.
                missing = yield from differing(entry)
                for start in range(0, len(missing), size):
                    keys = missing[start : start + size]
                    self._count("mended", len((yield from mend(self.graph, self.server, entry, keys))))
        changes: Raw = {}
        if documents:
            # In a list, because an id may itself be null.
            self.owed[0] = {**owed, "after": [documents[-1]["_id"]]}
        else:
            self.owed = self.owed[1:]
            left = {each["collection"] for each in self.owed}
            changes["rules"] = sorted(
                signature(rule) for rule in self.watch.rules if rule.target.collection not in left
            )
        yield from self._save(changes)
        self._saved()

    def _resync(self, entry: Entry[Any], documents: list[Raw]) -> Plan[None]:
        if not documents:
            return
        keys = {freeze(each["_id"]): entry.key_of(each) for each in documents}
        try:
            findings = yield from examine(self.server, entry, documents)
            wrong = {freeze(each.document_id) for each in findings}
            keys = {frozen: key for frozen, key in keys.items() if frozen in wrong}
        except OperationFailure as error:
            if not is_about_one_document(error):
                raise
        if keys:
            mended = yield from mend(self.graph, self.server, entry, list(keys.values()))
            self._count("mended", len(mended))


def _same_debt(one: Raw, others: list[Raw]) -> bool:
    return any((one["collection"], one["ledger"]) == (each["collection"], each["ledger"]) for each in others)


# -- for whoever looks at it from outside -----------------------------------------------------------


def require_streams(server: Capabilities) -> None:
    """Refuse the worker on a server that has no change streams."""
    what = "the worker follows change streams and"
    server.require_transactions(what, "declare maintain='write'", code="streams-unavailable")


def pre_images() -> Plan[list[str]]:
    """The collections whose former states the server keeps."""
    found = yield from existing_collections()
    return [
        name
        for name, each in found.items()
        if (each.get("options", {}).get("changeStreamPreAndPostImages") or {}).get("enabled")
    ]
