"""One-off migrations: work on data that no model's version stands for, done once per database.

The row of `treadle.migrations` that says "done" is what makes it once. It is
written under a lease, which others wait for, and which is renewed beside the
work. Work that fails or is killed has no such row, and the next call begins
it again: so it must be harmless to do a part of it twice.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from treadle.engine.lease import Lease, acquire
from treadle.errors import UsageError
from treadle.model.shown import quoted
from treadle.plan import Plan, Raw, by_id, find_one, update_one
from treadle.upkeep.migrations.log import COLLECTION, end, forget_old

NAME_LENGTH_MAX = 200


class Once:
    """One piece of work by its name: whether it is to be done, and its row in the log."""

    def __init__(self, name: str, lease: Lease, work: Any) -> None:
        if not callable(work):
            raise UsageError(
                f"migrate_once({quoted(name)}, …) has {quoted(work)} as its work; it takes a function of the "
                "store",
                code="migration-option",
            )
        if not isinstance(name, str) or not name.strip() or len(name) > NAME_LENGTH_MAX or "\0" in name:
            raise UsageError(
                f"{name!r} is no name for a migration; it takes text of 1 to {NAME_LENGTH_MAX} characters, "
                "the same for ever",
                code="migration-option",
            )
        self.name = name
        self.lease = lease
        self.key = ObjectId()

    def check(self, returned: Any, *, awaits: bool) -> None:
        """Refuse work of the other shell, which was not done, or would not be awaited."""
        if inspect.isawaitable(returned) != awaits:
            if inspect.iscoroutine(returned):
                returned.close()
            how = "it returned nothing to await; make it `async def`" if awaits else "it is to be awaited"
            raise UsageError(
                f"the work of migrate_once({quoted(self.name)}, …) does not go with this store: {how}",
                code="migration-option",
            )

    @property
    def _done(self) -> Raw:
        return {"once": self.name, "outcome": "done"}

    def begin(self) -> Plan[bool]:
        """Wait for whoever is at it; whether it is to be done now, under the lease."""
        if (yield from find_one(COLLECTION, self._done, {"_id": 1})) is not None:
            return False
        lease = self.lease
        lease.token = yield from acquire(lease.limits, lease.name, lease.owner, lease.seconds, lease.is_dead)
        if (yield from find_one(COLLECTION, self._done, {"_id": 1})) is not None:
            yield from lease.release()
            return False
        sets = {"started": "$$NOW", "once": {"$literal": self.name}, "owner": {"$literal": lease.owner}}
        yield from update_one(COLLECTION, by_id(self.key), [{"$set": sets}], upsert=True)
        yield from forget_old(lease.limits)
        return True

    def finish(self, result: Any) -> Plan[None]:
        """Note that it was done, unless somebody else has begun it meanwhile."""
        yield from self.lease.check()
        counted = result if isinstance(result, int) and not isinstance(result, bool) else 0
        yield from end(self.key, {"outcome": "done", "migrated": counted})
        yield from self.lease.release()

    def fail(self, error: BaseException) -> Plan[None]:
        """Note that it failed, so that the next call begins it again."""
        with contextlib.suppress(PyMongoError):
            yield from end(self.key, {"outcome": type(error).__name__})
            yield from self.lease.release()
