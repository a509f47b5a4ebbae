"""What the profiler recorded, without any value; nothing here talks to a server.

A profiler document becomes a `Query`: its collection, the fields of its filter
and sort, the collections it looks up, what it counts or increments, how many
documents it examined and returned. Operations of the same shape are added up.
Getmores, the scan's own reads and the server's housekeeping are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from treadle.advisor.facts import READS, Query, Workload
from treadle.advisor.workload_joins import Join, join_of, used

SHAPES_MAX = 5_000
DEPTH_MAX = 20
NUMBER_MAX = 1e15
# A read of the parent this soon after one of the child belongs to the same page.
FOLLOW_UP_SECONDS_MAX = 0.1
FOLLOW_UP_OPERATIONS_MAX = 5
_ACCUMULATORS = {"$sum", "$avg", "$min", "$max", "$count"}


def read(
    documents: Iterable[Mapping[str, Any]],
    database: str,
    source: str,
    operations_max: int,
) -> Workload:
    """The workload of one database; operations beyond the maximum are left out."""
    # Per shape: itself, and the sums of count, milliseconds, examined and returned.
    shapes: dict[Query, tuple[Query, list[float]]] = {}
    timeline: list[tuple[float, Query, Any]] = []
    complete = True
    number = 0
    for document in documents:
        if number >= operations_max:
            complete = False
            break
        query = parse(document, database)
        if query is None:
            continue
        number += 1
        shape = replace(query, count=0, milliseconds=0.0, examined=0, returned=0)
        if shape not in shapes and len(shapes) >= SHAPES_MAX:
            complete = False
            continue
        # One object for all operations of a shape: there may be very many.
        shape, sums = shapes.setdefault(shape, (shape, [0, 0.0, 0, 0]))
        for place, value in enumerate((query.count, query.milliseconds, query.examined, query.returned)):
            sums[place] += value
        if isinstance(document.get("ts"), datetime):
            timeline.append((document["ts"].timestamp(), shape, _session(document)))
    queries = tuple(
        replace(shape, count=int(n), milliseconds=ms, examined=int(examined), returned=int(returned))
        for shape, (n, ms, examined, returned) in shapes.values()
    )
    timeline.sort(key=lambda row: row[0])
    seconds = timeline[-1][0] - timeline[0][0] if timeline else 0.0
    return Workload(source, queries, seconds, complete, _follow_ups(timeline))


def parse(document: Mapping[str, Any], database: str) -> Query | None:
    """One profiler document as a query of this database, or None."""
    namespace = document.get("ns")
    if not isinstance(namespace, str):
        return None
    prefix, _, collection = namespace.partition(".")
    if prefix != database or not collection or collection.startswith("system."):
        return None
    command = _mapping(document.get("command"))
    if command.get("comment") == "treadle scan":
        return None
    operation = document.get("op")
    query = _parse(str(operation), command)
    if query is None:
        return None
    plan = str(document.get("planSummary", ""))
    return replace(
        query,
        collection=collection,
        collection_scan=plan.startswith("COLLSCAN") and operation != "insert",
        count=1,
        milliseconds=_number(document.get("millis")),
        examined=int(_number(document.get("docsExamined"))),
        returned=int(
            _number(document.get("nreturned", document.get("nMatched", document.get("ndeleted", 0))))
        ),
    )


def _parse(operation: str, command: Mapping[str, Any]) -> Query | None:
    if operation == "insert":
        return Query("", "insert")
    if operation == "remove":
        return _filtered("delete", command.get("q"))
    if operation == "update":
        return _update(command.get("q"), command.get("u"))
    if operation == "query" or "find" in command:
        query = _filtered("find", command.get("filter", command.get("query")))
        limit = int(_number(command.get("limit", command.get("ntoreturn", 0))))
        shown = _shown(command.get("projection"))
        return replace(query, sort=_sort(command.get("sort")), limit=limit, shown=shown)
    if operation != "command":
        return None
    if "aggregate" in command:
        return _aggregate(command.get("pipeline"))
    for kind in ("count", "distinct"):
        if kind in command:
            return _filtered(kind, command.get("query"))
    if "findAndModify" in command or "findandmodify" in command:
        return _update(command.get("query"), command.get("update"))
    return None


def _filtered(kind: str, condition: Any) -> Query:
    paths, case_insensitive = _filter(condition)
    return Query("", kind, paths, case_insensitive=case_insensitive)


def _update(condition: Any, update: Any) -> Query:
    update = _mapping(update)
    increments: Mapping[str, Any] = {}
    # Only an update that does nothing but count, and perhaps stamp a time, could be deferred.
    stamps = _mapping(update.get("$set")).values()
    if set(update) - {"$set", "$currentDate"} == {"$inc"} and all(isinstance(t, datetime) for t in stamps):
        increments = _mapping(update["$inc"])
    pushes = {**_mapping(update.get("$push")), **_mapping(update.get("$addToSet"))}
    unbounded = [path for path, value in pushes.items() if "$slice" not in _mapping(value)]
    return replace(
        _filtered("update", condition),
        increments=tuple(sorted(map(str, increments))),
        pushes=tuple(sorted(map(str, unbounded))),
    )


def _aggregate(pipeline: Any) -> Query:
    query = Query("", "aggregate")
    for stage in _list(pipeline):
        if not isinstance(stage, Mapping) or not stage:
            continue
        name, body = next(iter(stage.items()))
        if name == "$match" and not query.grouped:
            paths, case_insensitive = _filter(body)
            query = replace(
                query,
                filter_paths=tuple(sorted({*query.filter_paths, *paths})),
                case_insensitive=(*query.case_insensitive, *case_insensitive),
            )
        elif name == "$lookup" and isinstance(body, Mapping):
            source, local, foreign = (_text(body.get(key)) for key in ("from", "localField", "foreignField"))
            query = replace(query, lookups=(*query.lookups, (source, local, foreign)))
            query = _with_joined(query, join_of(body), pipeline)
        elif name == "$sort" and not query.grouped:
            query = replace(query, sort=_sort(body))
        elif name == "$limit":
            query = replace(query, limit=int(_number(body)))
        elif name in ("$group", "$count", "$sortByCount"):
            query = replace(query, grouped=True, sums=(*query.sums, *_sums(body)))
    return query


def _with_joined(query: Query, join: Join | None, pipeline: Any) -> Query:
    """The query with what it takes of the documents that it joins."""
    if join is None:
        return query
    others = [each for each in _list(pipeline) if not isinstance(each, Mapping) or "$lookup" not in each]
    uses = set(used(others, join.alias))
    asked = [each for stage in join.stages for each in _shown(stage.get("$project"))]
    paths = sorted({path.partition(".")[0] for _, path in uses if path} | set(asked))
    query = replace(query, joined=(*query.joined, *((join.source, path) for path in paths)))
    child = Query(join.source, "aggregate", tuple(sorted({join.by, *join.where})))
    inner = _aggregate(list(join.stages))
    # As a `$group` would say it: `$size` is a count.
    sums = {
        "$sum" if operator == "$size" else f"{operator}:{path}"
        for operator, path in uses
        if operator == "$size" or (operator in _ACCUMULATORS and path)
    }
    if join.stages and (inner.grouped or (inner.sort and inner.limit)):
        child = replace(child, sort=inner.sort, limit=inner.limit, grouped=inner.grouped, sums=inner.sums)
    elif sums and not join.stages:
        child = replace(child, grouped=True, sums=tuple(sorted(sums)))
    else:
        return query
    return replace(query, children=(*query.children, replace(child, shown=tuple(sorted(asked)))))


def of_children(queries: Iterable[Query]) -> Iterator[Query]:
    """The reads of children that pipelines on their parents contain, as if they were asked for alone."""
    for query in queries:
        for child in query.children:
            yield replace(child, count=query.count, milliseconds=query.milliseconds, examined=query.examined)


def _shown(projection: Any) -> tuple[str, ...]:
    """The fields, without those inside of them, that a projection asks for; none where it asks for all."""
    names = [str(name) for name, value in _mapping(projection).items() if value in (1, True)]
    return tuple(sorted({name.partition(".")[0] for name in names if name != "_id"}))


def _sums(body: Any) -> list[str]:
    """What a `$group` computes: `$sum:total`, `$avg:rating`, `$sum` for a count."""
    if not isinstance(body, Mapping):
        return ["$sum"]
    sums = set()
    for name, accumulator in body.items():
        if name == "_id" or not isinstance(accumulator, Mapping) or not accumulator:
            continue
        operator, value = next(iter(accumulator.items()))
        if operator in _ACCUMULATORS:
            is_path = isinstance(value, str) and value.startswith("$") and not value.startswith("$$")
            sums.add(f"{operator}:{value[1:]}" if is_path else operator)
    return sorted(sums)


def _filter(condition: Any, depth: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths that a filter names, and those that it searches by a case-insensitive regular expression."""
    paths: set[str] = set()
    case_insensitive: set[str] = set()
    if not isinstance(condition, Mapping) or depth > DEPTH_MAX:
        return (), ()
    for name, value in condition.items():
        if name in ("$and", "$or", "$nor"):
            for part in _list(value):
                more, more_insensitive = _filter(part, depth + 1)
                paths.update(more)
                case_insensitive.update(more_insensitive)
        elif not str(name).startswith("$"):
            paths.add(str(name))
            if _ignores_case(value):
                case_insensitive.add(str(name))
    return tuple(sorted(paths)), tuple(sorted(case_insensitive))


def _ignores_case(value: Any) -> bool:
    if isinstance(value, Mapping):
        if any(map(_ignores_case, (*value.values(), *_list(value.get("$in"))))):
            return True
        return value.get("$regex") is not None and "i" in str(value.get("$options", ""))
    # A pattern of Python or of BSON.
    flags = getattr(value, "flags", None)
    return isinstance(flags, int) and bool(flags & re.IGNORECASE)


def _sort(order: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(order, Mapping):
        return ()
    return tuple((str(name), 1 if _number(way) >= 0 else -1) for name, way in order.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float:
    """A number that can be added up; 0 for anything else, such as NaN or what a float cannot hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if -NUMBER_MAX <= value <= NUMBER_MAX else 0.0


def _follow_ups(timeline: list[tuple[float, Query, Any]]) -> dict[tuple[str, str, str], int]:
    """How often a collection was read by one field right after another was read, in the same session.

    Sessions separate one user's page from what others do at the same moment;
    where the record names no sessions, all operations count as one session.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    by_session: dict[Any, list[tuple[float, Query]]] = {}
    for moment, query, session in timeline:
        by_session.setdefault(session, []).append((moment, query))
    for rows in by_session.values():
        for number, (moment, query) in enumerate(rows, 1):
            if query.kind not in READS:
                continue
            reads = set()
            for later, other in rows[number : number + FOLLOW_UP_OPERATIONS_MAX]:
                if later - moment > FOLLOW_UP_SECONDS_MAX:
                    break
                is_lookup = other.kind == "find" and len(other.filter_paths) == 1
                if is_lookup and other.collection != query.collection:
                    reads.add((query.collection, other.collection, other.filter_paths[0]))
            counts.update(reads)
    return counts


def _session(document: Mapping[str, Any]) -> Any:
    """The client and session of an operation, as far as the record names them."""
    session = _mapping(_mapping(document.get("command")).get("lsid")).get("id")
    return (str(document.get("client", "")), repr(session))


def read_together(workload: Workload, child: str, parent: str, path: str, key: str) -> dict[str, int]:
    """Which reads of the child also read the parent, by the names of a relation's facts.

    By a join or right after; a read of the parent that joins the child reads
    both, and counts as a read of the child too. Children may also be fetched
    by their reference right after their parent.
    """

    def joins(source: str, target: str, side: int) -> int:
        return sum(
            query.count
            for query in workload.queries
            if query.collection == source
            and any(lookup[0] == target and lookup[side] in (path, "") for lookup in query.lookups)
        )

    reads = workload.count(child, ("find", "aggregate"))
    follow_ups = workload.follow_ups.get((child, parent, key), 0)
    backwards = joins(parent, child, 2)
    return {
        "read_together": min(joins(child, parent, 1) + follow_ups, reads) + backwards,
        "child_reads": reads + backwards,
        "joined_by_parent": backwards,
        "fetched_by_parent": min(workload.follow_ups.get((parent, child, path), 0), reads),
    }
