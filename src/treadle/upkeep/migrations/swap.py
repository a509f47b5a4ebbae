"""Migrating a whole collection into a new one that takes its place: `strategy="swap"`.

The server writes the converted documents into a new collection, which costs
less than changing each in its place. What others write is read from the change
stream at the same time, as ids only (`changed.py`): when all is copied, these
documents are converted and written again. Then, for a moment, the old
collection takes no inserts and no updates (its validator refuses them, and
Stores wait), what is left in the stream is done, and one command renames the
new collection over the old one. Deletions cannot be held up; those of that
moment are done again after it, before the new collection lets anybody in.

Whatever fails before the rename leaves the old collection as it was. Indexes,
validator and options are those of the old collection.

All of it is done under the lease of the migration. Nobody lets writes through
again while that is held, and whoever has lost it renames nothing (`closing.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import count
from typing import Any

from pymongo import ReplaceOne
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.convert import convert
from treadle.engine.indexes import existing_indexes
from treadle.engine.lease import LeaseLost
from treadle.engine.pages import chunks
from treadle.errors import DataError, UsageError
from treadle.graph.gather import freeze
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    database_command,
    delete_many,
    find,
    meanwhile,
    wait,
)
from treadle.plan.server_errors import (
    DROPPED,
    DUPLICATE_KEY,
    PASSING,
    codes_of,
    is_about_one_document,
    is_passing,
    message_of,
    refusals,
)
from treadle.upkeep.change_stream import present_place
from treadle.upkeep.migrations.changed import Changed
from treadle.upkeep.migrations.closing import (
    KEPT_OPTIONS,
    Closing,
    close,
    closing_of,
    drop,
    kept,
    listed,
    reopen,
    shadow_of,
)
from treadle.upkeep.migrations.ranges import of_version, pipelines
from treadle.upkeep.migrations.run import Run, counted, taken_over

# When so few documents changed since the last look, the rest is done while nobody writes.
FEW = 200
ROUNDS_MAX = 20
LOOKS_PER_RENEWAL = 50
# Seconds between attempts to let writes through again.
RESTORE_PAUSES = (0.1, 0.5, 1, 2, 4, 8)


def check_swap(run: Run) -> None:
    """Refuse what cannot be done by a swap."""
    reason = None
    if run.followed:
        reason = "other documents follow from it"
    elif run.scope:
        reason = "its collection holds other kinds too"
    elif run.graph.shards is not None and run.entry.collection in run.graph.shards.keys:
        reason = "its collection is sharded"
    elif not run.server.transactions or run.server.streams is None:
        reason = "this server has no change streams"
    elif any(callable(way) for way, _, _ in pipelines(run, functions=True)):
        reason = "a step is a Python function, and the server can run pipelines only"
    elif run.options.throttle is not None:
        reason = "throttle= slows down steps, and this is one"
    if reason is not None:
        raise UsageError(
            f"{run.entry.model.__name__} cannot be migrated with strategy='swap': {reason}; leave it out",
            code="migration-option",
        )


def swap(run: Run) -> Plan[bool]:
    """Bring all documents to the version by a new collection; whether it was not told to stop."""
    collection = run.entry.collection
    options = yield from _options(collection)
    if options is None:
        return True
    if options.get("capped") or options.get("timeseries"):
        raise UsageError(
            f"{collection} is capped or a time series and cannot be renamed; leave strategy= out",
            code="migration-option",
        )
    shadow, changed = shadow_of(collection, run.lease.token), Changed(collection, run.limits)
    try:
        finished = yield from _swapped(run, changed, shadow, options)
    except Exception as error:
        yield from _tidy(changed, shadow)
        if not isinstance(error, OperationFailure) or not is_about_one_document(error):
            raise
        raise DataError(
            f"a document of {collection} cannot be migrated ({message_of(error)}), so that the collection "
            "cannot be swapped; nothing was changed. Without strategy= it is set aside, and the rest goes on",
            code="migration-failed",
        ) from error
    yield from _tidy(changed, shadow)
    return finished


def _swapped(run: Run, changed: Changed, shadow: str, options: Raw) -> Plan[bool]:
    numbers = count()
    place = yield from present_place(run.limits)
    yield from changed.open(place)
    # By a majority, so that whatever has an earlier place can be seen by now.
    yield from database_command({"create": shadow, **_unkept(options)})
    # The stream is read meanwhile: the server's history need not reach back to the beginning.
    yield from meanwhile(lambda: _build(run, shadow), lambda: _look(run, changed, next(numbers)))
    return (yield from _follow_and_rename(run, changed, shadow, _unkept(options)))


def _tidy(changed: Changed, shadow: str) -> Plan[None]:
    """Leave nothing behind; if that fails, or after a cancellation, `restore_all` does it."""
    for each in (changed.close(), drop(shadow)):
        with contextlib.suppress(PyMongoError):
            yield from each


def _build(run: Run, shadow: str) -> Plan[None]:
    """The new collection: the converted documents, and the indexes of the old one."""
    yield from _copy(run, shadow)
    try:
        yield from _make_indexes(run, shadow)
    except DuplicateKeyError:
        # A value may have moved while the documents were copied, and is in two copies.
        return


def _make_indexes(run: Run, shadow: str) -> Plan[list[Raw]]:
    """Let the new collection have the indexes that the old one has by now; these."""
    listed = yield from _indexes(run.entry.collection)
    names = {each["name"] for each in listed}
    gone = [each["name"] for each in (yield from _indexes(shadow)) if each["name"] not in names]
    if gone:
        yield from database_command({"dropIndexes": shadow, "index": gone})
    if indexes := [each for each in listed if each["name"] != "_id_"]:
        yield from database_command({"createIndexes": shadow, "indexes": indexes})
    return listed


def _look(run: Run, changed: Changed, number: int) -> Plan[None]:
    """After a pause, a look at what others write; every so often the lease is held for longer."""
    if number % LOOKS_PER_RENEWAL == 0:
        yield from _still_held(run)
    yield from wait(run.limits.migration_look_seconds)
    yield from changed.look()


def _follow_and_rename(run: Run, changed: Changed, shadow: str, made: Raw) -> Plan[bool]:
    collection, token = run.entry.collection, run.lease.token
    for number in count(1):
        if run.options.stop is not None and run.options.stop():
            return False
        yield from _still_held(run)
        found = yield from _catch_up(run, changed, shadow)
        try:
            indexes = yield from _make_indexes(run, shadow)
        except DuplicateKeyError:
            if not found or number >= ROUNDS_MAX:
                raise
        else:
            if found <= FEW or number >= ROUNDS_MAX:
                break
    options = (yield from _options(collection)) or {}
    if _unkept(options) != made or closing_of(options) is not None:
        raise changed.taken_away()
    assert token is not None
    closing = Closing(token, kept(options), (yield from present_place(run.limits)))
    yield from _still_held(run)
    sent = False
    try:
        yield from close(collection, closing)
        # Whoever was paused in between has held others up for nothing.
        yield from _still_held(run)
        yield from _catch_up(run, changed, shadow, last=True)
        if (yield from _indexes(collection)) != indexes:
            raise changed.taken_away()
        yield from close(shadow, closing)
        yield from _still_held(run)
        name, there = yield from listed({"name": {"$in": [collection, shadow]}})
        options = there.get(collection, {}).get("options", {})
        held_up = closing_of(options)
        if shadow not in there or _unkept(options) != made or held_up is None or held_up.token != token:
            raise changed.taken_away()
        sent = True
        yield from _rename(name, shadow, collection)
    except Exception as error:
        if sent and isinstance(error, OperationFailure) and codes_of(error) & DROPPED:
            # By whoever has the lease by now.
            sent, lost = False, changed.taken_away()
            yield from _surely_let_through(run, closing, renamed=False)
            yield from _still_held(run)
            raise lost from error
        yield from _surely_let_through(run, closing, renamed=sent)
        raise
    yield from _surely_let_through(run, closing, renamed=True)
    run.done, run.left = run.total, 0
    return True


def _let_through(run: Run, closing: Closing, renamed: bool) -> Plan[None]:
    """End what this run holds up.

    Without the lease, it takes its validator back where it set that too late. But
    after the rename, whoever has the lease has deletions to do again before that.
    """
    collection = run.entry.collection
    there = closing_of((yield from _options(collection)) or {})
    if there is None or there.token > closing.token:
        return
    try:
        # Also a validator that a run before set too late.
        yield from reopen(collection, closing, run.lease, run.limits)
    except LeaseLost:
        if there.token == closing.token and not renamed:
            yield from database_command({"collMod": collection, **closing.former})


def _surely_let_through(run: Run, closing: Closing, *, renamed: bool) -> Plan[None]:
    """Let writes through again, also where the server fails over just then."""
    for pause in (*RESTORE_PAUSES, None):
        try:
            return (yield from _let_through(run, closing, renamed))
        except PyMongoError as error:
            if pause is None or not (is_passing(error) or codes_of(error) & PASSING):
                raise
        yield from wait(pause)


def _rename(database: str, shadow: str, collection: str) -> Plan[None]:
    command: Raw = {"renameCollection": f"{database}.{shadow}", "to": f"{database}.{collection}"}
    command |= {"dropTarget": True, "writeConcern": {"w": "majority"}}
    yield from database_command(command, admin=True)


def _options(collection: str) -> Plan[Raw | None]:
    """The options of a collection; None where there is none."""
    _, there = yield from listed({"name": collection})
    return there[collection].get("options", {}) if collection in there else None


def _unkept(options: Raw) -> Raw:
    """The options with which the new collection is made; the others come after the rename."""
    return {name: value for name, value in options.items() if name not in KEPT_OPTIONS}


def _still_held(run: Run) -> Plan[None]:
    """Refuse to go on with what another process is at by now."""
    yield from run.lease.renew()
    if not run.lease.held:
        raise taken_over(run)


def _copy(run: Run, shadow: str) -> Plan[None]:
    """All documents, converted; those of one version after those of another."""
    collection, lineage = run.entry.collection, run.lineage
    known = [version for _, _, version in pipelines(run)]
    routes: list[tuple[Raw, list[Raw]]] = [({"$nor": [of_version(lineage, each) for each in known]}, [])]
    for version in known:
        stages: list[Raw] = []
        for way, to in lineage.ways(version, run.to):
            assert not callable(way)
            stages += [*way, {"$set": {lineage.field: {"$literal": to}}}]
        routes.append((of_version(lineage, version), stages))
    # One pass tells which are most; those come first, by the quicker stage, which replaces what is there.
    run.found, sure = yield from counted(run.entry)
    counts = [0, *(run.found.get(version, 0) for version in known)]
    run.total = sum(counts)
    counts[0] = sum(run.found.values()) - run.total
    order = sorted(range(len(routes)), key=counts.__getitem__, reverse=True)
    for place, (chosen, stages) in enumerate(routes[number] for number in order):
        if place and sure and not counts[order[place]]:
            # What came since is told by the stream, which begins before the count.
            break
        into: Raw = {"$out": shadow}
        if place:
            into = {"$merge": {"into": shadow, "whenMatched": "replace", "whenNotMatched": "insert"}}
        yield from aggregate(collection, [{"$match": chosen}, *stages, into], allowDiskUse=True)


def _indexes(collection: str) -> Plan[list[Raw]]:
    listed = yield from existing_indexes(collection)
    return [{name: each[name] for name in each if name not in ("ns", "background")} for each in listed]


def _catch_up(run: Run, changed: Changed, shadow: str, *, last: bool = False) -> Plan[int]:
    """Write again what others have written until now; how many documents that were.

    A unique value that moved is still in the copy of the document that had it, or
    its move is yet to be told of: what is refused for that comes again after the
    others, and then in the next round. In the last one nothing is left to be told.
    """
    keys = yield from changed.until_now()
    refused: list[Any] = []
    for some in chunks(keys, run.limits.read_keys_max):
        refused += yield from _write_again(run, shadow, some)
    for some in chunks(refused, run.limits.read_keys_max):
        changed.note((yield from _write_again(run, shadow, some, raises=last)))
    return len(keys)


def _write_again(run: Run, shadow: str, keys: Sequence[Any], *, raises: bool = False) -> Plan[list[Any]]:
    """What these documents are now, in the new collection; the ids of those that unique indexes refuse.

    Of these nothing is left in it, so that they are in nobody's way.
    """
    raws = yield from find(run.entry.collection, {"_id": {"$in": list(keys)}})
    present = {freeze(raw["_id"]) for raw in raws}
    gone = [key for key in keys if freeze(key) not in present]
    if gone:
        yield from delete_many(shadow, {"_id": {"$in": gone}})
    operations, written = [], []
    for outcome in (yield from convert(run.entry, raws, run.to)):
        if isinstance(outcome, DataError):
            raise outcome
        operations.append(ReplaceOne({"_id": {"$eq": outcome.after["_id"]}}, outcome.after, upsert=True))
        written.append(outcome.after["_id"])
    if not operations:
        return []
    try:
        yield from bulk_write(shadow, operations, ordered=False)
    except BulkWriteError as error:
        if raises or codes_of(error) - {error.code} != {DUPLICATE_KEY}:
            raise
        refused = [written[each["index"]] for each in refusals(error)]
    else:
        return []
    yield from delete_many(shadow, {"_id": {"$in": refused}})
    return refused
