"""The operations of a bulk write: the driver's own, whose parts can be read.

Whoever passes operations on may have to add to their filters; PyMongo's own
classes keep what they were given to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pymongo.operations as driver

Filter: TypeAlias = Mapping[str, Any]
Update: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class InsertOne(driver.InsertOne[Any]):
    """One new document."""

    __slots__ = ("document",)

    def __init__(self, document: Any) -> None:
        super().__init__(document)
        self.document = document


class UpdateOne(driver.UpdateOne):
    """An update of one document."""

    __slots__ = ("document", "filter", "upsert")

    def __init__(self, filter: Filter, update: Update, upsert: bool = False) -> None:
        super().__init__(filter, update, upsert)
        self.filter, self.document, self.upsert = filter, update, upsert

    def at(self, filter: Filter) -> UpdateOne:
        """The same with another filter."""
        return UpdateOne(filter, self.document, self.upsert)


class ReplaceOne(driver.ReplaceOne[Any]):
    """One document in the place of another."""

    __slots__ = ("document", "filter", "upsert")

    def __init__(self, filter: Filter, document: Any, upsert: bool = False) -> None:
        super().__init__(filter, document, upsert)
        self.filter, self.document, self.upsert = filter, document, upsert

    def at(self, filter: Filter) -> ReplaceOne:
        """The same with another filter."""
        return ReplaceOne(filter, self.document, self.upsert)


class DeleteOne(driver.DeleteOne):
    """One document less."""

    __slots__ = ("filter",)

    def __init__(self, filter: Filter) -> None:
        super().__init__(filter)
        self.filter = filter

    def at(self, filter: Filter) -> DeleteOne:
        """The same with another filter."""
        return DeleteOne(filter)


class DeleteMany(driver.DeleteMany):
    """Every document that a filter matches, less."""

    __slots__ = ("filter",)

    def __init__(self, filter: Filter) -> None:
        super().__init__(filter)
        self.filter = filter

    def at(self, filter: Filter) -> DeleteMany:
        """The same with another filter."""
        return DeleteMany(filter)


Operation: TypeAlias = InsertOne | UpdateOne | ReplaceOne | DeleteOne | DeleteMany
