"""A read that streams continues after a document that cannot be decoded.

Such a document hides all documents of its batch: from there on each is decoded by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bson.errors import InvalidBSON

from treadle.plan import Raw, Read
from treadle.plan.decoding import Unreadable, after, readable_of


@dataclass(slots=True)
class Reading:
    """A read, and how far it has come."""

    # What is left to read; documents one by one if `apart`.
    command: Read
    apart: bool = False
    # How many documents were read of it.
    read: int = 0

    def take(self, page: list[Any]) -> tuple[list[Raw], Unreadable | None]:
        """The documents of a page, and what to say of one that cannot be decoded."""
        self.read += len(page)
        return readable_of(self.command, page) if self.apart else (page, None)

    def go_on(self, error: InvalidBSON) -> None:
        """Change the command to what is left to read, one by one; raises where it is that already."""
        if self.apart:
            raise error
        self.command, self.apart, self.read = after(self.command, self.read), True, 0
