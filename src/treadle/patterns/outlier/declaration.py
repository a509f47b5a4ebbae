"""Outlier: an array that is embedded up to a limit, with the rest in a collection of its own.

What it guarantees: the embedded part is never longer than the limit; the
count is that of all items; the flag is set if and only if there is overflow;
under `unique=True` no item is stored twice. The array belongs to
`store.array(…)`: plain updates of it are refused, and `replace` keeps the
stored one. How it is written is in `writes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pymongo import IndexModel

from treadle.engine.write_path import WritePath, commit_changes
from treadle.graph.batch import Batch
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.changes import Changes
from treadle.graph.graph import graph_of
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Reads, Rule, Storage
from treadle.patterns.outlier import problems
from treadle.patterns.outlier.handle import ArrayHandle
from treadle.patterns.outlier.stored_array import StoredArray
from treadle.patterns.outlier.writes import Repair
from treadle.plan import Plan, Raw, delete_many, insert_many
from treadle.query.keys import freeze

Layout = Literal["page", "documents"]

LIMIT_MAX = 100_000
PAGE_SIZE_MAX = 100_000


@dataclass(frozen=True)
class Outlier(Pattern):
    """At most `limit` items embedded; the others in the collection `overflow`."""

    pattern: ClassVar[str] = "outlier"
    # An insert may bring the first items.
    read_only: ClassVar[bool] = False

    limit: int
    overflow: str
    page_size: int = 1000
    layout: Layout = "page"
    unique: bool = False
    flag: str | None = None
    count: str | None = None
    owner: str | None = None
    item: str = "item"

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "layout", self.layout, ("page", "documents"))
        check_whole_number(place, "limit", self.limit, LIMIT_MAX)
        check_whole_number(place, "page_size", self.page_size, PAGE_SIZE_MAX)
        return OutlierRule(place, graph, self)


class OutlierRule(StoredArray):
    """An outlier array, as the rest of Treadle calls it."""

    def reads(self) -> Reads:
        return {self.target.collection: set()}

    def owns(self) -> Sequence[Owned]:
        advice = f"; call store.array({self.target.model.__name__}, {self.name!r}, id) instead"
        beside = [Owned(path, advice, initial=value) for path, value in self.beside.items()]
        return [Owned(self.path, advice, insert_may_set=True, initial=[]), *beside]

    def storage(self) -> Storage:
        return Storage(check=self._check_layout)

    def calls(self, write_path: WritePath, id: Any) -> ArrayHandle:
        return ArrayHandle(self, write_path, self.target.ids.encode(id))

    # -- writes of the owner -------------------------------------------------------------------

    def needs_commit(self, batch: Batch | None) -> bool:
        if batch is None or batch.removed:
            return True
        return any(len(self.embedded(raw)) > self.limit for raw in batch.new)

    def before(self, batch: Batch, changes: Changes) -> Plan[None]:
        batch.notes[self] = [page for raw in batch.new for page in self.split(raw)]
        yield from ()

    def after(self, batch: Batch, changes: Changes) -> Plan[None]:
        overflow = self.overflow
        if pages := batch.notes[self]:
            yield from insert_many(overflow.collection_name, pages)
        if removed := [each["_id"] for each in batch.removed]:
            yield from delete_many(overflow.collection_name, {overflow.owner: {"$in": removed}})

    # -- set-up, verify and repair -----------------------------------------------------------------

    def _check_layout(
        self, existing: Mapping[str, Raw], missing: Mapping[str, list[IndexModel]]
    ) -> Plan[None]:
        """Refuse overflow that was stored by another layout."""
        collection = self.overflow.collection_name
        if collection in existing and missing.get(collection):
            yield from problems.require_layout(self)

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        if page is None:
            return (yield from problems.find_orphans(self))
        checked = yield from problems.check_arrays(self, page)
        return [
            self.finding(each.owner["_id"], problem.path, problem.stored, problem.expected)
            for each in checked
            for problem in each.problems
            if problem.is_finding
        ]

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        """Repair the arrays of these documents, in one transaction each, and pack those that are loose."""
        if keys is None:
            yield from problems.delete_orphans(self)
            return []
        # A migration may read any field of an outdated document.
        projection = None if self.target.versions.may_change else self.short_projection()
        images = yield from self.owners.find({"_id": {"$in": list(keys)}}, projection=projection)
        checked = yield from problems.check_arrays(self, [image.document for image in images])
        by_key = {freeze(each.owner["_id"]): each.problems for each in checked}
        changed = []
        for key in keys:
            found = by_key.get(freeze(key))
            if found is None:
                is_changed = yield from problems.delete_orphan(self, key)
            else:
                repair = Repair(self, key).apply
                is_changed = bool(found) and (yield from commit_changes(graph_of(self), repair))
            changed += [key] if is_changed else []
        return changed
