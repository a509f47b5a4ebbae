"""The rows of a history: their form, and which of them belong to a document.

A row holds the document's id, the number of the state, the time from which it
held and the time at which it ended, which is null while it holds. What writes
rows is `track.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Any

from bson import ObjectId
from pydantic import Field
from pymongo import ASCENDING, DESCENDING, IndexModel

from treadle.graph.calls import ArrayRule, HierarchyRule, PastRule
from treadle.graph.outcomes import Finding
from treadle.graph.rule import Models, Place
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import Plan, Raw, aggregate, find
from treadle.query.comparison import identical
from treadle.query.keys import freeze

PATH = "history"
# By which the index over open rows is used: null alone would match rows without the field too.
OPEN: Raw = {"valid_to": {"$type": "null"}}
# What rows are told apart by, without the documents in them.
HEAD: Raw = {"document": 0}
# The newest row of a document, and in an aggregation of each document: along the unique index.
NEWEST = [("valid_from", DESCENDING)]
NEWEST_OF_EACH: list[Raw] = [
    {"$sort": {"document_id": ASCENDING, "valid_from": DESCENDING}},
    {"$group": {"_id": "$document_id", "row": {"$first": "$$ROOT"}}},
]


class HistoryRows(PastRule):
    """The rows of one model's documents."""

    pattern = "history"
    # The open row tells what the document was.
    needs_before = False

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        self.declared = declared
        self.limits = place.entry.limits
        self.rows_collection: str = declared.collection or f"{place.entry.collection}_history"
        self.rows = graph.add_side(_row_model(place, self.rows_collection), place.label)

    # -- states --------------------------------------------------------------------------------------

    @property
    def paths_left_out(self) -> set[str]:
        """The maintained paths whose changes make no state."""
        kinds = self.target.kinds
        family = kinds.root.kinds.related if kinds.family is None else kinds.family.members
        return {
            owned.path
            for entry in family
            for rule in entry.rules
            # Arrays and trees are written by callers, in calls of their own.
            if rule is not self and not isinstance(rule, (ArrayRule, HierarchyRule))
            for owned in rule.owns()
        }

    def state(self, document: Raw) -> Raw:
        """Return what a row keeps of a document."""
        return {name: value for name, value in document.items() if name != RESERVED}

    def same_state(self, one: Raw, other: Raw) -> bool:
        """Whether two documents are the same state: they differ in nothing but what Treadle maintains."""
        left_out = self.target.rules.memo((self, "left out"), lambda: sorted(self.paths_left_out))
        return identical(_without(self.state(one), left_out), _without(self.state(other), left_out))

    # -- rows ----------------------------------------------------------------------------------------

    def of(self, identity: Any) -> Raw:
        """Return the filter for all rows of one document."""
        return {"document_id": {"$eq": identity}}

    def row(self, identity: Any, revision: int, begins: Any, document: Raw) -> Raw:
        """Return the row of a state that holds."""
        return {
            "_id": ObjectId(),
            "document_id": identity,
            "revision": revision,
            "valid_from": begins,
            "valid_to": None,
            "document": self.state(document),
        }

    def newest(self, ids: Sequence[Any], *, whole: bool) -> Plan[dict[Any, Raw]]:
        """Return the newest row of each document by its frozen id, with the state in it if `whole`."""
        if len(ids) == 1:
            projection = None if whole else HEAD
            rows = yield from find(self.rows_collection, self.of(ids[0]), projection, sort=NEWEST, limit=1)
        elif ids:
            shown = [] if whole else [{"$project": HEAD}]
            among = {"$match": {"document_id": {"$in": list(ids)}}}
            stages = [among, *NEWEST_OF_EACH, {"$replaceWith": "$row"}, *shown]
            rows = yield from aggregate(self.rows_collection, stages)
        else:
            rows = []
        # Where another program removed the end of a row, it has none.
        return {freeze(row["document_id"]): {"valid_to": None, **row} for row in rows}

    def finding(self, identity: Any, stored: Any, expected: Any) -> Finding:
        return Finding(self.pattern, self.target.model.__name__, identity, PATH, stored, expected)


def _without(document: Raw, paths: Sequence[str]) -> Raw:
    """Return a document without some paths, also in the elements of arrays."""
    for path in paths:
        document = _removed(document, path.split("."))
    return document


def _removed(value: Any, steps: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_removed(each, steps) for each in value]
    if not isinstance(value, dict) or steps[0] not in value:
        return value
    rest = {name: each for name, each in value.items() if name != steps[0]}
    return rest if len(steps) == 1 else {**rest, steps[0]: _removed(value[steps[0]], steps[1:])}


def _row_model(place: Place, collection: str) -> type[Document]:
    """Return the model of a row, for its collection and indexes."""
    identity: Any = place.entry.model.__pydantic_fields__["id"].rebuild_annotation()
    annotations: dict[str, Any] = {
        "document_id": Annotated[identity, Field()],
        "revision": int,
        "valid_from": dt.datetime,
        "valid_to": dt.datetime | None,
        "document": dict[str, Any],
    }
    indexes = [
        IndexModel([("document_id", ASCENDING), ("valid_from", DESCENDING)], unique=True),
        # One open row per existing document.
        IndexModel([("document_id", ASCENDING)], name="open", unique=True, partialFilterExpression=OPEN),
    ]
    kind: Any = type(Document)
    made: type[Document] = kind(
        f"{place.entry.model.__name__}_history",
        (Document,),
        {"__annotations__": annotations, "__module__": __name__},
        collection=collection,
        validation="off",
        indexes=indexes,
    )
    return made
