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
again while that is held, and whoever has lost it renames nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from bson import json_util
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.convert import convert
from treadle.engine.indexes import existing_collections, existing_indexes
from treadle.engine.pages import chunks
from treadle.errors import DataError, UsageError
from treadle.graph.gather import freeze
from treadle.graph.limits import Limits
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    database_command,
    delete_many,
    find,
    find_one,
    meanwhile,
    update_one,
    wait,
)
from treadle.plan.operations import ReplaceOne
from treadle.plan.server_errors import (
    DROPPED,
    DUPLICATE_KEY,
    HISTORY_LOST,
    PASSING,
    SWAPPING,
    codes_of,
    is_about_one_document,
    is_passing,
    message_of,
    refusals,
)
from treadle.upkeep.change_stream import (
    BEATS,
    UPHEAVALS,
    ChangeStream,
    beat,
    first_stages,
    present_place,
)
from treadle.upkeep.migrations.changed import Changed
from treadle.upkeep.migrations.ranges import of_version, pipelines
from treadle.upkeep.migrations.run import Run, counted, lease_of

# What the validators of collections were that take no writes just now, as extended JSON.
SWAPS = "treadle.swaps"
# Refuses everything; the words are in the server's answer.
REFUSING = {"$expr": {"$eq": [SWAPPING, ""]}}
CLOSED = {"validator": REFUSING, "validationLevel": "strict", "validationAction": "error"}
KEPT_OPTIONS = ("validator", "validationLevel", "validationAction")
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
    elif not run.server.transactions:
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
    shadow = _shadow(collection, run.lease.token)
    existing = yield from existing_collections()
    options = existing.get(collection, {}).get("options")
    if options is None:
        return True
    if options.get("capped") or options.get("timeseries"):
        raise UsageError(
            f"{collection} is capped or a time series and cannot be renamed; leave strategy= out",
            code="migration-option",
        )
    yield from _drop_shadows(collection, existing)
    changed, numbers = Changed(collection, run.limits), count()
    cancelled = False
    try:
        place = yield from present_place(run.limits)
        yield from changed.open(place)
        # By a majority, so that whatever has an earlier place can be seen by now.
        yield from database_command({"create": shadow, **_unkept(options)})
        # The stream is read meanwhile: the server's history need not reach back to the beginning.
        yield from meanwhile(lambda: _build(run, shadow), lambda: _look(run, changed, next(numbers)))
        return (yield from _follow_and_rename(run, changed, shadow, options))
    except OperationFailure as error:
        if not is_about_one_document(error):
            raise
        raise DataError(
            f"a document of {collection} cannot be migrated ({message_of(error)}), so that the collection "
            "cannot be swapped; nothing was changed. Without strategy= it is set aside, and the rest goes on",
            code="migration-failed",
        ) from error
    except GeneratorExit:
        # A plan that was cancelled can ask for nothing more; `restore_all` ends it.
        cancelled = True
        raise
    finally:
        if not cancelled:
            yield from changed.close()
            yield from _drop(shadow)


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


def _follow_and_rename(run: Run, changed: Changed, shadow: str, options: Raw) -> Plan[bool]:
    collection, made = run.entry.collection, _unkept(options)
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
    yield from _still_held(run)
    options = yield from _options(collection)
    if _unkept(options) != made or options.get("validator") == REFUSING:
        raise changed.taken_away()
    kept = {name: options[name] for name in KEPT_OPTIONS if name in options}
    place = yield from present_place(run.limits)
    yield from _hold_up(collection, kept, place, run.lease.token)
    try:
        yield from _catch_up(run, changed, shadow, last=True)
        yield from _still_held(run)
        there = yield from _options(collection)
        same = _unkept(there) == made and (yield from _indexes(collection)) == indexes
        if there.get("validator") != REFUSING or not same:
            raise changed.taken_away()
        yield from database_command({"collMod": shadow, **CLOSED})
        try:
            yield from _rename(shadow, collection)
        except OperationFailure as error:
            if not codes_of(error) & DROPPED:
                raise
            # By whoever let writes through again meanwhile.
            yield from _still_held(run)
            raise changed.taken_away() from error
    except Exception:
        yield from _surely_restore(run)
        raise
    yield from _surely_restore(run)
    run.done, run.left = run.total, 0
    return True


def _options(collection: str) -> Plan[Raw]:
    options: Raw = (yield from existing_collections()).get(collection, {}).get("options", {})
    return options


def _unkept(options: Raw) -> Raw:
    """The options with which the new collection is made; the others come after the rename."""
    return {name: value for name, value in options.items() if name not in KEPT_OPTIONS}


def _still_held(run: Run) -> Plan[None]:
    """Refuse to go on with what another process is at by now."""
    yield from run.lease.renew()
    if not run.lease.held:
        raise DataError(
            f"another process took over the migration of {run.entry.collection}, because this one did not "
            "renew its lease in time; nothing was changed",
            code="migration-running",
        )


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


def _delete_again(collection: str, place: Raw, limits: Limits) -> Plan[None]:
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
        yield from delete_many(collection, {"_id": {"$in": some}})
    yield from delete_many(BEATS, {"_id": awaited})


def _hold_up(collection: str, kept: Raw, place: Raw, token: int | None = None) -> Plan[None]:
    """Let the server refuse inserts and updates; those under way are waited for."""
    was = json_util.dumps({"validator": {}, **kept})
    note = {"$set": {"was": was, "place": place, "token": token}}
    yield from update_one(SWAPS, {"_id": collection}, note, upsert=True)
    yield from database_command({"collMod": collection, **CLOSED})


def restore(collection: str, limits: Limits, token: int | None = None) -> Plan[None]:
    """Let a collection take writes again, after a swap or one that did not come to its end.

    With a token, only if it was the swap under that one. A process that was paused
    just before its rename finds nothing to rename any more.
    """
    row = yield from find_one(SWAPS, {"_id": collection} | ({} if token is None else {"token": token}))
    if row is None:
        return
    if token is None:
        yield from _drop_shadows(collection, (yield from existing_collections()))
    else:
        yield from _drop(_shadow(collection, token))
    there = yield from _options(collection)
    if there.get("validator") == REFUSING:
        try:
            yield from _delete_again(collection, row["place"], limits)
        except OperationFailure as error:
            if error.code not in HISTORY_LOST:
                raise
        was = {"validationLevel": "strict", "validationAction": "error", **json_util.loads(row["was"])}
        yield from database_command({"collMod": collection, **was})
    yield from delete_many(SWAPS, {"_id": collection})


def _surely_restore(run: Run) -> Plan[None]:
    """Let writes through again, also where the server fails over just then."""
    for pause in (*RESTORE_PAUSES, None):
        try:
            return (yield from restore(run.entry.collection, run.limits, run.lease.token))
        except PyMongoError as error:
            if pause is None or not (is_passing(error) or codes_of(error) & PASSING):
                raise
        yield from wait(pause)


def restore_all(limits: Limits, owner: str, is_dead: Callable[[str], bool]) -> Plan[int]:
    """The same for every collection that nobody is migrating; how many there were."""
    done = 0
    for row in (yield from find(SWAPS, {}, {"_id": 1})):
        lease = lease_of(row["_id"], limits, owner, is_dead)
        if (yield from lease.take()):
            yield from restore(row["_id"], limits)
            yield from lease.release()
            done += 1
    return done


def _rename(shadow: str, collection: str) -> Plan[None]:
    listed = yield from database_command({"listCollections": 1, "filter": {"name": shadow}}, writes=False)
    name = listed["cursor"]["ns"].partition(".$cmd")[0]
    command = {"renameCollection": f"{name}.{shadow}", "to": f"{name}.{collection}", "dropTarget": True}
    yield from database_command({**command, "writeConcern": {"w": "majority"}}, admin=True)


def _shadow(collection: str, token: int | None) -> str:
    """The new collection of one run alone: one that lost its lease may still write to its own."""
    return f"treadle.swap.{token}.{collection}"


def _drop_shadows(collection: str, existing: Iterable[str]) -> Plan[None]:
    for name in existing:
        if re.fullmatch(rf"treadle\.swap\.\d+\.{re.escape(collection)}", name):
            yield from _drop(name)


def _drop(name: str) -> Plan[None]:
    try:
        yield from database_command({"drop": name})
    except OperationFailure as error:
        if not codes_of(error) & DROPPED:
            raise
