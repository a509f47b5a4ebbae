"""Performs recorded requests, each with a time limit and a comment; the rows that they answer."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.database import Database

from treadle.advisor.loop.workload_file import MALFORMED, Request
from treadle.advisor.reading import Refused, translate_errors

Row = dict[str, Any]
COMMENT = "treadle trial"
OPERATION_SECONDS_MAX = 30.0
# A request that answers more is measured up to here.
ROWS_MAX = 20_000
CODEC = CodecOptions[Row](
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)
_WRITING_STAGES = frozenset({"$out", "$merge"})


def reading_view(database: Database[Any]) -> Database[Row]:
    """The database as requests see it: nothing that is stored ends a trial."""
    return database.with_options(codec_options=CODEC)


def perform(database: Database[Row], request: Request) -> list[Row]:
    """The rows that a recorded read answers; `Refused` says why it did not."""
    try:
        return translate_errors(lambda: _rows(database, request))
    except MALFORMED:
        raise Refused("the driver does not send it") from None


def timed(database: Database[Row], requests: tuple[Request, ...]) -> tuple[float, list[list[Row]]]:
    """Perform reads one after the other; the seconds they took, and their rows."""
    start = perf_counter()
    answers = [perform(database, each) for each in requests]
    return perf_counter() - start, answers


def _rows(database: Database[Row], request: Request) -> list[Row]:
    body, collection = request.body, database[request.collection]
    milliseconds = int(OPERATION_SECONDS_MAX * 1000)
    if request.operation == "count":
        command = {"count": request.collection, "query": body.get("query") or {}}
        command.update({name: body[name] for name in ("limit", "skip", "collation") if body.get(name)})
        reply = database.command(command, maxTimeMS=milliseconds, comment=COMMENT)
        return [{"n": reply["n"]}]
    if request.operation == "distinct":
        command = {"distinct": request.collection, "key": body.get("key"), "query": body.get("query") or {}}
        reply = database.command(command, maxTimeMS=milliseconds, comment=COMMENT)
        return [{"values": reply["values"]}]
    options = {name: body[name] for name in ("collation", "hint", "let") if body.get(name)}
    if request.operation == "aggregate":
        pipeline = body.get("pipeline") or []
        if any(_WRITING_STAGES & set(stage) for stage in pipeline if isinstance(stage, Mapping)):
            raise Refused("it writes")
        cursor: Any = collection.aggregate(pipeline, maxTimeMS=milliseconds, comment=COMMENT, **options)
    else:
        cursor = collection.find(
            body.get("filter") or {},
            body.get("projection") or None,
            sort=list((body.get("sort") or {}).items()) or None,
            limit=abs(int(body.get("limit") or 0)),
            skip=int(body.get("skip") or 0),
            max_time_ms=milliseconds,
            comment=COMMENT,
            **options,
        )
    rows: list[Row] = []
    with cursor:
        for row in cursor:
            rows.append(row)
            if len(rows) >= ROWS_MAX:
                break
    return rows
