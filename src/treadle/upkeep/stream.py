"""The worker's logic: follow the change stream, recompute what events made dirty.

One worker at a time leads, under a lease. Its position in the stream is kept
in `treadle.streams`, together with the number of its lease; the transaction
that ends a batch checks that number and moves the position. So whatever
happens, events are seen again rather than lost, and a leader that was
replaced without noticing moves nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bson.errors import InvalidBSON
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.lease import Lease, LeaseLost
from treadle.engine.salvage import divide, divides
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import Rule
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, delete_many, find_one, find_one_and_update, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import UndecodableId
from treadle.plan.server_errors import CHANGE_STREAM_FATAL, HISTORY_LOST, TOO_LARGE, is_bug
from treadle.upkeep import controls
from treadle.upkeep.apply import Finish, apply
from treadle.upkeep.backfill import Backfill
from treadle.upkeep.change_stream import (
    BEATS,
    CONTROLS,
    UPHEAVALS,
    ChangeStream,
    beat,
    key_of,
    present_place,
)
from treadle.upkeep.dirty import Dirty, mark_targets
from treadle.upkeep.events import Watch
from treadle.upkeep.leadership import Leader
from treadle.upkeep.position import COLLECTION, first_row, signature
from treadle.upkeep.replay import WORKER_LINGER_SECONDS, Replay
from treadle.upkeep.retries import retry_all
from treadle.upkeep.totals import Totals

# How long a read waits for events.
WORKER_AWAIT_SECONDS = 1.0
# Empty reads after which the position is saved.
WORKER_HEARTBEAT_READS = 10
# Events that concerned no rule after which it is saved.
WORKER_UNSAVED_MAX = 5_000
# The first pause after an error.
WORKER_BACKOFF_SECONDS = 0.2
# The longest.
WORKER_BACKOFF_MAX_SECONDS = 15.0
# Attempts of run_until_idle after errors.
WORKER_ATTEMPTS_MAX = 20
# Targets whose counts and sums it remembers.
WORKER_TOTALS_MAX = 100_000

# How narrowly the stream is read after an event that was too large.
WITHOUT_DOCUMENTS = 2
# The collections of Treadle's own that lie in the stream.
OWN = frozenset({BEATS, CONTROLS})

log = get_logger(__name__)


class Follower(Leader):
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
        require_streams(graph, server)
        lease = Lease(name, graph.limits.worker_lease_seconds, owner, is_dead, session)
        super().__init__(name, lease)
        self.limits = graph.limits
        self.graph = graph
        self.server = server
        self.watch: Watch
        self._signatures: dict[Rule, str] = {}
        self._unbuilt: set[str] = set()
        self._ahead: Raw = {}
        # Rules that are not followed here: paused, or catching up by themselves.
        self._stopped: set[Rule] = set()
        self._replays: list[Replay] = []
        self._stream = ChangeStream()
        # What targets have gathered, for as long as the stream is read on.
        self._totals = Totals(WORKER_TOTALS_MAX)
        # An event that is too large is looked for one by one, and then read without its documents.
        self._narrow = 0
        self._raw = False
        self._beats: set[Any] = set()
        # How often the position was given up for a later one, so that beats may have been skipped.
        self._skipped = 0

    # -- leading --------------------------------------------------------------------------

    def lead(self) -> Plan[bool]:
        """Become the active worker, if there is none."""
        if not (yield from self.lease.take()):
            return False
        try:
            own: Raw = {"_id": self.name, "n": {"$lt": self.lease.token}}
            update: Raw = {"$set": {"n": self.lease.token}}
            row = yield from find_one_and_update(COLLECTION, own, update)
            if row is None:
                # The first one here, who begins at the server's present place.
                update["$setOnInsert"] = yield from first_row()
                row = yield from find_one_and_update(COLLECTION, own, update, upsert=True)
            assert row is not None
            self.position = self._ahead = {"token": row["token"], "start": row["start"]}
            self.backfills = row["owed"]
            self._counts, self._unsaved, self._narrow = {}, 0, 0
            yield from self._note_hand_over(row.get("led") or {})
            yield from self._look_around(row)
        except BaseException as error:
            # It does not lead without knowing what; the next attempt takes the same lease.
            self.lease.token = None
            if isinstance(error, DuplicateKeyError):
                # Another worker was quicker to take the lease.
                raise LeaseLost from None
            raise
        return True

    def _note_hand_over(self, before: Raw) -> Plan[None]:
        """Keep who leads, who did before, and why that ended."""
        former = before.get("owner")
        why = None if former is None else "it resigned" if before.get("resigned") else "its lease ran out"
        led: Raw = {"owner": self.lease.owner, "former": former, "why": why, "resigned": False}
        sets = {f"led.{name}": value for name, value in led.items()}
        yield from self._write_if_leading({"$set": sets, "$currentDate": {"led.since": True}})

    def _look_around(self, row: Raw) -> Plan[None]:
        """Find out which rules are paused, and which are new here."""
        yield from self._look_at_controls()
        kept = self.server.pre_images
        everything = Watch(self.graph, kept)
        self.watch = Watch(self.graph, kept, without=self._stopped) if self._stopped else everything
        self._stream = ChangeStream()
        self._signatures = {rule: signature(rule) for rule in everything.rules}
        # What another version of the application had built is not followed from here on, and no longer
        # counts as built; nor can its unfinished work be done here.
        known = set(row["rules"]) & {*self._signatures.values()}
        self.backfills = [each for each in self.backfills if each["collection"] in self.graph.by_collection]
        fresh = [rule for rule in self.watch.rules if self._signatures[rule] not in known]
        # What was paused before it was built is built when it is resumed.
        self._unbuilt = {self._signatures[rule] for rule in self._stopped} - known
        self._plan_backfill(fresh, restart=False)
        if fresh or known != set(row["rules"]):
            yield from self._save({"rules": sorted(known)})

    def _look_around_again(self) -> Plan[None]:
        """The same, after something changed."""
        row = yield from find_one(COLLECTION, {"_id": self.name})
        if row is not None:
            yield from self._look_around(row)

    def _look_at_controls(self) -> Plan[None]:
        """Stop following what is paused from here on, and let what was resumed catch up."""
        rows = yield from controls.rows(self.graph)
        self._stopped, waiting = set(), []
        for label, row in rows.items():
            rules = {rule for rule in controls.together(self.graph, label) if rule.maintain == "stream"}
            if row.get("place") is None and not (
                rules and row["paused"] and (yield from controls.stop_at(label, self.position))
            ):
                # Maintained in another way, or resumed just now: that comes by in the stream.
                continue
            self._stopped |= rules
            waiting += [] if row["paused"] else [row]
        self._replays = [Replay(self.graph, self.server, row, self._stopped) for row in waiting]

    def _warn_of(self, error: Exception) -> None:
        self._stream = ChangeStream()
        once = f"{type(error).__name__} {getattr(error, 'code', '')}"
        self._warn("errors", f"the worker continues after an error: {error}", once=once)

    # -- running ------------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> Plan[None]:
        """Lead or stand by until `stopping`."""
        backoff = WORKER_BACKOFF_SECONDS
        while not stopping():
            try:
                if not self.lease.held:
                    if not (yield from self.lead()):
                        yield from wait(self.limits.worker_standby_seconds)
                        continue
                    log.info("worker %s leads", self.lease.owner)
                yield from self.step(WORKER_AWAIT_SECONDS, linger=True)
                backoff = WORKER_BACKOFF_SECONDS
                self._warned.clear()
            except LeaseLost:
                self.lease.token = None
                self._warn("lease_lost", "the lease went to another worker; this one stands by")
            except Exception as error:
                yield from self._note_failure(error)
                if is_bug(error):
                    # Continuing would hide it: it ends the worker, with its traceback.
                    raise
                self._warn_of(error)
                yield from wait(backoff)
                backoff = min(backoff * 2, WORKER_BACKOFF_MAX_SECONDS)
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
            while awaited not in self._beats or self.backfills or self._replays:
                try:
                    handled += yield from self.step(0.2, linger=False)
                    if skipped != self._skipped:
                        awaited, skipped = (yield from beat()), self._skipped
                except PyMongoError as error:
                    attempts += 1
                    if attempts > WORKER_ATTEMPTS_MAX:
                        raise
                    self._warn_of(error)
                    yield from wait(WORKER_BACKOFF_SECONDS)
            self._beats.clear()
            if handled == before:
                break
        yield from retry_all(self.graph, self.server)
        yield from delete_many(BEATS, {"_id": {"$lte": awaited}})
        yield from self._save()
        return handled

    # -- one batch --------------------------------------------------------------------------------

    def step(self, await_seconds: float, *, linger: bool) -> Plan[int]:
        """Read events and recompute what they concern. Returns how many concerned a rule."""
        if self.backfills:
            yield from self._backfill_page()
            await_seconds, linger = 0.001, False
        elif self._replays:
            yield from self._replay()
            await_seconds, linger = 0.001, False
        few = self.limits.worker_linger_below
        try:
            events = yield from self._read(await_seconds)
            if linger and 0 < len(events) < few and self._stream.cursor:
                # More will have arrived, and are handled together.
                yield from wait(WORKER_LINGER_SECONDS)
                events += yield from self._read(0.001)
            while few <= len(events) < self.limits.worker_batch_max and self._stream.cursor:
                more = yield from self._read(0.001)
                events += more
                if len(more) < few:
                    # That was all for now. Waiting until none arrives would never end beside busy writers.
                    break
        except InvalidBSON:
            # One of the events holds what the driver cannot decode: they are read again, field by field.
            self._stream, self._raw = ChangeStream(), True
            return 1
        except OperationFailure as error:
            yield from self._answer(error)
            return 1
        if events:
            return (yield from self._handle(events))
        self.position, self._narrow = self._ahead, 0
        self._quiet += 1
        if self._unsaved or self._quiet >= WORKER_HEARTBEAT_READS:
            yield from retry_all(self.graph, self.server, due=True)
            yield from self._save()
        return 0

    def _read(self, await_seconds: float) -> Plan[list[Raw]]:
        """The next events; opens the stream where it is not open, also after the server has ended it."""
        if self._stream.cursor is None:
            lean = self._narrow == WITHOUT_DOCUMENTS
            self._totals.forget()
            yield from self._stream.open(self.watch.pipeline(self.position, lean=lean, apart=self._raw))
        most = 1 if self._narrow else self.limits.worker_batch_max
        events = yield from self._stream.read(most, await_seconds, raw=self._raw)
        self._raw = False
        if self._stream.token is not None:
            # Where the position goes once the events are handled. The time serves where the token's own
            # event is no longer found, because its collection is no longer watched.
            start = events[-1].get("clusterTime") if events else self._ahead["start"]
            self._ahead = {"token": self._stream.token, "start": start}
        return events

    def _handle(self, events: list[Raw]) -> Plan[int]:
        """Recompute what a batch concerns, and move the position past it."""
        earlier, counts = self.position, dict(self._counts)
        own = [each for each in events if each.get("coll") in OWN]
        beats = [key_of(each) for each in own if _is_of(each, BEATS)]
        controlled = [each for each in own if _is_of(each, CONTROLS)]
        others = events if not own else [each for each in events if not _is_of(each, BEATS, CONTROLS)]
        self.position = self._ahead
        self._count("events", len(others))
        self._unsaved += len(others)
        try:
            try:
                unsettled = yield from self._recompute(others, self._write_row)
                if self._unsaved > WORKER_UNSAVED_MAX:
                    yield from self._save()
            except Exception as error:
                if not divides(error):
                    raise
                # Some of these events may have been counted.
                self._totals.forget()
                unsettled = yield from divide(others, self._attempt, self._pass_over, error)
                yield from self._save()
        except BaseException:
            self.position, self._counts = earlier, counts
            self._stream = ChangeStream()
            raise
        self._beats.update(beats)
        if self._narrow == WITHOUT_DOCUMENTS:
            self._narrow, self._stream = 0, ChangeStream()
        if unsettled or controlled:
            yield from self._look_around_again()
        return len(others)

    def _attempt(self, events: Sequence[Raw]) -> Plan[list[Rule]]:
        return self._recompute(events, self._fence)

    def _pass_over(self, event: Raw, error: Exception) -> Plan[list[Rule]]:
        """Set aside a document whose event cannot be handled."""
        collection = str(event.get("coll"))
        entry = self.graph.by_collection.get(collection)
        label = self.name if entry is None else entry.model.__name__
        key = key_of(event) if event.keys() & {"id", "documentKey"} else None
        self._count("set_aside")
        yield from set_aside(label, collection, key, error)
        return []

    def _recompute(self, events: Sequence[Raw], end: Finish) -> Plan[list[Rule]]:
        """Recompute what events concern, `end` with the last of it; rules that a backfill must see to."""
        dirty = Dirty()
        self._note(events, dirty)
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
        if unsettled:
            # Sources were removed, and it is not known what they fed.
            self._totals.forget()
        self._plan_backfill(unsettled)

        def finish() -> Plan[None]:
            for rule, events in dirty.events.items():
                yield from rule.replay(events)
            yield from end()

        if dirty:
            left = frozenset(self._stopped)
            # What shards commit together shows itself at another time than its events have.
            totals = None if left or self.server.sharded else self._totals
            self._totals.until = events[-1].get("clusterTime")
            done = yield from apply(
                self.graph, self.server, dirty, self._fence, finish, without=left, totals=totals
            )
            if end == self._write_row:
                self._saved()
            self._count("recomputed", done)
            if dirty.aside:
                self._count("set_aside", dirty.aside)
        return unsettled

    def _note(self, events: Sequence[Raw], dirty: Dirty) -> None:
        """Mark what events make dirty."""
        note = self.watch.note
        for event in events:
            if (kind := event["operationType"]) in UPHEAVALS:
                where = event.get("coll")
                if where not in OWN:
                    self._warn("upheavals", f"{where or 'the database'}: {kind}; what it fed is verified now")
            note(event, dirty)

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
            self.position = self._ahead = yield from present_place()
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

    # -- catching up ------------------------------------------------------------------------------

    def _replay(self) -> Plan[None]:
        """Let a rule that was resumed catch up by some events, and join the others when it has."""
        replay = self._replays[0]
        try:
            if not (yield from replay.step(self._fence)):
                self._count("replayed", replay.handled)
                replay.handled = 0
                return
        except Exception as error:
            lost = getattr(error, "code", None) in HISTORY_LOST
            if not lost and not divides(error):
                raise
            if lost and not replay.is_lost():
                return
            reason = "was paused for longer than the server's history reaches back"
            if not lost:
                reason = "met an event that cannot be handled"
            self._warn("history_lost", f"{replay.label} {reason}; it is verified and repaired now")
            replay.unsettled |= set(replay.rules)
        self._count("replayed", replay.handled)
        yield from controls.caught_up(replay.label)
        yield from self._look_around_again()
        if replay.unsettled:
            self._plan_backfill(replay.unsettled)
            yield from self._save()

    # -- backfill -----------------------------------------------------------------------------------

    def _plan_backfill(self, rules: Iterable[Rule], *, restart: bool = True) -> None:
        """Note which collections need a backfill; from the beginning if `restart`."""
        for rule in rules:
            name = rule.target.collection
            if restart or name not in {each["collection"] for each in self.backfills}:
                self.backfills = [each for each in self.backfills if each["collection"] != name]
                self.backfills.append({"collection": name, "after": None})

    def _backfill_page(self) -> Plan[None]:
        """Verify and repair one page of a collection whose backfill is pending."""
        first = self.backfills[0]
        entry = self.graph.by_collection[first["collection"]]
        backfill = Backfill(self.graph, self.server, self._count)
        last = yield from backfill.verify(entry, first["after"])
        while last is not None and isinstance(last[0], UndecodableId):
            # An id that cannot be decoded cannot be saved either: no page ends there.
            last = yield from backfill.verify(entry, last)
        changes: Raw = {}
        if last is not None:
            self.backfills[0] = {**first, "after": last}
        else:
            self.backfills = self.backfills[1:]
            left = {each["collection"] for each in self.backfills}
            changes["rules"] = sorted(
                signed
                for rule, signed in self._signatures.items()
                if rule.target.collection not in left and signed not in self._unbuilt
            )
        yield from self._save(changes)


def _is_of(event: Raw, *collections: str) -> bool:
    """Whether an event is of a document of a collection of Treadle's own."""
    return event.get("coll") in collections and event["operationType"] not in UPHEAVALS


def require_streams(graph: Graph, server: Capabilities) -> None:
    """Refuse the worker on a server that has no change streams."""
    what = "the worker follows change streams and"
    server.require_transactions(what, code="streams-unavailable")
    if not server.streams and "streams" in graph.uses:
        raise UsageError(
            f"{what} this server has none; declare maintain='write', or rebuild() now and then",
            code="streams-unavailable",
        )
