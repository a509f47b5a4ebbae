"""Proof and repair of archives: documents that another writer put in both places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.graph.outcomes import Finding
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import matching
from treadle.patterns.archive.places import ArchivePlaces
from treadle.plan import Plan, Raw, delete_one, find, find_one_and_update, transact
from treadle.query.keys import freeze


def doubled(rule: ArchivePlaces) -> Plan[list[Finding]]:
    """Archived documents that are in their own collection as well."""
    findings: list[Finding] = []
    last: list[Any] | None = None
    while rows := (yield from matching(rule.into, {}, last, rule.limits.verify_page)):
        last = [rows[-1]["_id"]]
        here = {"_id": {"$in": [row["_id"] for row in rows]}}
        living = {freeze(each["_id"]) for each in (yield from find(rule.target.collection, here, {"_id": 1}))}
        for row in rows:
            if freeze(row["_id"]) in living:
                findings.append(
                    Finding(rule.pattern, rule.target.model.__name__, row["_id"], rule.into, row, None)
                )
    return findings


def mend(rule: ArchivePlaces, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Remove from the archive what is in its own collection, which is where writers changed it."""
    rows = yield from find(rule.into, {"_id": {"$in": list(keys)}}, {"_id": 1})
    changed = []
    for row in rows:
        if (yield from transact(lambda row=row: _mend(rule, row))):  # type: ignore[misc]
            changed.append(row["_id"])
    return changed


def _mend(rule: ArchivePlaces, row: Raw) -> Plan[bool]:
    # Really written, so that a move of the same document meets this.
    key = {"_id": {"$eq": row["_id"]}}
    living = yield from find_one_and_update(
        rule.target.collection, key, {"$inc": {REVISION: 1}}, projection={"_id": 1}
    )
    if living is None:
        return False
    return bool((yield from delete_one(rule.into, key)).deleted_count)
