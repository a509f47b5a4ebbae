"""The one way in which a scan talks to the server: reads only, one at a time, each with an end.

Every operation carries `maxTimeMS`, may not spill to the server's disk, and
names itself in a comment, so that an administrator sees whose it is. An
operation that the server refuses, or that takes too long, is a sentence in
the report; only a lost connection ends the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.database import Database
from pymongo.errors import ConnectionFailure, NotPrimaryError, OperationFailure, PyMongoError
from pymongo.read_preferences import ReadPreference

from treadle.plan.server_errors import (
    AUTHENTICATION_FAILED,
    COMMAND_NOT_SUPPORTED_ON_VIEW,
    DROPPED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    UNAUTHORIZED,
)

R = TypeVar("R")

COMMENT = "treadle scan"
ROWS_MAX = 200_000
_CODEC = CodecOptions[dict[str, Any]](
    tz_aware=True,
    # Dates beyond the year 9999 exist, and so does broken text; neither may end a scan.
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)

NO_RIGHTS = "no rights"
TOO_LONG = "it took too long"
TOO_LARGE = "it needs more memory than the server grants"
TOO_MUCH = "it is more than this process may hold"
# What the server's errors mean for a scan.
_REASONS = {
    **dict.fromkeys(UNAUTHORIZED | {AUTHENTICATION_FAILED}, NO_RIGHTS),
    **dict.fromkeys(OUT_OF_TIME, TOO_LONG),
    **dict.fromkeys(OUT_OF_MEMORY, TOO_LARGE),
    **dict.fromkeys(DROPPED, "it was dropped meanwhile"),
    COMMAND_NOT_SUPPORTED_ON_VIEW: "the server does not answer that for a view",
    INTERRUPTED: "it was interrupted",
}


class Refused(Exception):
    """One operation was not answered; `reason` is a phrase that holds no value of any document."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lost(Exception):
    """The server went away."""


@dataclass(slots=True)
class Reader:
    """Reads from one database, one operation at a time."""

    database: Database[dict[str, Any]]
    operation_seconds: float
    operations: int = 0

    @classmethod
    def on(cls, database: Database[dict[str, Any]], operation_seconds: float, secondary: bool) -> Reader:
        preference = ReadPreference.SECONDARY_PREFERRED if secondary else None
        return cls(database.with_options(codec_options=_CODEC, read_preference=preference), operation_seconds)

    def command(self, body: Mapping[str, Any], of_admin: bool = False) -> dict[str, Any]:
        """The reply to a command that reads."""
        database = self.database.client.admin if of_admin else self.database
        return self._asked(
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
        cost: Callable[[dict[str, Any]], int] = lambda row: 1,
        cost_max: int = ROWS_MAX,
    ) -> list[dict[str, Any]]:
        """All rows of a pipeline, which are few; refused where they cost more memory than they may."""

        def ask() -> list[dict[str, Any]]:
            with self.database[collection].aggregate(
                list(pipeline), allowDiskUse=False, maxTimeMS=self._milliseconds, comment=COMMENT
            ) as cursor:
                return _bounded(cursor, cost, cost_max)

        return self._asked(ask)

    def find(
        self,
        collection: str,
        condition: Mapping[str, Any],
        projection: Mapping[str, Any],
        sort: Sequence[tuple[str, int]] | None = None,
        limit: int = 0,
    ) -> list[dict[str, Any]]:
        def ask() -> list[dict[str, Any]]:
            with self.database[collection].find(
                condition, projection, sort=sort, limit=limit, max_time_ms=self._milliseconds, comment=COMMENT
            ) as cursor:
                return _bounded(cursor)

        return self._asked(ask)

    def each(
        self,
        collection: str,
        projection: Mapping[str, Any],
        sort: Sequence[tuple[str, int]],
    ) -> Iterator[dict[str, Any]]:
        """One document after another, where all at once would be too many."""
        cursor = self._asked(
            lambda: self.database[collection].find(
                {}, projection, sort=sort, max_time_ms=self._milliseconds, comment=COMMENT
            )
        )
        with cursor:
            while (row := self._asked(lambda: next(cursor, None))) is not None:
                yield row

    def collections(self) -> list[dict[str, Any]]:
        """What the login may see, as listCollections shows it; by name only where it may see no more."""
        try:
            with self._listed({}) as cursor:
                return list(cursor)
        except OperationFailure as error:
            if error.code not in UNAUTHORIZED:
                raise Refused(reason_of(error)) from None
        except (ConnectionFailure, NotPrimaryError) as error:
            raise Lost(type(error).__name__) from None

        def ask() -> list[dict[str, Any]]:
            with self._listed({"nameOnly": True, "authorizedCollections": True}) as cursor:
                return list(cursor)

        return self._asked(ask)

    def _listed(self, options: Mapping[str, Any]) -> Any:
        self.operations += 1
        return self.database.list_collections(**options, maxTimeMS=self._milliseconds, comment=COMMENT)

    @property
    def _milliseconds(self) -> int:
        return max(1, int(self.operation_seconds * 1000))

    def _asked(self, ask: Callable[[], R]) -> R:
        self.operations += 1
        try:
            return ask()
        except (ConnectionFailure, NotPrimaryError) as error:
            raise Lost(type(error).__name__) from None
        except PyMongoError as error:
            raise Refused(reason_of(error)) from None


def reason_of(error: PyMongoError) -> str:
    """Why, without the server's own message, which may quote a document."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        name = (getattr(error, "details", None) or {}).get("codeName", "")
        return _REASONS.get(code, f"the server refused it ({name or code})")
    return f"the driver gave up ({type(error).__name__})"


def _bounded(
    cursor: Iterable[dict[str, Any]],
    cost: Callable[[dict[str, Any]], int] = lambda row: 1,
    cost_max: int = ROWS_MAX,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    spent = 0
    for row in cursor:
        spent += cost(row)
        if spent > cost_max:
            raise Refused(TOO_MUCH)
        rows.append(row)
    return rows
