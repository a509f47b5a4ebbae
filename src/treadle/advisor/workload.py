"""What the profiler recorded, with every value left out; nothing here talks to a server.

A profiler document becomes a `Query`: which collection, which fields were
filtered and sorted by, which collections were looked up, what was counted or
incremented, how much was examined for how much. Operations of the same shape
are added up. Getmores, the profiler's own reads and the server's housekeeping
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from treadle.advisor.facts import READS, Query, Workload

SHAPES_MAX = 5_000
DEPTH_MAX = 20
NUMBER_MAX = 1e15
# A read of the parent this soon after one of the child belongs to the same page.
FOLLOWED_SECONDS_MAX = 0.1
FOLLOWED_OPERATIONS_MAX = 5
_WHOLE = ("find", "aggregate")
_COUNTED = {"$sum", "$avg", "$min", "$max", "$count"}


def read(documents: Iterable[Mapping[str, Any]], database: str, source: str, operations_max: int) -> Workload:
    """The workload of one database; operations beyond the maximum are left out."""
    found: dict[Query, list[float]] = {}
    shapes: dict[Query, Query] = {}
    timeline: list[tuple[float, Query, Any]] = []
    times: list[float] = []
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
        # One object for all operations of a shape: there may be very many.
        shape = shapes.setdefault(shape, shape) if len(shapes) < SHAPES_MAX else shapes.get(shape, shape)
        if shape not in found and len(found) >= SHAPES_MAX:
            complete = False
            continue
        sums = found.setdefault(shape, [0, 0.0, 0, 0])
        for place, value in enumerate((query.count, query.milliseconds, query.examined, query.returned)):
            sums[place] += value
        moment = _seconds(document.get("ts"))
        if moment is not None:
            times.append(moment)
            timeline.append((moment, shape, _session(document)))
    queries = tuple(
        replace(shape, count=int(n), milliseconds=ms, examined=int(examined), returned=int(returned))
        for shape, (n, ms, examined, returned) in found.items()
    )
    span = max(times) - min(times) if len(times) > 1 else 0.0
    return Workload(source, queries, span, complete, _followed(timeline))


def parse(document: Mapping[str, Any], database: str) -> Query | None:
    """One profiler document as a query of this database, or None."""
    namespace = document.get("ns")
    if not isinstance(namespace, str):
        return None
    of, _, collection = namespace.partition(".")
    if of != database or not collection or collection.startswith("system."):
        return None
    command = document.get("command")
    command = command if isinstance(command, Mapping) else {}
    if command.get("comment") == "treadle scan":
        return None
    operation = document.get("op")
    made = _parse(str(operation), command, document)
    if made is None:
        return None
    plan = str(document.get("planSummary", ""))
    return replace(
        made,
        collection=collection,
        collection_scan=plan.startswith("COLLSCAN") and operation != "insert",
        count=1,
        milliseconds=_number(document.get("millis")),
        examined=int(_number(document.get("docsExamined"))),
        returned=int(
            _number(document.get("nreturned", document.get("nMatched", document.get("ndeleted", 0))))
        ),
    )


def _parse(operation: str, command: Mapping[str, Any], document: Mapping[str, Any]) -> Query | None:
    if operation == "insert":
        return Query("", "insert")
    if operation == "remove":
        names, insensitive = _filter(command.get("q", {}))
        return Query("", "delete", names, insensitive=insensitive)
    if operation == "update":
        return _update(command.get("q", {}), command.get("u", {}))
    if operation == "query" or "find" in command:
        names, insensitive = _filter(command.get("filter", command.get("query", {})))
        return Query(
            "",
            "find",
            names,
            _sort(command.get("sort")),
            int(_number(command.get("limit", command.get("ntoreturn", 0)))),
            insensitive=insensitive,
        )
    if operation != "command":
        return None
    if "aggregate" in command:
        return _aggregate(command.get("pipeline", []))
    for name, kind in (("count", "count"), ("distinct", "distinct")):
        if name in command:
            names, insensitive = _filter(command.get("query", {}))
            return Query("", kind, names, insensitive=insensitive)
    if "findAndModify" in command or "findandmodify" in command:
        return _update(command.get("query", {}), command.get("update", {}))
    return None


def _update(condition: Any, update: Any) -> Query:
    names, insensitive = _filter(condition)
    increments: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    if isinstance(update, Mapping):
        # Only an update that does nothing but count could be put off.
        if set(update) - {"$set", "$currentDate"} == {"$inc"} and _only_stamps(update):
            increments = tuple(sorted(map(str, _mapping(update["$inc"]))))
        grown = {**_mapping(update.get("$push")), **_mapping(update.get("$addToSet"))}
        pushes = tuple(
            sorted(
                str(path)
                for path, value in grown.items()
                if not (isinstance(value, Mapping) and "$slice" in value)
            )
        )
    return Query("", "update", names, increments=increments, pushes=pushes, insensitive=insensitive)


def _only_stamps(update: Mapping[str, Any]) -> bool:
    stamped = _mapping(update.get("$set"))
    return all(isinstance(value, datetime) for value in stamped.values())


def _aggregate(pipeline: Any) -> Query:
    filtered: tuple[str, ...] = ()
    insensitive: tuple[str, ...] = ()
    order: tuple[tuple[str, int], ...] = ()
    lookups: list[tuple[str, str, str]] = []
    limit, grouped = 0, False
    sums: list[str] = []
    for stage in pipeline if isinstance(pipeline, list) else []:
        if not isinstance(stage, Mapping) or not stage:
            continue
        name, body = next(iter(stage.items()))
        if name == "$match" and not grouped:
            names, more = _filter(body)
            filtered, insensitive = tuple(sorted({*filtered, *names})), (*insensitive, *more)
        elif name == "$lookup" and isinstance(body, Mapping):
            lookups.append(
                (_text(body.get("from")), _text(body.get("localField")), _text(body.get("foreignField")))
            )
        elif name == "$sort" and not grouped:
            order = _sort(body)
        elif name == "$limit":
            limit = int(_number(body))
        elif name in ("$group", "$count", "$sortByCount"):
            grouped = True
            sums += _accumulated(body)
    return Query(
        "", "aggregate", filtered, order, limit, tuple(lookups), grouped, tuple(sums), insensitive=insensitive
    )


def _accumulated(body: Any) -> list[str]:
    """What a `$group` computes: `$sum:total`, `$avg:rating`, `$sum` for a count."""
    if not isinstance(body, Mapping):
        return ["$sum"]
    found = []
    for name, accumulator in body.items():
        if name == "_id" or not isinstance(accumulator, Mapping) or not accumulator:
            continue
        operator, value = next(iter(accumulator.items()))
        if operator in _COUNTED:
            is_path = isinstance(value, str) and value.startswith("$") and not value.startswith("$$")
            found.append(f"{operator}:{value[1:]}" if is_path else operator)
    return sorted(set(found))


def _filter(condition: Any, depth: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that a filter names, and those that it searches by a regular expression without case."""
    names: set[str] = set()
    insensitive: set[str] = set()
    if not isinstance(condition, Mapping) or depth > DEPTH_MAX:
        return (), ()
    for name, value in condition.items():
        if name in ("$and", "$or", "$nor"):
            for part in value if isinstance(value, list) else []:
                more, regular = _filter(part, depth + 1)
                names.update(more)
                insensitive.update(regular)
        elif not str(name).startswith("$"):
            names.add(str(name))
            if _is_insensitive(value):
                insensitive.add(str(name))
    return tuple(sorted(names)), tuple(sorted(insensitive))


def _is_insensitive(value: Any) -> bool:
    if isinstance(value, Mapping):
        if any(_is_insensitive(part) for part in value.values() if not isinstance(part, str)):
            return True
        if "$in" in value and isinstance(value["$in"], list):
            return any(map(_is_insensitive, value["$in"]))
        pattern = value.get("$regex")
        return pattern is not None and "i" in str(value.get("$options", ""))
    if isinstance(value, re.Pattern):
        # Python compiles text patterns with UNICODE; only the flag matters.
        return bool(value.flags & re.IGNORECASE)
    flags = getattr(value, "flags", None)
    return isinstance(flags, int) and bool(flags & re.IGNORECASE)


def _sort(order: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(order, Mapping):
        return ()
    return tuple((str(name), 1 if _number(way) >= 0 else -1) for name, way in order.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float:
    """A number that can be added up; 0 for anything else, such as NaN or what a float cannot hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if -NUMBER_MAX <= value <= NUMBER_MAX else 0.0


def _seconds(moment: Any) -> float | None:
    return moment.timestamp() if isinstance(moment, datetime) else None


def _followed(timeline: list[tuple[float, Query, Any]]) -> dict[tuple[str, str, str], int]:
    """How often a collection was read by one field right after another was read, in the same session.

    Sessions tell one user's page from what others do in the same moment; where
    the record names none, nobody can tell, and all count as one.
    """
    timeline.sort(key=lambda row: row[0])
    found: dict[tuple[str, str, str], int] = {}
    by_session: dict[Any, list[tuple[float, Query]]] = {}
    for moment, query, session in timeline:
        by_session.setdefault(session, []).append((moment, query))
    for rows in by_session.values():
        for number, (moment, query) in enumerate(rows):
            if query.kind not in READS:
                continue
            seen: set[tuple[str, str, str]] = set()
            for later, other in rows[number + 1 : number + 1 + FOLLOWED_OPERATIONS_MAX]:
                if later - moment > FOLLOWED_SECONDS_MAX:
                    break
                if other.kind == "find" and len(other.filtered) == 1 and other.collection != query.collection:
                    seen.add((query.collection, other.collection, other.filtered[0]))
            for place in seen:
                found[place] = found.get(place, 0) + 1
    return found


def _session(document: Mapping[str, Any]) -> Any:
    """Which session of which client an operation belonged to, as far as the record tells."""
    session = _mapping(_mapping(document.get("command")).get("lsid")).get("id")
    return (str(document.get("client", "")), repr(session))


def read_together(workload: Workload, child: str, parent: str, path: str, key: str) -> tuple[int, int]:
    """How many reads of the child were joined with the parent or followed by a read of it, and all of them.

    A read of the parent that joins the child reads both.
    """
    own = [query for query in workload.queries if query.collection == child and query.kind in _WHOLE]
    all_reads = sum(query.count for query in own)
    joined = sum(
        query.count
        for query in own
        if any(each[0] == parent and each[1] in (path, "") for each in query.lookups)
    )
    followed = workload.followed.get((child, parent, key), 0)
    backwards = sum(
        query.count
        for query in workload.queries
        if query.collection == parent
        and any(each[0] == child and each[2] in (path, "") for each in query.lookups)
    )
    return min(joined + followed, all_reads) + backwards, all_reads + backwards
