"""Documents that were set aside: list them, try again, or let them be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import bson

from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.quarantine import SET_ASIDE
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.text import quote
from treadle.plan import Plan, Raw, delete_one, find, find_one
from treadle.plan.capabilities import Capabilities
from treadle.upkeep import retries
from treadle.upkeep.migrate import LISTED_MAX

# Under this the documents of a migration are noted, which has a retry of its own.
MIGRATION = "migrate "


@dataclass(frozen=True)
class SetAsideDocument:
    """A document that could not be processed, and why."""

    rule: str
    collection: str
    document_id: Any
    reason: str
    code: Any = None
    since: datetime | None = None
    attempts: int = 1

    @property
    def identity(self) -> Raw:
        """The `_id` of its row."""
        return {"rule": self.rule, "collection": self.collection, "key": self.document_id}

    @property
    def token(self) -> str:
        """A short name for it, for a command line or a URL."""
        return hashlib.sha256(bson.encode(self.identity, codec_options=CODEC_OPTIONS)).hexdigest()[:16]


def listed(graph: Graph, rule: str | None = None, most: int | None = None) -> Plan[list[SetAsideDocument]]:
    """What was set aside, the longest waiting first; of all rules or of one."""
    chosen: Raw = {} if rule is None else {"_id.rule": rule}
    most = most or LISTED_MAX
    rows = yield from find(SET_ASIDE, chosen, sort=[("since", 1), ("_id", 1)], limit=most)
    return [_item(row) for row in rows]


def _item(row: Raw) -> SetAsideDocument:
    key = row["_id"]
    return SetAsideDocument(
        key["rule"],
        key["collection"],
        key["key"],
        row.get("reason", ""),
        row.get("code"),
        row.get("since") or row.get("at"),
        row.get("attempts", 1),
    )


def named(graph: Graph, token: str) -> Plan[SetAsideDocument]:
    """The one that a short name means."""
    for each in (yield from listed(graph)):
        if each.token == token:
            return each
    raise UsageError(
        f"nothing that was set aside is called {token!r}; it may be settled by now", code="set-aside-unknown"
    )


def require_item(item: Any) -> SetAsideDocument:
    """Refuse what is nothing that was set aside."""
    if not isinstance(item, SetAsideDocument):
        raise UsageError(
            f"{quote(item)} is nothing that was set aside; take it from set_aside()",
            code="set-aside-unknown",
        )
    return item


def discard(item: SetAsideDocument) -> Plan[bool]:
    """Forget a document that was set aside; it stays as it is. Whether it was still noted."""
    require_item(item)
    return bool((yield from delete_one(SET_ASIDE, {"_id": {"$eq": item.identity}})).deleted_count)


def retry(graph: Graph, server: Capabilities, item: SetAsideDocument) -> Plan[bool]:
    """Try once more to bring a document right; whether that is done. If not, it stays noted."""
    require_item(item)
    if item.rule.startswith(MIGRATION):
        raise UsageError(
            f"{item.collection} {item.document_id!r} was set aside by a migration; correct it, then run "
            "migrate(…, retry=True)",
            code="set-aside-migration",
        )
    entry = graph.by_collection.get(item.collection)
    if entry is None:
        raise UsageError(
            f"no model of this store has the collection {item.collection!r}; retry with the application "
            "that set the document aside",
            code="set-aside-unknown",
        )
    row = yield from find_one(SET_ASIDE, {"_id": {"$eq": item.identity}})
    return row is None or (yield from retries.retry(graph, server, row))
