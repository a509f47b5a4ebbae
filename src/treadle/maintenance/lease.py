"""A lease: one holder at a time, by the server's clock, with a number that only grows.

The number is the fencing token: whoever lost the lease without noticing has a
smaller one. The clock is the server's (`$$NOW`), so a client whose own clock
is wrong neither holds a lease too long nor takes one too early.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.errors import DataError
from treadle.plan import Plan, Raw, find_one, find_one_and_update, update_one, wait

COLLECTION = "treadle.leases"
WAIT_MAX_SECONDS = 60.0
PAUSE_SECONDS = 0.005
PAUSE_MAX_SECONDS = 0.1


def acquire(name: str, owner: str, seconds: float, is_dead: Callable[[str], bool]) -> Plan[int]:
    """Wait for a lease and take it; its fencing token.

    A holder that has certainly ended is not waited for.
    """
    taken = _taking(owner, seconds)
    free: Raw = {"_id": name, "$expr": {"$lte": ["$until", "$$NOW"]}}
    waited, pause = 0.0, PAUSE_SECONDS
    while True:
        lease = yield from find_one_and_update(COLLECTION, free, taken)
        if lease is not None:
            return int(lease["n"])
        lease = yield from find_one(COLLECTION, {"_id": name})
        if lease is None:
            # An expression cannot be part of an upsert, so the row comes first.
            row = {"$setOnInsert": {"n": 0}, "$currentDate": {"until": True}}
            yield from update_one(COLLECTION, {"_id": name}, row, upsert=True)
            continue
        if is_dead(str(lease.get("owner", ""))):
            lease = yield from find_one_and_update(COLLECTION, {"_id": name, "n": lease["n"]}, taken)
            if lease is not None:
                return int(lease["n"])
        if waited > WAIT_MAX_SECONDS:
            raise DataError(
                f"the lease {name!r} has been held by others for {WAIT_MAX_SECONDS:.0f} s; "
                "see whether one of them hangs",
                code="lease-busy",
            )
        yield from wait(pause)
        waited += pause
        pause = min(pause * 1.5, PAUSE_MAX_SECONDS)


def _taking(owner: str, seconds: float) -> list[Raw]:
    until = {"$add": ["$$NOW", int(seconds * 1000)]}
    return [{"$set": {"owner": {"$literal": owner}, "n": {"$add": ["$n", 1]}, "until": until}}]


def release(name: str, token: int) -> Plan[None]:
    """Let a lease go, if it is still the same one."""
    yield from update_one(COLLECTION, {"_id": name, "n": token}, [{"$set": {"until": "$$NOW", "owner": ""}}])
