"""A lease: one holder at a time, by the server's clock, with a number that only grows.

The number is the fencing token: whoever lost the lease without noticing has a
smaller one, and each write that the lease guards checks it. The clock is the
server's (`$$NOW`), so a client whose own clock is wrong neither holds a lease
too long nor takes one too early.

A holder that is killed inside a transaction leaves its documents locked until
the server gives the transaction up. The lease records the holder's session,
so that whoever follows can end it at once.
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

# Looks at whether the commands of a former holder have ended.
SESSION_END_LOOKS = 250
# The pause between two looks.
SESSION_END_SECONDS = 0.02

COLLECTION = "treadle.leases"
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class LeaseLost(Exception):
    """Somebody else holds the lease by now; whatever was to be done under it is not done."""


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

    def take(self) -> Plan[bool]:
        """Take it if it is free; whether it is held now."""
        self.token = yield from attempt(self.name, self.owner, self.seconds, self.is_dead, self.session)
        self.lost = False
        return self.token is not None

    def renew(self, besides: Raw | None = None) -> Plan[None]:
        """Hold it for longer, beside the work, and notice if it is gone; sets what stands in it besides."""
        token = self.token
        if token is not None and not (yield from renew(self.name, token, self.seconds, besides)):
            self.lost = self.lost or token == self.token

    def check(self) -> Plan[None]:
        """Hold it for longer; raises `LeaseLost` if it is gone."""
        yield from self.renew()
        if not self.held:
            raise LeaseLost

    def held_stages(self, place: str) -> list[Raw]:
        """Stages that let nothing through if the lease is another's by now; they need a free field.

        For a command that a holder sent before it was killed, and that the server
        begins after somebody else has taken the lease.
        """
        own = [{"$match": {"_id": self.name, "n": self.token}}, {"$project": {"_id": 1}}]
        return [
            {"$lookup": {"from": COLLECTION, "pipeline": own, "as": place}},
            {"$match": {place: {"$ne": []}}},
            {"$project": {place: 0}},
        ]

    def release(self) -> Plan[None]:
        """Let others have it."""
        token, self.token = self.token, None
        if token is not None:
            yield from release(self.name, token)


def attempt(
    name: str, owner: str, seconds: float, is_dead: Callable[[str], bool], session: Any = None
) -> Plan[int | None]:
    """Take a lease if it is free, has run out, or its holder has ended; its fencing token, or None."""
    taken = _taking(owner, seconds, session)
    free: Raw = {"_id": name, "$expr": {"$lte": ["$until", "$$NOW"]}}
    before = yield from find_one_and_update(COLLECTION, free, taken, after=False)
    if before is None:
        before = yield from find_one(COLLECTION, {"_id": name})
        if before is None:
            # An expression cannot be part of an upsert, so the row comes first.
            # Only if it is new: whoever made it first may hold it by now.
            row = {"$setOnInsert": {"n": 0, "until": LONG_AGO}}
            yield from update_one(COLLECTION, {"_id": name}, row, upsert=True)
            before = yield from find_one_and_update(COLLECTION, free, taken, after=False)
        elif before.get("owner") == owner or is_dead(str(before.get("owner", ""))):
            # One's own: it was taken before, and the reply was lost.
            unchanged = {"_id": name, "n": before["n"]}
            before = yield from find_one_and_update(COLLECTION, unchanged, taken, after=False)
        else:
            return None
    if before is None:
        return None
    if before.get("session") != session:
        yield from _end_session(before.get("session"))
    return int(before["n"]) + 1


def _taking(owner: str, seconds: float, session: Any) -> list[Raw]:
    until = {"$add": ["$$NOW", int(seconds * 1000)]}
    holder = {"owner": {"$literal": owner}, "session": {"$literal": session}}
    return [{"$set": {**holder, "n": {"$add": ["$n", 1]}, "until": until}}]


def _end_session(session: Any) -> Plan[None]:
    """Let go of what a holder before may have locked in a transaction that it did not end.

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


def renew(name: str, token: int, seconds: float, besides: Raw | None = None) -> Plan[bool]:
    """Hold a lease for longer, and set what stands in it besides; whether it is still held."""
    sets = {"until": {"$add": ["$$NOW", int(seconds * 1000)]}, **(besides or {})}
    held = yield from update_one(COLLECTION, {"_id": name, "n": token}, [{"$set": sets}])
    return bool(held.matched_count)


_FREE: Raw = {"until": "$$NOW", "owner": "", "session": None}


def release(name: str, token: int) -> Plan[None]:
    """Let a lease go, if it is still the same one."""
    yield from update_one(COLLECTION, {"_id": name, "n": token}, [{"$set": _FREE}])


def let_go(owner: str) -> Plan[None]:
    """Release whatever an owner holds, also what it took without hearing of it."""
    yield from update_many(COLLECTION, {"owner": owner}, [{"$set": _FREE}])


def holder(name: str) -> Plan[Raw | None]:
    """The lease as it is held just now, by the server's clock."""
    held: Raw = {"_id": name, "owner": {"$ne": ""}, "$expr": {"$gt": ["$until", "$$NOW"]}}
    return (yield from find_one(COLLECTION, held))
