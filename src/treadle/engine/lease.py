"""A lease: one holder at a time, by the server's clock, with a number that only grows.

The number is the fencing token: a holder that lost the lease without noticing
has a smaller one, and each write that the lease guards checks it. The clock is
the server's (`$$NOW`), so a client whose own clock is wrong neither holds a
lease too long nor takes one too early.

A holder that is killed inside a transaction leaves its documents locked until
the server aborts the transaction. The lease records the holder's session, so
that its successor can end the session at once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pymongo.errors import OperationFailure

from treadle.plan import (
    Plan,
    Raw,
    database_command,
    find_one,
    find_one_and_update,
    update_many,
    update_one,
    wait,
)

# Looks at whether the commands of a former holder have ended, and the pause between two of them.
SESSION_END_LOOKS = 250
SESSION_END_SECONDS = 0.02

COLLECTION = "treadle.leases"
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_FREE: Raw = {"until": "$$NOW", "owner": "", "session": None}


class LeaseLost(Exception):
    """Another process holds the lease by now; the work under it was not done."""


class Lease:
    """A lease as its holder sees it, with the fencing token while it is held."""

    def __init__(
        self,
        name: str,
        seconds: float,
        owner: str,
        is_dead: Callable[[str], bool],
        session: Any = None,
    ) -> None:
        self.name = name
        self.seconds = seconds
        self.owner = owner
        self.is_dead = is_dead
        self.session = session
        self.token: int | None = None
        # Set when a renewal finds the lease gone.
        self.lost = False

    @property
    def held(self) -> bool:
        """Whether it is held, as far as is known."""
        return self.token is not None and not self.lost

    @property
    def _until(self) -> Raw:
        return {"$add": ["$$NOW", int(self.seconds * 1000)]}

    def take(self) -> Plan[bool]:
        """Take the lease if it is free, has expired, or its holder has ended; returns whether it is held."""
        self.token = yield from self._take()
        self.lost = False
        return self.token is not None

    def _take(self) -> Plan[int | None]:
        before = yield from self._take_free()
        if before is None:
            row = yield from find_one(COLLECTION, {"_id": self.name})
            if row is None:
                # An expression cannot be part of an upsert, so the row comes first. Only if it is new: a
                # process that made it at the same time may hold the lease by now.
                unheld = {"$setOnInsert": {"n": 0, "until": LONG_AGO}}
                yield from update_one(COLLECTION, {"_id": self.name}, unheld, upsert=True)
                before = yield from self._take_free()
            elif row.get("owner") == self.owner or self.is_dead(str(row.get("owner", ""))):
                # One's own: it was taken before, and the reply was lost.
                before = yield from self._take_where({"n": row["n"]})
        if before is None:
            return None
        if before.get("session") != self.session:
            yield from _end_session(before.get("session"))
        return int(before["n"]) + 1

    def _take_free(self) -> Plan[Raw | None]:
        return self._take_where({"$expr": {"$lte": ["$until", "$$NOW"]}})

    def _take_where(self, condition: Raw) -> Plan[Raw | None]:
        """Take the lease on a condition. Returns the row before."""
        holder = {"owner": {"$literal": self.owner}, "session": {"$literal": self.session}}
        taken: list[Raw] = [{"$set": {**holder, "n": {"$add": ["$n", 1]}, "until": self._until}}]
        return (
            yield from find_one_and_update(COLLECTION, {"_id": self.name, **condition}, taken, after=False)
        )

    def renew(self, besides: Raw | None = None) -> Plan[None]:
        """Hold the lease for longer, also beside the work, and notice if it is gone; sets further fields."""
        token = self.token
        if token is not None:
            sets: list[Raw] = [{"$set": {"until": self._until, **(besides or {})}}]
            renewed = yield from update_one(COLLECTION, {"_id": self.name, "n": token}, sets)
            # It may have been taken again since.
            self.lost = self.lost or (not renewed.matched_count and token == self.token)

    def check(self) -> Plan[None]:
        """Hold the lease for longer; raises `LeaseLost` if it is gone."""
        yield from self.renew()
        if not self.held:
            raise LeaseLost

    def held_stages(self, field: str) -> list[Raw]:
        """Return stages that let nothing through if another process holds the lease; they need a free field.

        For a command that a holder sent before it was killed, and that the
        server begins after its successor has taken the lease.
        """
        own = [{"$match": {"_id": self.name, "n": self.token}}, {"$project": {"_id": 1}}]
        return [
            {"$lookup": {"from": COLLECTION, "pipeline": own, "as": field}},
            {"$match": {field: {"$ne": []}}},
            {"$project": {field: 0}},
        ]

    def release(self) -> Plan[None]:
        """Release the lease, if it is still held."""
        token, self.token = self.token, None
        if token is not None:
            yield from update_one(COLLECTION, {"_id": self.name, "n": token}, [{"$set": _FREE}])


def _end_session(session: Any) -> Plan[None]:
    """Release what a former holder may have locked in a transaction that it did not end.

    A command of its that still runs on the server is told to end, and ends a
    little later; until then it may still write.
    """
    if session is None:
        return
    # The look is of no collection; the driver may lend it the session of a holder in this process.
    others = {"lsid.id": session, "command.aggregate": {"$ne": 1}}
    running = [{"$currentOp": {}}, {"$match": others}, {"$limit": 1}]
    try:
        yield from database_command({"killSessions": [{"id": session}]}, admin=True)
        for _ in range(SESSION_END_LOOKS):
            look = {"aggregate": 1, "pipeline": running, "cursor": {}}
            reply = yield from database_command(look, writes=False, admin=True)
            if not reply["cursor"]["firstBatch"]:
                return
            yield from wait(SESSION_END_SECONDS)
    except OperationFailure:
        # Without the right to do so, the server's own time limit does it.
        return


def release_all(owner: str) -> Plan[None]:
    """Release every lease of an owner, also one that it took without receiving the reply."""
    yield from update_many(COLLECTION, {"owner": owner}, [{"$set": _FREE}])


def holder(name: str) -> Plan[Raw | None]:
    """Return the lease if it is held at this moment, by the server's clock."""
    held: Raw = {"_id": name, "owner": {"$ne": ""}, "$expr": {"$gt": ["$until", "$$NOW"]}}
    return (yield from find_one(COLLECTION, held))
