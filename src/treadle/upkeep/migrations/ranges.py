"""Migrations that are pipelines: the server runs them, on ranges of `_id`, and no document is fetched."""

from __future__ import annotations

from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.engine.set_aside import SET_ASIDE
from treadle.graph.gather import freeze
from treadle.plan import Plan, Raw, bulk_write, by_id, find, update_many
from treadle.plan.server_errors import lies_in_a_document
from treadle.upkeep.migrations.run import Run, beginning_after, put_aside


def migrate_range(run: Run, last: list[Any] | None) -> Plan[tuple[list[Any], int] | None]:
    """Let the server migrate a range of documents; the last id and their number."""
    collection = run.entry.collection
    # A server-side batch costs the client nothing but its two ends.
    usual = run.options.batch == run.limits.migration_batch
    size = run.options.sized(run.limits.migration_range if usual else run.options.batch)
    ids = {"_id": 1}
    first = yield from find(collection, {}, ids, sort=[("_id", 1)], limit=2, **beginning_after(last))
    fresh = [each["_id"] for each in first if last is None or freeze(each["_id"]) != freeze(last[0])]
    if not fresh:
        return None
    start = fresh[0]
    ends = yield from find(
        collection, {}, ids, sort=[("_id", 1)], skip=size - 1, limit=1, **beginning_after([start])
    )
    if not ends:
        ends = yield from find(collection, {}, ids, sort=[("_id", -1)], limit=1)
    if not ends:
        return None
    end = ends[0]["_id"]
    within = yield from _within(run, start, end, size)
    before = run.done
    for way, version, origin in _pipelines(run):
        yield from _apply(run, within, origin, way, version)
    return [end], run.done - before


def _within(run: Run, start: Any, end: Any, size: int) -> Plan[Raw]:
    # NaN is before all numbers, but compares with none of them.
    if _bracket(start) == _bracket(end) and start == start:
        return {"_id": {"$gte": start, "$lte": end}}
    # A range ends where the type of the ids changes; there the ids are listed.
    found = yield from find(
        run.entry.collection, {}, {"_id": 1}, sort=[("_id", 1)], limit=size, **beginning_after([start])
    )
    return {"_id": {"$in": [each["_id"] for each in found]}}


def _bracket(identity: Any) -> str:
    number = isinstance(identity, (int, float)) and not isinstance(identity, bool)
    return "number" if number else type(identity).__name__


def _pipelines(run: Run) -> list[tuple[list[Raw], int, int]]:
    """Each step with the version that it leads to and the one that it starts from, in order."""
    lineage, found = run.lineage, []
    for version in range(1, run.to):
        found.append((lineage.steps[version].up, version + 1, version))
    highest = max([lineage.current, *(version + 1 for version in lineage.steps)])
    for version in range(highest - 1, run.to - 1, -1):
        back = lineage.steps[version].back if version in lineage.steps else None
        if isinstance(back, list):
            found.append((back, version, version + 1))
    return [(way, to, origin) for way, to, origin in found if isinstance(way, list)]


def _apply(run: Run, within: Raw, origin: int, way: list[Raw], version: int) -> Plan[None]:
    """One step of the documents of a range that are of its version; one that fails is set aside."""
    field_name = run.lineage.field
    of_origin = {"$in": [1, None]} if origin == 1 else {"$eq": origin}
    condition: Raw = {"$and": [within, run.scope, {field_name: of_origin}]}
    pipeline = [*way, {"$set": {field_name: {"$literal": version}}}]
    final = version == run.to
    if run.aside:
        noted = {"_id.rule": run.label, "_id.collection": run.entry.collection, "_id.key": within["_id"]}
        rows = yield from find(SET_ASIDE, noted, {"_id.key": 1})
        condition["$and"].append({"_id": {"$nin": [row["_id"]["key"] for row in rows]}})
    try:
        result = yield from update_many(run.entry.collection, condition, pipeline)
        run.done += result.modified_count if final else 0
        return
    except OperationFailure as error:
        if not lies_in_a_document(error):
            raise
    found = yield from find(run.entry.collection, condition, {"_id": 1}, sort=[("_id", 1)])
    keys = [each["_id"] for each in found]
    most = run.limits.migration_batch
    for start in range(0, len(keys), most):
        yield from _apply_singly(run, keys[start : start + most], pipeline, condition["$and"][1:], final)


def _apply_singly(
    run: Run, keys: list[Any], pipeline: list[Raw], conditions: list[Raw], final: bool
) -> Plan[None]:
    """Documents one by one in one command, so that one that fails does not stop the others."""
    writes = [UpdateOne({"$and": [by_id(key), *conditions]}, pipeline) for key in keys]
    try:
        result = yield from bulk_write(run.entry.collection, writes, ordered=False)
        run.done += result.modified_count if final else 0
    except BulkWriteError as error:
        if not lies_in_a_document(error):
            raise
        details = error.details or {}
        run.done += int(details.get("nModified", 0)) if final else 0
        for each in details.get("writeErrors", []):
            yield from put_aside(run, keys[each["index"]], str(each.get("errmsg")))
