"""Documents that could not be processed, recorded with the reason, so that all others are.

A row of `treadle.set_aside`:

- `_id`: `rule`, the field or model that could not be maintained; `collection`
  and `key` of the document (of a rollup's group, the list of its values). A key
  that cannot stand in an `_id` is given as text, and `as_text` is set.
- `reason` and `code`: the server's number, or the code of our own error.
- `since` and `at`: when it was set aside first and last; `attempts`: how often.

A retry that succeeds deletes the row (`upkeep/retries.py`).
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import bson
from bson import DBRef
from pymongo.errors import PyMongoError

from treadle.errors import TreadleError
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS
from treadle.model.text import escape_text, get_logger
from treadle.plan import Plan, Raw, update_one
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import is_about_one_document, message_of, refusals

SET_ASIDE = "treadle.set_aside"
KEY_BYTES_MAX = 2000
REASON_LENGTH_MAX = 500

R = TypeVar("R")

log = get_logger(__name__)


def set_aside(label: str, collection: str, key: Any, error: Exception) -> Plan[None]:
    """Record a document that could not be processed. It is logged once."""
    code = code_of(error)
    if (yield from note_aside(label, collection, key, message_of(error), code)):
        # What the server says may quote the document, and has no place in a log.
        log.warning("%s: %s %s was set aside (%s)", label, collection, escape_text(key), code)


def note_aside(
    label: str, collection: str, key: Any, reason: str, code: int | str | None = None
) -> Plan[bool]:
    """Record a document with the reason. Returns whether it was not recorded before."""
    named = storable_key(key)
    identity = {"rule": label, "collection": collection, "key": named}
    sets: Raw = {
        "reason": {"$literal": escape_text(reason, REASON_LENGTH_MAX)},
        "code": {"$literal": code},
        "since": {"$ifNull": ["$since", "$$NOW"]},
        "at": "$$NOW",
        "attempts": {"$add": [{"$ifNull": ["$attempts", 0]}, 1]},
    }
    if named is not key:
        sets["as_text"] = True
    result = yield from update_one(SET_ASIDE, {"_id": {"$eq": identity}}, [{"$set": sets}], upsert=True)
    return not result.matched_count


def code_of(error: Exception) -> int | str:
    """Return the server's number, our own code, or the class of an error."""
    if isinstance(error, TreadleError):
        return error.code
    if not isinstance(error, PyMongoError):
        return type(error).__name__
    # Of a single write before that of the bulk, which says nothing.
    codes = [*(each.get("code") for each in refusals(error)), getattr(error, "code", None)]
    return next((each for each in codes if each), type(error).__name__)


def storable_key(key: Any) -> Any:
    """Return the key itself, or its text where no `_id` can hold it."""
    try:
        small = len(bson.encode({"": key}, codec_options=CODEC_OPTIONS)) <= KEY_BYTES_MAX
        if small and _has_plain_names(key):
            return key
    except ENCODING_ERRORS:
        pass
    text = repr(key)
    if len(text) <= KEY_BYTES_MAX // 10:
        return text
    return f"{text[:100]}… ({hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]})"


def _has_plain_names(value: Any) -> bool:
    if isinstance(value, dict):
        return all(not name.startswith("$") and _has_plain_names(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_has_plain_names, value))
    return not isinstance(value, (DBRef, UndecodableId))


def readable(label: str, reading: Plan[list[Raw]]) -> Plan[list[Raw]]:
    """Return the documents of a read that can be decoded; sets the others aside. Not inside a transaction."""
    try:
        return (yield from reading)
    except Unreadable as error:
        yield from set_aside_unreadable(label, error)
        return error.documents


def set_aside_unreadable(label: str, error: Unreadable) -> Plan[None]:
    """Record each document of a reply that cannot be decoded."""
    for each in error.singly():
        yield from set_aside(label, each.collection, each.failed[0][0], each)


def around(label: str, collection: str, key: Any, work: Plan[R]) -> Plan[R | None]:
    """Return the result of work on one document; None if the document makes it fail, and is set aside."""
    try:
        return (yield from work)
    except Exception as error:
        if not is_about_one_document(error):
            raise
        if isinstance(error, Unreadable):
            yield from set_aside_unreadable(label, error)
        else:
            yield from set_aside(label, collection, key, error)
        return None
