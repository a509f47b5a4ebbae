"""Migrations that are pipelines: the server runs them, on ranges of `_id`, and no document is fetched."""

from __future__ import annotations

from typing import Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.graph.quarantine import SET_ASIDE
from treadle.graph.stored_pages import chunks, starting_at
from treadle.graph.versions import VersionChain
from treadle.plan import Plan, Raw, by_id, find, update_many
from treadle.plan.server_errors import is_about_one_document
from treadle.query.keys import freeze
from treadle.upkeep.migrations.run import Run, write_each


def migrate_range(run: Run, last: list[Any] | None) -> Plan[tuple[list[Any], int] | None]:
    """Let the server migrate a range of documents; the last id and their number."""
    collection = run.entry.collection
    # A server-side batch costs the client nothing but its two ends.
    usual = run.options.batch == run.limits.migration_batch
    size = run.options.sized(run.limits.migration_range if usual else run.options.batch)
    ids = {"_id": 1}
    first = yield from find(collection, {}, ids, sort=[("_id", 1)], limit=2, **starting_at(last))
    fresh = [each["_id"] for each in first if last is None or freeze(each["_id"]) != freeze(last[0])]
    if not fresh:
        return None
    start = fresh[0]
    ends = yield from find(
        collection, {}, ids, sort=[("_id", 1)], skip=size - 1, limit=1, **starting_at([start])
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
    rows = yield from find(
        run.entry.collection, {}, {"_id": 1}, sort=[("_id", 1)], limit=size, **starting_at([start])
    )
    return {"_id": {"$in": [row["_id"] for row in rows]}}


def _bracket(identity: Any) -> str:
    number = isinstance(identity, (int, float)) and not isinstance(identity, bool)
    return "number" if number else type(identity).__name__


def _pipelines(run: Run) -> list[tuple[list[Raw], int, int]]:
    """Each step with the version that it leads to and the one that it starts from, in order."""
    chain = run.chain
    steps: list[tuple[Any, int, int]] = []
    for version in range(1, run.to):
        steps.append((chain.steps[version].up, version + 1, version))
    for version in range(chain.highest - 1, run.to - 1, -1):
        back = chain.steps[version].back if version in chain.steps else None
        steps.append((back, version, version + 1))
    return [each for each in steps if isinstance(each[0], list)]


def _of_version(chain: VersionChain, version: int) -> Raw:
    """The condition that a document is of a version; one without any is of the first."""
    return {chain.field: {"$in": [1, None]} if version == 1 else {"$eq": version}}


def _apply(run: Run, within: Raw, origin: int, way: list[Raw], version: int) -> Plan[None]:
    """One step of the documents of a range that are of its version; one that fails is set aside."""
    conditions: list[Raw] = [run.scope, _of_version(run.chain, origin)]
    pipeline = [*way, {"$set": {run.chain.field: {"$literal": version}}}]
    final = version == run.to
    if run.aside:
        rows = yield from find(SET_ASIDE, {**run.noted, "_id.key": within["_id"]}, {"_id.key": 1})
        conditions.append({"_id": {"$nin": [row["_id"]["key"] for row in rows]}})
    chosen = {"$and": [within, *conditions]}
    try:
        result = yield from update_many(run.entry.collection, chosen, pipeline)
        run.done += result.modified_count if final else 0
        return
    except OperationFailure as error:
        if not is_about_one_document(error):
            raise
    # One by one in one command, so that one that fails does not stop the others.
    rows = yield from find(run.entry.collection, chosen, {"_id": 1}, sort=[("_id", 1)])
    keys = [row["_id"] for row in rows]
    writes = [(key, UpdateOne({"$and": [by_id(key), *conditions]}, pipeline)) for key in keys]
    for some in chunks(writes, run.limits.migration_batch):
        matched, _ = yield from write_each(run, some)
        run.done += matched if final else 0
