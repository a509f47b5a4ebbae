"""The worker that leads, as others see it: its row, its lease, what it counted and warned of.

Each write of the row says the number of the lease, so that one who was
replaced without noticing moves nothing any more.
"""

from __future__ import annotations

from pymongo.errors import ConnectionFailure, PyMongoError

from treadle.engine.lease import Lease, LeaseLost
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, update_one
from treadle.plan.server_errors import is_passing
from treadle.upkeep.headroom import headroom, read_window
from treadle.upkeep.position import COLLECTION

# Renewals of the lease between two looks at the server's history.
WORKER_HEADROOM_RENEWALS = 15

log = get_logger(__name__)


class Leader:
    """The row of a worker in `treadle.streams`, which it writes while it holds the lease."""

    def __init__(self, name: str, lease: Lease) -> None:
        self.name = name
        self.lease = lease
        self.position: Raw = {}
        # Collections whose backfill is pending; the row calls them `owed`.
        self.backfills: list[Raw] = []
        # Totals since this worker began, and what of them is not yet saved.
        self.totals: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._unsaved = 0
        self._quiet = 0
        self._warned: set[str] = set()
        self._tended = 0
        self._low = False

    def resign(self) -> Plan[None]:
        """Save the position and let others lead."""
        try:
            if self.lease.token is not None:
                if self._unsaved:
                    yield from self._save()
                yield from self._write_if_leading({"$set": {"led.resigned": True}})
            yield from self.lease.release()
        except LeaseLost:
            self.lease.token = None

    def _save(self, changes: Raw | None = None) -> Plan[None]:
        """Keep the position, and that it is kept."""
        yield from self._write_row(changes)
        self._saved()

    def _write_row(self, changes: Raw | None = None) -> Plan[None]:
        """Write the position and the pending backfills, if this worker still leads."""
        sets: Raw = {**(changes or {}), **self.position, "owed": self.backfills, "error": None}
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

    def _note_failure(self, error: Exception) -> Plan[None]:
        """Let `status` say that the worker fails; the next batch that succeeds takes it back."""
        if isinstance(error, ConnectionFailure) or is_passing(error):
            # This could not be written either, and passes.
            return
        # What the server says may quote a document.
        kind = f"{type(error).__name__}, code {getattr(error, 'code', None)}"
        try:
            yield from self._write_if_leading({"$set": {"error": kind}})
        except (PyMongoError, LeaseLost):
            return
        self._unsaved += 1

    def tend(self) -> Plan[None]:
        """Hold the lease for longer, beside the work, and watch how much of the server's history is left."""
        yield from self.lease.renew()
        self._tended += 1
        if not self.lease.held or self._tended % WORKER_HEADROOM_RENEWALS:
            return
        room = headroom((yield from read_window()), self.position)
        if room is not None and room.low and not self._low:
            self._warn(
                "headroom_low",
                f"the server's history reaches back {room.seconds:.0f} s from where the worker stands, of "
                f"{room.window_seconds:.0f} s; when it is overtaken, everything must be verified: find out "
                "why the worker is behind, or give the server a larger oplog",
            )
        self._low = room is not None and room.low
