"""A read that streams goes on where its cursor cannot.

A document that cannot be decoded hides all that came with it: from there on
each is decoded by itself. A collection that is swapped ends every cursor on
it. The one of that name has all documents then, but in another order: so a
read begins again where nothing was read yet, goes on after the last id where
it is sorted by that alone, and is an error otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bson.errors import InvalidBSON
from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.plan import Raw, Read
from treadle.plan.decoding import Unreadable, after, readable_of
from treadle.plan.server_errors import QUERY_PLAN_KILLED, codes_of
from treadle.query import keyset

# What a cursor may end with that is gone on after.
ENDED = (InvalidBSON, OperationFailure)


@dataclass(slots=True)
class Reading:
    """A read, and how far it has come."""

    # What is left to read; documents one by one if `apart`.
    command: Read
    apart: bool = False
    # How many documents were read of it, and how many of all before; whether it was begun anew without any.
    read: int = 0
    before: int = 0
    again: bool = False
    # The id of the last document, if it is known.
    last: Any = None

    def take(self, page: list[Any]) -> tuple[list[Raw], Unreadable | None]:
        """The documents of a page, and what to say of one that cannot be decoded."""
        self.read += len(page)
        self.again = self.again and not page
        if self.apart:
            self.last = None
            return readable_of(self.command, page)
        self.last = page[-1].get("_id") if page else self.last
        return page, None

    def go_on(self, error: Exception, inside: bool) -> None:
        """Change the command to what is left to read; raises where that is not known."""
        if isinstance(error, InvalidBSON):
            if self.apart:
                raise error
            command = after(self.command, self.read)
        elif QUERY_PLAN_KILLED not in codes_of(error) or inside or self.again:
            raise error
        elif not self.before + self.read:
            command = self.command
        else:
            command = self._beyond(error)
        self.again = not isinstance(error, InvalidBSON)
        self.apart = self.apart or not self.again
        self.command, self.before, self.read = command, self.before + self.read, 0

    def _beyond(self, error: Exception) -> Read:
        """The read of what comes after the last id."""
        options = dict(self.command.options)
        keys = list(options.get("sort") or [])
        if self.command.method != "find" or [path for path, _ in keys] != ["_id"] or self.last is None:
            raise DataError(
                f"{self.command.collection} was swapped by a migration, or dropped, after "
                f"{self.before + self.read} documents were read; which of the others come next is known in "
                "the order of _id alone: read them again, or with sort='_id'",
                code="read-interrupted",
            ) from error
        filter, *others = self.command.arguments
        beyond = keyset.after(keys, [self.last], mixed=["_id"])
        options.pop("skip", None)
        if options.get("limit"):
            options["limit"] = max(1, options["limit"] - self.read)
        return replace(self.command, arguments=({"$and": [filter or {}, beyond]}, *others), options=options)
