"""What `keep=` no longer holds: the oldest ended states, removed in the background, in pieces."""

from __future__ import annotations

import datetime as dt
from typing import Any

from treadle.patterns.history.rows import HistoryRows
from treadle.plan import Plan, Raw, aggregate, delete_many

ENDED: Raw = {"valid_to": {"$ne": None}}


def trim(rule: HistoryRows, now: dt.datetime, dry_run: bool) -> Plan[int]:
    """Remove what is beyond `keep=`; how many states these are."""
    stages = _beyond(rule.declared.keep, now)
    if stages is None:
        return 0
    if dry_run:
        rows = yield from aggregate(rule.rows_collection, [*stages, {"$count": "n"}], allowDiskUse=True)
        return rows[0]["n"] if rows else 0
    removed, most = 0, rule.limits.history_trim_page
    chosen: list[Raw] = [*stages, {"$limit": most}, {"$project": {"_id": 1}}]
    while rows := (yield from aggregate(rule.rows_collection, chosen, allowDiskUse=True)):
        ids = [row["_id"] for row in rows]
        removed += (
            yield from delete_many(rule.rows_collection, {"_id": {"$in": ids}, **ENDED})
        ).deleted_count
        if len(rows) < most:
            break
    return removed


def _beyond(keep: Any, now: dt.datetime) -> list[Raw] | None:
    """The stages that find the rows beyond what is kept; None where everything is."""
    if keep is None:
        return None
    if isinstance(keep, dt.timedelta):
        return [{"$match": {"valid_to": {"$ne": None, "$lte": now - keep}}}]
    return [
        {"$match": ENDED},
        {
            "$setWindowFields": {
                "partitionBy": "$document_id",
                "sortBy": {"valid_from": -1},
                "output": {"place": {"$documentNumber": {}}},
            }
        },
        {"$match": {"place": {"$gt": keep}}},
    ]
