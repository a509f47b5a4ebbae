"""Calls of one document that are one command, which the Store performs without a plan.

Of those who queue (`plan/together.py`) there may be many, and what each of them
costs is what a group costs. Here a call is a command, and a function of its
outcome. None in the place of a command leaves the call to its plan, which does
the same for whatever takes more than that.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar

from bson import ObjectId

from treadle.engine import crud
from treadle.engine.checked import as_written
from treadle.engine.touches import touches_of
from treadle.engine.writes import AFTER
from treadle.graph.pattern import Entry
from treadle.model.document import Document
from treadle.plan import NO_OPTIONS, Call, Raw
from treadle.plan.server_errors import translate, translate_update
from treadle.query.update_values import plainly_checked

D = TypeVar("D", bound=Document)


class Prompt(Generic[D]):
    """The calls on one model that may be one command each."""

    def __init__(self, entry: Entry[D]) -> None:
        self.entry = entry
        self._name = entry.model.__name__
        self._reads = entry.elsewhere is None and not entry.attends
        self._inserts = entry.plain
        # What makes a model of a document.
        self.load = entry.codec.load

    def get(self, identity: Any) -> Call | None:
        """What reads the document of an id."""
        if not self._reads:
            return None
        key = self.entry.identity(identity)
        if type(key) not in crud.NAMING:
            return None
        return Call(self.entry.collection, "find_one", (self.entry.one(key),), NO_OPTIONS, False, (key,))

    def insert(self, document: D) -> Call | None:
        """What stores a document that a later read will show as it is."""
        if not self._inserts:
            return None
        altered: list[Any] = []
        raw = crud.dump(self.entry, document, altered)
        if altered:
            # So it will be with the next one, and this was in vain.
            self._inserts = False
            return None
        document.__pydantic_fields_set__.add("id")
        return Call(self.entry.collection, "insert_one", (raw,), NO_OPTIONS, True, (raw["_id"],))

    def update(self, identity: Any, update: Any) -> Call | None:
        """What updates the document of an id, where the update alone tells that the result will fit."""
        if not self._updates or type(identity) is not ObjectId:
            return None
        checked = plainly_checked(self.entry.codec, update)
        if checked is None:
            return None
        key = self.entry.identity(identity)
        return Call(
            self.entry.collection, "find_one_and_update", ({"_id": key}, checked), AFTER, True, (key,)
        )

    @cached_property
    def _updates(self) -> bool:
        """Whether an update by id is what its caller asks for, and nothing else."""
        entry, codec = self.entry, self.entry.codec
        another = entry.scope or entry.versioned or entry.lineage or entry.below or entry.elsewhere
        added = codec.owned or codec.pairs or entry.shielded or touches_of(entry, new=False)
        return entry.plain and not another and not added

    def after(self, raw: Raw | None) -> D | None:
        """The model of a document that an update has left."""
        return None if raw is None else as_written(self.entry, raw)

    def refusal(self, error: Exception, command: Call) -> Exception:
        """The error to raise where a write failed."""
        if command.method == "insert_one":
            return translate(error, self._name, command.arguments)
        chosen, update = command.arguments
        return translate_update(error, self._name, [chosen, {"update": update}])
