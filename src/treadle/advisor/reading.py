"""How a scan talks to the server: reads only, one operation at a time, each with a time limit.

Every operation carries `maxTimeMS`, may not spill to the server's disk, and
has a comment by which an administrator recognises it. An operation that the
server refuses, or that takes too long, becomes a sentence in the report; only
a lost connection ends the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.cursor import Cursor
from pymongo.database import Database
from pymongo.errors import ConnectionFailure, NotPrimaryError, PyMongoError
from pymongo.read_preferences import ReadPreference

from treadle.plan.server_errors import (
    AUTHENTICATION_FAILED,
    COMMAND_NOT_SUPPORTED_ON_VIEW,
    DROPPED,
    INTERRUPTED,
    OBJECT_TOO_LARGE,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    UNAUTHORIZED,
)

R = TypeVar("R")
Row = dict[str, Any]

COMMENT = "treadle scan"
ROWS_MAX = 200_000
_CODEC = CodecOptions[Row](
    tz_aware=True,
    # Dates beyond the year 9999 exist, and so does broken text; neither may end a scan.
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)

NO_RIGHTS = "no rights"
TOO_LONG = "it took too long"
TOO_LARGE = "it needs more memory than the server grants"
TOO_MUCH = "it is more than this process may hold"
_DROPPED = "it was dropped during the scan"
# What the server's errors mean for a scan.
_REASONS = {
    **dict.fromkeys(UNAUTHORIZED | {AUTHENTICATION_FAILED}, NO_RIGHTS),
    **dict.fromkeys(OUT_OF_TIME, TOO_LONG),
    **dict.fromkeys(OUT_OF_MEMORY | {OBJECT_TOO_LARGE}, TOO_LARGE),
    **dict.fromkeys(DROPPED, _DROPPED),
    COMMAND_NOT_SUPPORTED_ON_VIEW: "the server does not answer that for a view",
    INTERRUPTED: "it was interrupted",
}


class Refused(Exception):
    """An operation was not answered; `reason` is a phrase without any value of a document."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lost(Exception):
    """The connection to the server was lost."""


@dataclass(slots=True)
class Reader:
    """Reads from one database, one operation at a time."""

    database: Database[Row]
    operation_seconds: float

    @classmethod
    def on(cls, database: Database[Row], operation_seconds: float, secondary: bool) -> Reader:
        preference = ReadPreference.SECONDARY_PREFERRED if secondary else None
        return cls(database.with_options(codec_options=_CODEC, read_preference=preference), operation_seconds)

    def command(self, body: Mapping[str, Any], of_admin: bool = False) -> Row:
        """The reply to a command that reads."""
        database = self.database.client.admin if of_admin else self.database
        return translate_errors(
            lambda: database.command(
                {**body, "maxTimeMS": self._milliseconds, "comment": COMMENT},
                codec_options=_CODEC,
                read_preference=self.database.read_preference,
            )
        )

    def aggregate(
        self,
        collection: str,
        pipeline: Sequence[Mapping[str, Any]],
        cost: Callable[[Row], int] | None = None,
        cost_max: int = ROWS_MAX,
    ) -> list[Row]:
        """All rows of a pipeline; refused where they cost more memory than allowed."""
        # As much as one reply holds; by default the first would have 101 rows.
        options: Row = {"allowDiskUse": False, "maxTimeMS": self._milliseconds, "comment": COMMENT}
        options["batchSize"] = ROWS_MAX
        return _rows(lambda: self.database[collection].aggregate(list(pipeline), **options), cost, cost_max)

    def stream_aggregate(self, collection: str, pipeline: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """The rows of a pipeline one after another, where all at once would be too many."""
        options: Row = {"allowDiskUse": False, "maxTimeMS": self._milliseconds, "comment": COMMENT}
        with translate_errors(
            lambda: self.database[collection].aggregate(list(pipeline), **options)
        ) as cursor:
            while (row := translate_errors(lambda: next(cursor, None))) is not None:
                yield row

    def find(
        self, collection: str, condition: Mapping[str, Any], projection: Mapping[str, Any], **options: Any
    ) -> list[Row]:
        """All documents that match; `options` are those of PyMongo's find."""
        options.setdefault("batch_size", ROWS_MAX)
        return _rows(lambda: self._cursor(collection, condition, projection, **options))

    def stream(
        self,
        collection: str,
        projection: Mapping[str, Any] | None = None,
        condition: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Row]:
        """One document after another, where all at once would be too many."""
        with translate_errors(
            lambda: self._cursor(collection, condition or {}, projection, **options)
        ) as cursor:
            while (row := translate_errors(lambda: next(cursor, None))) is not None:
                yield row

    def _cursor(self, collection: str, *arguments: Any, **options: Any) -> Cursor[Row]:
        return self.database[collection].find(
            *arguments, max_time_ms=self._milliseconds, comment=COMMENT, **options
        )

    def collections(self) -> list[Row]:
        """What `listCollections` shows to this login; only names where it may see no more."""
        options: Row = {"maxTimeMS": self._milliseconds, "comment": COMMENT}
        try:
            return _rows(lambda: self.database.list_collections(**options))
        except Refused as refused:
            if refused.reason != NO_RIGHTS:
                raise
        options.update(nameOnly=True, authorizedCollections=True)
        return _rows(lambda: self.database.list_collections(**options))

    @property
    def _milliseconds(self) -> int:
        return max(1, int(self.operation_seconds * 1000))


def _rows(
    open_cursor: Callable[[], Any], cost: Callable[[Row], int] | None = None, cost_max: int = ROWS_MAX
) -> list[Row]:
    def read() -> list[Row]:
        with open_cursor() as cursor:
            if cost is None:
                # Whole batches, which is quicker than row by row.
                rows: list[Row] = cursor.to_list(cost_max + 1)
                if len(rows) > cost_max:
                    raise Refused(TOO_MUCH)
                return rows
            rows, spent = [], 0
            for row in cursor:
                spent += cost(row)
                if spent > cost_max:
                    raise Refused(TOO_MUCH)
                rows.append(row)
            return rows

    return translate_errors(read)


def translate_errors(operation: Callable[[], R]) -> R:
    """Perform an operation; the driver's errors become `Lost` or `Refused`."""
    try:
        return operation()
    except (ConnectionFailure, NotPrimaryError) as error:
        raise Lost(type(error).__name__) from None
    except PyMongoError as error:
        raise Refused(_reason(error)) from None


def _reason(error: PyMongoError) -> str:
    """Why, without the server's own message, which may quote a document."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        name = (getattr(error, "details", None) or {}).get("codeName", "")
        return _REASONS.get(code, f"the server refused it ({name or code})")
    return f"the driver gave up ({type(error).__name__})"
