"""Holding up the writes to a collection that is being swapped, and letting them through again.

Its validator refuses everything. What it was stands in the refusing validator
itself, as a comment, with the number of the lease under which it was set: to
refuse, and to note how that is ended, are one command, and nobody can have one
without the other.

A process may be paused for longer than its lease, before any command:

- Its new collection has the lease's number in its name. Whoever takes the lease
  drops those of smaller numbers before anything else, so that a rename that
  comes late finds nothing to rename.
- Deletions that are done again are done in one transaction with a look at the
  lease.
- A validator that is set late is taken back by whoever set it, who asks for
  the lease next, or by `restore_all`.
- One that is taken back late could let writes through that another swap holds
  up. That one looks for its own number just before it renames.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

import bson
from pymongo.errors import OperationFailure

from treadle.engine.lease import Lease, LeaseLost, holder
from treadle.engine.pages import chunks
from treadle.graph.gather import freeze
from treadle.graph.limits import Limits
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, database_command, delete_many, transact
from treadle.plan.server_errors import DROPPED, HISTORY_LOST, SWAPPING, codes_of
from treadle.upkeep.change_stream import BEATS, UPHEAVALS, ChangeStream, beat, first_stages
from treadle.upkeep.migrations.run import lease_name, lease_of
from treadle.values import frozen

# Refuses everything; the words are in the server's answer.
REFUSING: Raw = {"$expr": {"$eq": [SWAPPING, ""]}}
KEPT_OPTIONS = ("validator", "validationLevel", "validationAction")
# What a comment begins with that says how to let writes through again.
NOTED = "treadle.swap "
_SHADOW = re.compile(r"treadle\.swap\.(\d+)\.(.+)", re.DOTALL)
_LEFT_BEHIND: Raw = {
    "$or": [
        {"name": {"$regex": r"^treadle\.swap\.\d+\."}},
        {"options.validator.$comment": {"$regex": "^" + re.escape(NOTED)}},
    ]
}


@frozen
class Closing:
    """A collection takes no inserts and updates, under a lease; what its validator was before."""

    token: int
    was: Raw
    # Deletions since this place in history are done again before anybody is let in.
    place: Raw

    @property
    def options(self) -> Raw:
        """The options of the collection meanwhile."""
        noted = {"token": self.token, "was": self.was, "place": self.place}
        # As bytes: what is made of text need not be the same again.
        note = NOTED + b64encode(bson.encode(noted, codec_options=CODEC_OPTIONS)).decode()
        validator = {"$comment": note, **REFUSING}
        return {"validator": validator, "validationLevel": "strict", "validationAction": "error"}

    @property
    def former(self) -> Raw:
        """The options that let writes through again."""
        return {"validator": {}, "validationLevel": "strict", "validationAction": "error", **self.was}


def closing_of(options: Raw) -> Closing | None:
    """Under which lease a collection with these options takes no writes; None where it does."""
    note = (options.get("validator") or {}).get("$comment")
    if not isinstance(note, str) or not note.startswith(NOTED):
        return None
    noted = bson.decode(b64decode(note.removeprefix(NOTED)), codec_options=CODEC_OPTIONS)
    return Closing(noted["token"], noted["was"], noted["place"])


def kept(options: Raw) -> Raw:
    """Those of a collection's options that are others' while it is swapped."""
    return {name: options[name] for name in KEPT_OPTIONS if name in options}


def close(collection: str, closing: Closing) -> Plan[None]:
    """Let the server refuse inserts and updates; those under way are waited for."""
    yield from database_command({"collMod": collection, **closing.options})


def reopen(collection: str, closing: Closing, lease: Lease, limits: Limits) -> Plan[None]:
    """Let a collection take writes again; raises `LeaseLost` if that is another's to do by now."""
    try:
        yield from _delete_again(collection, closing.place, lease, limits)
    except OperationFailure as error:
        if error.code not in HISTORY_LOST:
            raise
    yield from lease.check()
    yield from database_command({"collMod": collection, **closing.former})


def _delete_again(collection: str, place: Raw, lease: Lease, limits: Limits) -> Plan[None]:
    """Delete once more what was deleted since and not inserted again."""
    stream, awaited = ChangeStream(), (yield from beat())
    gone: dict[Any, Any] = {}
    yield from stream.open(first_stages(place, [collection, BEATS]))
    for _ in range(limits.schedule_events_max):
        for event in (yield from stream.read(limits.schedule_events_page, limits.worker_await_seconds)):
            if event["operationType"] in UPHEAVALS:
                # The rename; some servers end the stream with it.
                continue
            key = event["documentKey"]["_id"]
            if key == awaited:
                yield from stream.close()
            elif event["ns"]["coll"] == collection:
                gone.pop(freeze(key), None)
                if event["operationType"] == "delete":
                    gone[freeze(key)] = key
        if stream.cursor is None:
            break
    for some in chunks(list(gone.values()), limits.read_keys_max):
        yield from transact(lambda some=some: _delete_held(collection, some, lease))  # type: ignore[misc]
    yield from delete_many(BEATS, {"_id": awaited})


def _delete_held(collection: str, keys: Sequence[Any], lease: Lease) -> Plan[None]:
    """Delete documents while the lease is held: later, others may have stored them anew."""
    yield from lease.check()
    yield from delete_many(collection, {"_id": {"$in": list(keys)}})


# -- what swaps leave behind -------------------------------------------------------------------------


def shadow_of(collection: str, token: int | None) -> str:
    """The new collection of one run alone: one that lost its lease may still write to its own."""
    return f"treadle.swap.{token}.{collection}"


def listed(chosen: Raw) -> Plan[tuple[str, dict[str, Raw]]]:
    """The database's name, and the collections that meet a condition, with their options."""
    reply = (yield from database_command({"listCollections": 1, "filter": chosen}, writes=False))["cursor"]
    return reply["ns"].partition(".$cmd")[0], {each["name"]: each for each in reply["firstBatch"]}


def drop(name: str) -> Plan[None]:
    try:
        yield from database_command({"drop": name})
    except OperationFailure as error:
        if not codes_of(error) & DROPPED:
            raise


def restore(collection: str, lease: Lease, limits: Limits) -> Plan[int]:
    """Undo what swaps before this lease left of a collection; how many things there were.

    Their new collections first: nobody can rename one any more when writes are let through.
    """
    done = 0
    names = {"$or": [{"name": collection}, _LEFT_BEHIND]}
    _, there = yield from listed(names)
    assert lease.token is not None
    for name in there:
        shadow = _SHADOW.fullmatch(name)
        if shadow is not None and shadow[2] == collection and int(shadow[1]) < lease.token:
            yield from drop(name)
            done += 1
    closing = closing_of(there.get(collection, {}).get("options", {}))
    if closing is not None and closing.token < lease.token:
        yield from reopen(collection, closing, lease, limits)
        done += 1
    return done


def restore_all(limits: Limits, owner: str, is_dead: Callable[[str], bool]) -> Plan[int]:
    """The same for every collection that nobody is migrating."""
    done = 0
    for collection in (yield from left_behind()):
        lease = lease_of(collection, limits, owner, is_dead)
        if (yield from lease.take()):
            try:
                done += yield from restore(collection, lease, limits)
            except LeaseLost:
                # Whoever has it now does the same.
                continue
            yield from lease.release()
    return done


def left_behind() -> Plan[dict[str, list[str]]]:
    """The collections of which a swap is under way or left something, each with what there is of it."""
    _, there = yield from listed(_LEFT_BEHIND)
    found: dict[str, list[str]] = {}
    for name in there:
        shadow = _SHADOW.fullmatch(name)
        found.setdefault(shadow[2] if shadow else name, []).append(name)
    return found


def abandoned() -> Plan[dict[str, list[str]]]:
    """Those of them that nobody is at any more."""
    found = yield from left_behind()
    for collection in list(found):
        if (yield from holder(lease_name(collection))) is not None:
            del found[collection]
    return found
