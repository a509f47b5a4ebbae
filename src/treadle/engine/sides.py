"""Which of two declarations documents show, as writers and provers need to know it (`graph/changing.py`).

A row of `treadle.changes` says per field what new documents show, and what
documents without a mark do: those of processes that know only one of the two
declarations. A commit that concerns such a field reads it once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from treadle.graph.changing import Replacement, Side
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, find
from treadle.values import frozen

COLLECTION = "treadle.changes"


@frozen
class Sides:
    """The fields of one model that have two declarations, and what is shown of them."""

    replacements: Sequence[Replacement] = ()
    # By label, of new documents and of those without a mark.
    new: dict[str, Side] | None = None
    unmarked: dict[str, Side] | None = None
    # Those whose former values were dropped.
    done: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.replacements)

    def _unmarked(self, replacement: Replacement) -> Side:
        return (self.unmarked or {}).get(replacement.label, "old")

    def framed(self, document: Raw) -> Raw:
        """A document as if it showed the former declarations."""
        shown = [each for each in self.replacements if each.side(document, self._unmarked(each)) == "new"]
        if not shown:
            return document
        document = copy.deepcopy(document)
        for each in shown:
            each.exchange(document)
        return document

    def path(self, document: Raw, path: str) -> str:
        """Where a path of the framed document really is."""
        for each in self.replacements:
            if each.side(document, self._unmarked(each)) == "new":
                path = each.twin(path)
        return path

    def drops(self, path: str) -> bool:
        """Whether nobody keeps a path of the framed document any more."""
        ended = [each for each in self.replacements if each.label in self.done]
        return any(path == former for each in ended for former, _ in each.pairs)

    def store(self, documents: Sequence[Raw]) -> None:
        """Let new documents show what they should."""
        for each in self.replacements:
            for document in documents:
                each.show(document, (self.new or {}).get(each.label, "old"))

    def arriving(self) -> list[Raw]:
        """What lets documents that come back from elsewhere show what new ones do."""
        new = self.new or {}
        each_to = [(each, new.get(each.label, "old")) for each in self.replacements]
        return [stage for each, to in each_to for stage in (each.turning(to), {"$set": {each.mark: to}})]

    def stages(self) -> list[Raw]:
        """What an update does first, and again when it has set its values."""
        return [each.exchanging(self._unmarked(each)) for each in self.replacements]


NONE = Sides()


def sides_of(entry: Entry[Any]) -> Plan[Sides]:
    """What the documents of a model show."""
    changing = entry.replacements
    if not changing:
        return NONE
    rows = yield from find(COLLECTION, {"_id": {"$in": [each.label for each in changing]}})
    new = {row["_id"]: row["new"] for row in rows}
    unmarked = {row["_id"]: row["unmarked"] for row in rows}
    done = frozenset(row["_id"] for row in rows if row["state"] == "done")
    return Sides(changing, new, unmarked, done)
