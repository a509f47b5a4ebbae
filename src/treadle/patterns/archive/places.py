"""The two places of a model with an archive."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from pymongo import IndexModel

from treadle.engine.indexes import declared_indexes
from treadle.errors import DeclarationError
from treadle.graph.calls import MovingRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Models, Place
from treadle.model.document import Document
from treadle.query.paths import resolve

DATES = (dt.datetime, dt.date)


class ArchivePlaces(MovingRule):
    """Where the documents of a model are, and by which date they move."""

    pattern = "archive"

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
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
        self.into: str = declared.into
        indexes = [
            _not_unique(each)
            for each in declared_indexes(place.entry)
            if "expireAfterSeconds" not in each.document
        ]
        self.side: ModelEntry = graph.add_side(_archived_model(place, self.into, indexes), place.label)


def _not_unique(index: IndexModel) -> IndexModel:
    """The index as the archive has it: a document may have a value that an archived one had before."""
    options = {name: value for name, value in index.document.items() if name not in ("key", "unique")}
    return IndexModel(list(dict(index.document["key"]).items()), **options)


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
