"""Moves to and from an archive in another cluster: in two phases, under intents.

No transaction reaches both clusters. An intent per document in
`treadle.intents` claims it first, so that nobody else moves it. Then it is
copied there, under the token of this move. Then one transaction here deletes
those documents that are still as they were copied, with their intents. What
an intent still names is hidden from whoever reads the archive; its copy is
removed, by the move itself or after a crash by whoever recovers, and only
then the intent. So a document is archived in the very moment in which that
transaction commits.

A document that comes back is inserted here in a transaction that notes so in
its intent; from then on the copy there is hidden, and is removed.

A copy is only ever inserted, and only removed under its own token: a writer
that slept while its move was undone neither overwrites nor removes what
another one has archived since.

Where derived values count what is archived, a copy is marked as such until
its move is committed, and whoever computes a value does so at one moment of
this cluster: the intents of that moment tell which marked copies are archived
already, and which others no more. Nothing may be archived or come back until
that transaction ends, so it writes a guard, of which every move writes all.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import bson
from bson import ObjectId
from pymongo import InsertOne, UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from treadle.engine.commit import Commit
from treadle.engine.fill import GUARDS
from treadle.engine.intents import COLLECTION
from treadle.engine.lease import LONG_AGO
from treadle.engine.ledger import Ledger
from treadle.graph.change import Change
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.patterns.archive.places import ArchivePlaces
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    by_id,
    delete_many,
    find,
    find_one,
    insert_one,
    is_inside,
    update_many,
    wait,
)
from treadle.plan.server_errors import DUPLICATE_KEY, lacks_majority
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at

# What becomes of a copy there: not yet archived, archived until it is inserted here, or to be removed.
# Counted ones are moved until the mark on their copy is gone.
COPYING, RESTORING, OVER, MOVED = "copying", "restoring", "over", "moved"
# Where a copy has the token of the move that made it.
TOKEN = f"{RESERVED}.archive"
# What marks a copy of which only an intent says whether it is archived.
MARK = f"{RESERVED}.copied"
GUARD_SLOTS = 8
# How long whoever brings a document back waits for another who is moving it, in seconds.
PAUSES = (0.01, 0.02, 0.04, 0.08)


class Undone(Exception):
    """Somebody recovered this move meanwhile."""


def _intents(rule: ArchivePlaces) -> Raw:
    return {"_id.kind": "archive", "_id.rule": rule.place.label}


def _identity(rule: ArchivePlaces, key: Any) -> Raw:
    return {"kind": "archive", "rule": rule.place.label, "key": key}


def hidden(rule: ArchivePlaces) -> Plan[list[Any]]:
    """The ids of the copies there that are not archived: not yet, or no more."""
    condition = {**_intents(rule), "state": {"$nin": [RESTORING, MOVED]}}
    rows = yield from find(COLLECTION, condition, {"_id": 1})
    return [row["_id"]["key"] for row in rows]


def seen(rule: ArchivePlaces, keys: Sequence[Any]) -> Plan[Raw]:
    """The condition that copies meet which are archived; in a transaction, until that ends."""
    if (yield from is_inside()):
        # Spread by the keys, so that not everybody who computes a value waits for everybody else.
        own = {zlib.crc32(_bytes({"": key})) % GUARD_SLOTS for key in keys[:GUARD_SLOTS]}
        yield from _guard(rule, sorted(own) or range(1))
    rows = yield from find(COLLECTION, {**_intents(rule), "state": {"$in": [OVER, MOVED]}})
    by_state: dict[str, list[Any]] = {OVER: [], MOVED: []}
    for row in rows:
        by_state[row["state"]].append(row["_id"]["key"])
    archived: list[Raw] = [{MARK: {"$exists": False}}, {"_id": {"$in": by_state[MOVED]}}]
    return {"$and": [{"$or": archived}, {"_id": {"$nin": by_state[OVER]}}]}


def _guard(rule: ArchivePlaces, slots: Iterable[int] = range(GUARD_SLOTS)) -> Plan[None]:
    """Conflict with who else writes one of these guards; all of them unless some are named."""
    names = [f"archive {rule.place.label}:{number}" for number in slots]
    counting = {"$inc": {"n": 1}}
    yield from bulk_write(GUARDS, [UpdateOne({"_id": each}, counting, upsert=True) for each in names])


def _claim(rule: ArchivePlaces, keys: Sequence[Any], token: Any, state: str) -> Plan[list[Any]]:
    """Claim documents that nobody else is moving; which ones those are."""
    new = {"$setOnInsert": {"token": token, "state": state}}
    claims = [UpdateOne(by_id(_identity(rule, key)), new, upsert=True) for key in keys]
    yield from bulk_write(COLLECTION, claims, ordered=False)
    yield from update_many(COLLECTION, {"token": token}, [{"$set": {"at": "$$NOW"}}])
    rows = yield from find(COLLECTION, {**_intents(rule), "token": token})
    return [row["_id"]["key"] for row in rows]


def move(rule: ArchivePlaces, commit: Commit, chosen: Raw) -> Plan[int]:
    """Move what is chosen, and nobody else moves; how many documents."""
    entry, token = rule.target, ObjectId()
    rows = yield from find(entry.collection, chosen, {"_id": 1})
    if not rows:
        return 0
    keys = yield from _claim(rule, [row["_id"] for row in rows], token, COPYING)
    try:
        documents = yield from find(entry.collection, {"$and": [{"_id": {"$in": keys}}, chosen]})
        yield from _copy(rule, documents, token)
        mine = yield from find(rule.into, {"_id": {"$in": keys}, TOKEN: token}, {"_id": 1})
        made = {freeze(each["_id"]) for each in mine}
        known = {key: _bytes(each) for each in documents if (key := freeze(each["_id"])) in made}
        moved = yield from commit.follow(lambda ledger: _let_go(rule, token, keys, known, ledger))
    except Undone:
        moved = 0
    except Exception:
        yield from _remove(rule, keys, token)
        raise
    if rule.declared.counted:
        yield from _settle(rule, {"token": token})
    yield from _remove(rule, keys, token)
    return moved


def _settle(rule: ArchivePlaces, which: Raw) -> Plan[None]:
    """Take the mark off copies whose move is committed, and then delete their intents."""
    moved: dict[Any, list[Raw]] = {}
    for row in (yield from find(COLLECTION, {**_intents(rule), **which, "state": MOVED})):
        moved.setdefault(row["token"], []).append(row["_id"])
    for token, intents in moved.items():
        copies = {"_id": {"$in": [each["key"] for each in intents]}, TOKEN: token}
        yield from update_many(rule.into, copies, {"$unset": {MARK: 1}})
        yield from delete_many(COLLECTION, {"_id": {"$in": intents}, "state": MOVED, "token": token})


def _copy(rule: ArchivePlaces, documents: Sequence[Raw], token: Any) -> Plan[None]:
    """Insert copies there; whatever is there already is another's."""
    copies = copy.deepcopy(list(documents))
    for each in copies:
        put(each, TOKEN, token)
        if rule.declared.counted:
            put(each, MARK, True)
    if not copies:
        return
    try:
        yield from bulk_write(rule.into, [InsertOne(each) for each in copies], ordered=False)
    except BulkWriteError as error:
        refused = (error.details or {}).get("writeErrors", [])
        # What a majority has not confirmed may be gone there after it is deleted here.
        if lacks_majority(error) or not refused or any(each["code"] != DUPLICATE_KEY for each in refused):
            raise


def _bytes(document: Raw) -> bytes:
    encoded: bytes = bson.encode(document, codec_options=CODEC_OPTIONS)
    return encoded


def _let_go(
    rule: ArchivePlaces, token: Any, keys: Sequence[Any], known: dict[Any, bytes], ledger: Ledger
) -> Plan[int]:
    """In a transaction, delete here what was copied as it is, with its intent."""
    entry = rule.target
    mine = {**_intents(rule), "token": token, "state": COPYING}
    held = yield from update_many(COLLECTION, mine, {"$set": {"state": OVER}})
    if held.matched_count < len(keys):
        raise Undone
    documents = yield from find(entry.collection, {"_id": {"$in": list(keys)}})
    same = [each for each in documents if _bytes(each) == known.get(freeze(each["_id"]))]
    gone = [each["_id"] for each in same]
    intents = {"_id": {"$in": [_identity(rule, key) for key in gone]}}
    if rule.declared.counted:
        yield from _guard(rule)
        yield from delete_many(entry.collection, {"_id": {"$in": gone}})
        yield from update_many(COLLECTION, intents, {"$set": {"state": MOVED}})
        return len(gone)
    yield from ledger.note_before(entry, gone)
    yield from delete_many(entry.collection, {"_id": {"$in": gone}})
    for each in same:
        ledger.add(Change(entry.collection, each["_id"], each, None))
    yield from delete_many(COLLECTION, intents)
    return len(gone)


def _remove(rule: ArchivePlaces, keys: Sequence[Any], token: Any) -> Plan[None]:
    """Remove the copies of a move that its intents still name, and then the intents."""
    unmoved = {**_intents(rule), "token": token, "state": {"$ne": MOVED}}
    rows = yield from find(COLLECTION, unmoved, {"_id": 1})
    left = [row["_id"]["key"] for row in rows]
    lost = [key for key in keys if freeze(key) not in map(freeze, left)]
    if lost:
        # Undone by another, before this move made its copies: whoever is still here is not archived.
        living = yield from find(rule.target.collection, {"_id": {"$in": lost}}, {"_id": 1})
        left += [each["_id"] for each in living]
    if left:
        yield from delete_many(rule.into, {"_id": {"$in": left}, TOKEN: token})
    yield from delete_many(COLLECTION, unmoved)


def bring(
    rule: ArchivePlaces, commit: Commit, key: Any, arrive: Callable[[Raw, Ledger], Plan[Raw | None]]
) -> Plan[Raw | None]:
    """Bring one document back; the document, or None where it is not archived."""
    entry, token = rule.target, ObjectId()
    for pause in (*PAUSES, None):
        yield from _settle(rule, {"_id": _identity(rule, key)})
        if (yield from _claim(rule, [key], token, RESTORING)):
            break
        # Somebody else is moving it; what is here by now is what there is, unless it is on its way.
        here = yield from find_one(entry.collection, by_id(key))
        if here is not None or pause is None:
            return here
        yield from wait(pause)
    raw = yield from find_one(rule.into, by_id(key))
    made = value_at(raw, TOKEN) if raw is not None else None

    def body(ledger: Ledger) -> Plan[Raw | None]:
        mine = {**_intents(rule), "token": token, "state": RESTORING}
        # The copy is removed by the token under which it was made.
        over = {"$set": {"state": OVER, "token": made}}
        if raw is None or not (yield from update_many(COLLECTION, mine, over)).matched_count:
            raise Undone
        if rule.declared.counted:
            yield from _guard(rule)
        own = copy.deepcopy(raw)
        for mark in (TOKEN, MARK):
            own.get(RESERVED, {}).pop(mark.removeprefix(f"{RESERVED}."), None)
        yield from insert_one(entry.collection, own)
        return (yield from arrive(own, ledger))

    try:
        after = yield from commit.follow(body) if raw is not None else _nothing()
    except (Undone, DuplicateKeyError):
        after = yield from find_one(entry.collection, by_id(key))
    except Exception:
        yield from delete_many(COLLECTION, {**_intents(rule), "token": token})
        raise
    yield from delete_many(COLLECTION, {**_intents(rule), "token": token})
    if raw is not None and after is not None:
        yield from _finish(rule, [by_id(_identity(rule, key))])
    return after


def _nothing() -> Plan[None]:
    yield from ()


def _finish(rule: ArchivePlaces, rows: Sequence[Raw]) -> Plan[None]:
    """Remove the copies of intents that are over, and then these."""
    for row in rows:
        intent = yield from find_one(COLLECTION, {**row, "state": OVER})
        if intent is not None:
            key = intent["_id"]["key"]
            yield from delete_many(rule.into, {**by_id(key), TOKEN: intent["token"]})
            yield from delete_many(COLLECTION, {**by_id(intent["_id"]), "state": OVER})


def recover(rule: ArchivePlaces) -> Plan[int]:
    """Undo the moves that nobody has carried on for a while, and remove the copies that they left.

    How many documents were concerned. A writer that only slept finds its move undone.
    """
    aged = {"$add": [{"$ifNull": ["$at", LONG_AGO]}, int(rule.limits.archive_intent_seconds * 1000)]}
    stale = {**_intents(rule), "$expr": {"$lte": [aged, "$$NOW"]}}
    rows = yield from find(COLLECTION, stale, {"_id": 1})
    for row in rows:
        yield from _settle(rule, by_id(row["_id"]))
        # Nothing was inserted here: it stays archived.
        yield from delete_many(COLLECTION, {**by_id(row["_id"]), "state": RESTORING})
        yield from update_many(COLLECTION, {**by_id(row["_id"]), "state": COPYING}, {"$set": {"state": OVER}})
    yield from _finish(rule, [by_id(row["_id"]) for row in rows])
    return len(rows)
