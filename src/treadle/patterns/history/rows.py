"""The rows of a history: one per state, and how the next one begins where the last one ends.

A row holds the document's id, the number of the state, the time from which it
held and the time at which it ended, which is null while it holds. Rules:

1. Times are the server's. The end of a state is never before its beginning,
   whatever the clock does, and the next state begins at that very moment.
2. The row of a state is written in the commit that begins it, and ended in
   the one that ends it. Both write the document as well, so two writers of
   one document always meet, and numbers have no holes.
3. Inside a transaction of the caller, several writes of one document make one
   state. A row that is seen inside, but not outside of it, is its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from bson import ObjectId
from pydantic import Field
from pymongo import DESCENDING, IndexModel

from treadle.graph.calls import ArrayRule, HierarchyRule
from treadle.graph.changes import Before, Change, Changes, NotRead
from treadle.graph.rule import Models, Place, Rule
from treadle.graph.scope import Image
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    by_id,
    delete_one,
    find,
    find_one,
    find_one_and_update,
    insert_many,
    outside,
    update_many,
    update_one,
)
from treadle.query.comparison import identical
from treadle.query.keys import freeze

MILLISECOND = dt.timedelta(milliseconds=1)
# The end of a state; at least a moment after its beginning.
END: Raw = {"$max": ["$$NOW", {"$add": ["$valid_from", 1]}]}
# By which the index over open rows is used: null alone would match rows without the field too.
OPEN: Raw = {"valid_to": {"$type": "null"}}
# What rows are told apart by, without the documents in them.
HEAD: Raw = {"document": 0}


@dataclass(frozen=True)
class Move:
    """One document's state before and after a commit; None where there was or is none.

    The open row has a state before that was not read.
    """

    id: Any
    before: Raw | NotRead | None
    after: Raw | None
    # Whether nobody else can know the id, so that there are no rows of it.
    fresh: bool


class HistoryRows(Rule):
    """The rows of one model's documents, and what writes them."""

    pattern = "history"
    # The open row tells what the document was.
    needs_before = False

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        self.declared = declared
        self.limits = place.entry.limits
        self.rows_collection: str = declared.collection or f"{place.entry.collection}_history"
        self.rows = graph.add_side(_row_model(place, self.rows_collection), place.label)

    @property
    def paths_left_out(self) -> set[str]:
        """The maintained paths whose changes make no state."""
        family = (
            self.target.kinds.root.kinds.related
            if self.target.kinds.family is None
            else self.target.kinds.family.members
        )
        return {
            path
            for entry in family
            for rule in entry.rules
            # Arrays and trees are written by callers, in calls of their own.
            if rule is not self and not isinstance(rule, (ArrayRule, HierarchyRule))
            for path in (owned.path for owned in rule.owns())
        }

    def state(self, document: Raw) -> Raw:
        """What a row keeps of a document."""
        return {name: value for name, value in document.items() if name != RESERVED}

    def alike(self, one: Raw, other: Raw) -> bool:
        """Whether two documents are the same state."""
        left_out = self.target.rules.memo((self, "left out"), lambda: sorted(self.paths_left_out))
        return identical(_without(self.state(one), left_out), _without(self.state(other), left_out))

    def of(self, identity: Any) -> Raw:
        """The filter for all rows of one document."""
        return {"document_id": {"$eq": identity}}

    # -- writing ---------------------------------------------------------------------------------

    def moves(self, changes: Iterable[Change], commit: Changes) -> list[Move]:
        """The changes that begin or end a state of this model."""
        moves = []
        for change in changes:
            before, after = self._state(change.before), self._state(change.after)
            assert not isinstance(after, NotRead)
            if before is None and after is None:
                continue
            if before is not None and after is not None and not self._differ(change):
                continue
            is_new = before is None and commit.is_new_id(self.target, change.id)
            moves.append(Move(change.id, before, after, is_new))
        return moves

    def _state(self, image: Before) -> Raw | NotRead | None:
        """What a document was or is to this model; None also where it is deleted."""
        if not isinstance(image, Image):
            return image
        return image.document if self.target.everything.holds(image) else None

    def _differ(self, change: Change) -> bool:
        """Whether a document has another state than before; its upgrade is one."""
        before, after = change
        if not isinstance(before, Image) or after is None:
            return True
        return before.outdated != after.outdated or not self.alike(before.document, after.document)

    def advance(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        """End the states that the changes ended, and begin those that they began."""
        moves = self.moves(changes, ledger)
        if ledger.joined:
            others = []
            for move in moves:
                if move.fresh or not (yield from self._amend(move)):
                    others.append(move)
            moves = others
        known = [move for move in moves if not isinstance(move.before, NotRead)]
        for move in moves:
            if isinstance(move.before, NotRead):
                known += yield from self._follow(move)
        if known:
            yield from self.perform(known)

    def _follow(self, move: Move) -> Plan[list[Move]]:
        """Follow an update of which nobody knows what the document was: its open row tells.

        The move itself, with the state before, where there is no such row.
        """
        row = yield from find_one_and_update(
            self.rows_collection, {**self.of(move.id), **OPEN}, _ended(move.after is None)
        )
        if row is None:
            # Others are kept from the document by this transaction, which has written it.
            images = yield from outside(lambda: self.target.targets.find(by_id(move.id)))
            before = images[0].document if images else None
            alike = before is not None and move.after is not None and self.alike(before, move.after)
            return [] if alike else [Move(move.id, before, move.after, move.fresh)]
        if move.after is None:
            return []
        if self.alike(row.get("document") or {}, move.after):
            yield from self._reopen(row)
        else:
            following = self.row(move.id, row["revision"] + 1, row["valid_to"], move.after)
            yield from insert_many(self.rows_collection, [following])
        return []

    def perform(self, moves: Sequence[Move]) -> Plan[None]:
        """The rows of these moves, each document once."""
        ended = yield from self._end([move for move in moves if move.before is not None])
        begun = [move for move in moves if move.after is not None]
        unknown = [move.id for move in begun if move.before is None and not move.fresh]
        lasts = {**(yield from self._ended_rows(unknown)), **ended}
        rows, first = [], None
        for move in begun:
            last = lasts.get(freeze(move.id))
            begins = None if last is None or move.before is None else last["valid_to"]
            row = self.row(move.id, last["revision"] + 1 if last else 1, begins, move.after)
            if begins is None:
                if first is None:
                    # The server's time is known from the first of them.
                    floor = last["valid_to"] if last else None
                    first = yield from self._put(row, _at_least(floor))
                    continue
                row["valid_from"] = max([first["valid_from"], *([last["valid_to"]] if last else [])])
            rows.append(row)
        if rows:
            yield from insert_many(self.rows_collection, rows)

    def row(self, identity: Any, revision: int, begins: Any, document: Raw | None) -> Raw:
        """A row of a state that holds."""
        return {
            "_id": ObjectId(),
            "document_id": identity,
            "revision": revision,
            "valid_from": begins,
            "valid_to": None,
            "document": self.state(document or {}),
        }

    def _put(self, row: Raw, begins: Any, ends: Any = None) -> Plan[Raw]:
        """Store a row whose times the server is to tell; the row without its document."""
        times = {"valid_from": begins, "valid_to": ends}
        literal = {name: {"$literal": value} for name, value in row.items() if name not in times}
        # In the order in which other rows have their fields.
        whole = {name: times.get(name, literal.get(name)) for name in row}
        stored = yield from find_one_and_update(
            self.rows_collection, by_id(row["_id"]), [{"$replaceWith": whole}], upsert=True, projection=HEAD
        )
        assert stored is not None
        return stored

    def last_rows(self, identities: Sequence[Any]) -> Plan[dict[Any, Raw]]:
        """The newest row of each document, by frozen id, without the documents."""
        if not identities:
            return {}
        if len(identities) == 1:
            newest = [("valid_from", DESCENDING)]
            row = yield from find_one(self.rows_collection, self.of(identities[0]), HEAD, sort=newest)
            return {} if row is None else {freeze(identities[0]): {"valid_to": None, **row}}
        chosen = {"document_id": {"$in": list(identities)}}
        rows = yield from find(
            self.rows_collection, chosen, HEAD, sort=[("document_id", 1), ("valid_from", 1)]
        )
        # Somebody may have removed the end of a row; then it has none.
        return {freeze(row["document_id"]): {"valid_to": None, **row} for row in rows}

    def _ended_rows(self, identities: Sequence[Any]) -> Plan[dict[Any, Raw]]:
        """The newest row of each document that begins anew; one that is still open ends here.

        Another writer deleted the document, and nobody was told.
        """
        lasts = yield from self.last_rows(identities)
        still_open = [row["_id"] for row in lasts.values() if row["valid_to"] is None]
        if still_open:
            chosen = {"_id": {"$in": still_open}}
            yield from update_many(self.rows_collection, chosen, _ended(gone=True))
            for row in (yield from find(self.rows_collection, chosen, HEAD)):
                lasts[freeze(row["document_id"])] = row
        return lasts

    def _end(self, moves: Sequence[Move]) -> Plan[dict[Any, Raw]]:
        """End the open states of these documents; their rows after, by frozen id."""
        ended: dict[Any, Raw] = {}
        if len(moves) == 1:
            (move,) = moves
            row = yield from find_one_and_update(
                self.rows_collection,
                {**self.of(move.id), **OPEN},
                _ended(move.after is None),
                projection=HEAD,
            )
            if row is not None:
                ended[freeze(move.id)] = row
        elif moves:
            chosen = {"document_id": {"$in": [move.id for move in moves]}, **OPEN}
            rows = yield from find(self.rows_collection, chosen, {"document_id": 1})
            keys = {freeze(row["document_id"]): row["_id"] for row in rows}
            for gone in (True, False):
                some = [
                    keys[freeze(move.id)]
                    for move in moves
                    if (move.after is None) is gone and freeze(move.id) in keys
                ]
                if some:
                    yield from update_many(self.rows_collection, {"_id": {"$in": some}}, _ended(gone))
            for row in (yield from find(self.rows_collection, {"_id": {"$in": [*keys.values()]}}, HEAD)):
                ended[freeze(row["document_id"])] = row
        for move in moves:
            if freeze(move.id) not in ended:
                ended[freeze(move.id)] = yield from self._adopt(move)
        return ended

    def _adopt(self, move: Move) -> Plan[Raw]:
        """The row of a state that nobody recorded: it is known to have held until now."""
        last = (yield from self.last_rows([move.id])).get(freeze(move.id))
        if last is not None and last["valid_to"] is None:
            # Open all the same: somebody removed the field.
            ended = yield from find_one_and_update(
                self.rows_collection, by_id(last["_id"]), _ended(move.after is None)
            )
            assert ended is not None
            return ended
        assert not isinstance(move.before, NotRead)
        row = self.row(move.id, last["revision"] + 1 if last else 1, None, move.before)
        if move.after is None:
            row["deleted"] = True
        begins: Any = last["valid_to"] if last else None
        if begins is None:
            return (yield from self._put(row, {"$subtract": ["$$NOW", 1]}, "$$NOW"))
        return (yield from self._put(row, begins, _at_least(begins + MILLISECOND)))

    # -- inside a transaction of the caller --------------------------------------------------------

    def _amend(self, move: Move) -> Plan[bool]:
        """Let a further write of one transaction belong to the state that it began; whether it does."""
        newest = [("valid_from", DESCENDING)]
        row = yield from find_one(self.rows_collection, self.of(move.id), sort=newest)
        if row is None:
            return False
        committed = yield from outside(
            lambda: find_one(self.rows_collection, by_id(row["_id"]), {"valid_to": 1})
        )
        if row.get("valid_to") is not None:
            if committed is None or committed.get("valid_to") is not None or move.after is None:
                return False
            # It was deleted and comes back, all in one transaction: nobody saw it gone.
            if self.alike(row["document"], move.after):
                yield from self._reopen(row)
                return True
            yield from update_one(self.rows_collection, by_id(row["_id"]), {"$unset": {"deleted": 1}})
            number, begins = row["revision"] + 1, row["valid_to"]
            yield from insert_many(self.rows_collection, [self.row(move.id, number, begins, move.after)])
            return True
        if committed is not None:
            return False
        yield from self._amend_own(row, move.after)
        return True

    def _amend_own(self, row: Raw, after: Raw | None) -> Plan[None]:
        """Change a state that this very transaction began."""
        earlier = {**self.of(row["document_id"]), "revision": row["revision"] - 1}
        last = yield from find_one(self.rows_collection, earlier)
        before = None
        if last is not None and last.get("valid_to") == row["valid_from"] and not last.get("deleted"):
            before = last["document"]
        if after is not None and (before is None or not self.alike(before, after)):
            yield from update_one(
                self.rows_collection, by_id(row["_id"]), {"$set": {"document": self.state(after)}}
            )
            return
        yield from delete_one(self.rows_collection, by_id(row["_id"]))
        if last is not None and before is not None:
            if after is not None:
                yield from self._reopen(last)
            else:
                yield from update_one(self.rows_collection, by_id(last["_id"]), {"$set": {"deleted": True}})

    def _reopen(self, row: Raw) -> Plan[None]:
        update = {"$set": {"valid_to": None}, "$unset": {"deleted": 1}}
        yield from update_one(self.rows_collection, by_id(row["_id"]), update)


def _ended(gone: bool) -> list[Raw]:
    """The stages that end a state; `gone` says that the document went with it."""
    return [{"$set": {"valid_to": END, **({"deleted": True} if gone else {})}}]


def _at_least(floor: dt.datetime | None) -> Any:
    """The server's time, as an expression; not before another."""
    return "$$NOW" if floor is None else {"$max": ["$$NOW", floor]}


def _without(document: Raw, paths: Sequence[str]) -> Raw:
    """A document without some paths, also in the elements of arrays."""
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
    """The model of a row, for its collection and indexes."""
    identity: Any = place.entry.model.__pydantic_fields__["id"].rebuild_annotation()
    annotations: dict[str, Any] = {
        "document_id": Annotated[identity, Field()],
        "revision": int,
        "valid_from": dt.datetime,
        "valid_to": dt.datetime | None,
        "document": dict[str, Any],
    }
    indexes = [
        IndexModel([("document_id", 1), ("valid_from", DESCENDING)], unique=True),
        # One open row per living document.
        IndexModel(
            [("document_id", 1)],
            name="open",
            unique=True,
            partialFilterExpression={"valid_to": {"$type": "null"}},
        ),
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
