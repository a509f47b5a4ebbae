"""Outlier: an array that is embedded up to a limit, and goes on in a collection of its own.

What it keeps right: the embedded part is never longer than the limit; the
count is that of all items; the flag is set if and only if there is overflow;
under `unique=True` no item is there twice. The array belongs to
`store.array(…)`: plain updates of it are refused, and `replace` keeps the
stored one.

An ordinary document is appended to by one update whose own filter holds the
limit. Whatever touches the overflow writes the owner in the same transaction,
so that two writers of one array always meet. How it is done is in `writes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pymongo import IndexModel

from treadle.engine.write_path import WritePath
from treadle.graph.batch import Batch
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.changes import Changes
from treadle.graph.graph import graph_of
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Reads, Rule, Storage
from treadle.patterns.outlier import inspection
from treadle.patterns.outlier.fields import OutlierFields
from treadle.patterns.outlier.handle import ArrayHandle
from treadle.plan import Plan, Raw, delete_many, insert_many, server_facts

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


class OutlierRule(OutlierFields):
    """An outlier array, as the rest of Treadle asks for it."""

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
        if overflow := batch.notes[self]:
            yield from insert_many(self.overflow_collection, overflow)
        if removed := [each["_id"] for each in batch.removed]:
            yield from delete_many(self.overflow_collection, {self.owner: {"$in": removed}})

    # -- set-up, proof and repair -----------------------------------------------------------------

    def _check_layout(
        self, existing: Mapping[str, Raw], missing: Mapping[str, list[IndexModel]]
    ) -> Plan[None]:
        """Refuse overflow that was stored by another layout."""
        if self.overflow_collection in existing and missing.get(self.overflow_collection):
            yield from inspection.require_layout(self)

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        return inspection.orphans(self) if page is None else inspection.examine(self, page)

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if keys is not None:
            return (yield from inspection.mend(graph_of(self), (yield from server_facts()), self, keys))
        yield from inspection.remove_orphans(self)
        return []
