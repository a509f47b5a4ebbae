"""Reads and inserts of one document that are one command, which the Store performs without a plan.

Of those who queue (`store/shared_commands.py`) there may be many, and what each of them
costs is what a group costs. Here a call is a command, and a function of its
outcome. None in the place of a command leaves the call to its plan, which does
the same for whatever takes more than that.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Generic, TypeVar

from treadle.engine import crud
from treadle.graph.model_entry import ModelEntry
from treadle.model.document import Document
from treadle.plan import NO_OPTIONS, Call
from treadle.plan.server_errors import translate

D = TypeVar("D", bound=Document)


class Prompt(Generic[D]):
    """The calls on one model that may be one command each."""

    def __init__(self, entry: ModelEntry[D], pending: Container[ModelEntry[Any]]) -> None:
        self.entry = entry
        # The models whose next write looks for unique indexes first.
        self._pending = pending
        self._name = entry.model.__name__
        self._reads = entry.everything.archive is None and not entry.versions.needs_server
        self._inserts = entry.effects.is_plain and not entry.versions.writes_older
        # What makes a model of a document.
        self.load = entry.codec.load

    def get(self, identity: Any) -> Call | None:
        """What reads the document of an id."""
        if not self._reads:
            return None
        key = self.entry.ids.encode(identity)
        if type(key) not in crud.NAMING:
            return None
        return Call(
            self.entry.collection, "find_one", (self.entry.filter_for_id(key),), NO_OPTIONS, False, (key,)
        )

    def insert(self, document: D) -> Call | None:
        """What stores a document that a later read will show as it is."""
        if not self._inserts or self.entry in self._pending:
            return None
        altered: list[Any] = []
        raw = crud.dump(self.entry, document, altered)
        if altered:
            # So it will be with the next one, and this was in vain.
            self._inserts = False
            return None
        document.__pydantic_fields_set__.add("id")
        return Call(self.entry.collection, "insert_one", (raw,), NO_OPTIONS, True, (raw["_id"],))

    def refusal(self, error: Exception, command: Call) -> Exception:
        """The error to raise where an insert failed."""
        return translate(error, self._name, command.arguments)
