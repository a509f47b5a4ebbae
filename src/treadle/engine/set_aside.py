"""Documents that could not be brought up to date, noted with the reason, so that the others go on."""

from __future__ import annotations

import logging
from typing import Any

from pymongo.errors import OperationFailure

from treadle.plan import Plan, update_one

SET_ASIDE = "treadle.set_aside"

log = logging.getLogger("treadle")


def set_aside(label: str, collection: str, key: Any, error: Exception) -> Plan[None]:
    """Note a document that could not be brought up to date, and go on; it is logged once."""
    details = (error.details or {}) if isinstance(error, OperationFailure) else {}
    reason = str(details.get("errmsg") or error.args[0])
    if (yield from note_aside(label, collection, key, reason)):
        log.warning("%s: %s %r was set aside: %s", label, collection, key, reason[:200])


def note_aside(label: str, collection: str, key: Any, reason: str) -> Plan[bool]:
    """Note a document with the reason why it is passed over; whether it was not noted before."""
    result = yield from update_one(
        SET_ASIDE,
        {"_id": {"rule": label, "collection": collection, "key": key}},
        {"$set": {"reason": reason[:500]}, "$currentDate": {"at": True}},
        upsert=True,
    )
    return not result.matched_count
