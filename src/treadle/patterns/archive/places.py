"""The two places of a model with an archive."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from pymongo import IndexModel

from treadle.engine.indexes import declared_indexes
from treadle.errors import DeclarationError
from treadle.graph.calls import MovingRule
from treadle.graph.pattern import Entry, Models, Place
from treadle.model.document import Document
from treadle.plan import Distant, Foreign
from treadle.query.paths import resolve

DATES = (dt.datetime, dt.date)


class ArchivePlaces(MovingRule):
    """Where the documents of a model are, and by which date they move."""

    pattern = "archive"

    def __init__(self, place: Place, graph: Models, declared: Any, unique: Sequence[IndexModel]) -> None:
        super().__init__(place)
        self.declared = declared
        self.graph: Any = graph
        self.limits = place.entry.limits
        path = resolve(place.entry.codec, declared.by, place.label, "source-field-missing")
        if path.in_array or path.shape.python not in DATES:
            raise DeclarationError(
                f"{place.label} archives by {declared.by!r}, which must be a date or a datetime of the "
                "document itself",
                code="maintained-type",
            )
        self.by = path.stored
        self.unique = list(unique)
        self.into: str = Foreign(declared.into) if "." in declared.into else declared.into
        if declared.client is not None:
            self.into = _distant(place, declared)
        self.side: Entry[Any] | None = None
        if not isinstance(self.into, Foreign):
            self.side = graph.add_side(_archived_model(place, self.into, self.own_indexes()), place.label)

    @property
    def distant(self) -> bool:
        """Whether the archive is in another cluster."""
        return isinstance(self.into, Distant)

    def own_indexes(self) -> list[IndexModel]:
        return [each for each in declared_indexes(self.target) if "expireAfterSeconds" not in each.document]


def _distant(place: Place, declared: Any) -> Distant:
    """The archive in another cluster, if that can be kept."""
    if "." not in declared.into:
        raise DeclarationError(
            f"{place.label} has client= and into={declared.into!r}; in another cluster it takes "
            "'database.collection'",
            code="archive-declaration",
        )
    return Distant(declared.into, declared.client)


def _archived_model(place: Place, collection: str, indexes: Sequence[IndexModel]) -> type[Document]:
    """The model of the archive, for its collection and indexes."""
    kind: Any = type(Document)
    made: type[Document] = kind(
        f"{place.entry.model.__name__}_archive",
        (Document,),
        {"__annotations__": {}, "__module__": __name__},
        collection=collection,
        validation="off",
        indexes=list(indexes),
    )
    return made
