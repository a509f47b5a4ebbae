"""One page of a backfill: what the worker does where events were lost, or a rule is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.engine.contention import in_pieces
from treadle.engine.groups import differing
from treadle.engine.older import as_current, may_be_older
from treadle.engine.pages import page, readable_page
from treadle.engine.set_aside import set_aside
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import outermost
from treadle.upkeep import contributions
from treadle.upkeep.events import Watch
from treadle.upkeep.rebuild import mend
from treadle.upkeep.verify import examine_each


class Backfill:
    """The documents of a collection, page by page."""

    def __init__(
        self, graph: Graph, server: Capabilities, watch: Watch, count: Callable[[str, int], None]
    ) -> None:
        self.graph = graph
        self.limits = graph.limits
        self.server = server
        self.watch = watch
        self._count = count

    def fill_ledger(self, entry: Entry[Any], last: list[Any] | None) -> Plan[list[Any] | None]:
        """Note what a page of sources feeds; the id of the last one, in a list, or None at the end."""
        rules = [rule for rule in self.watch.ledgered if rule.source.collection == entry.collection]
        projection = dict.fromkeys(outermost({"_id"}.union(*(rule.key.paths for rule in rules))), 1)
        if may_be_older(entry.root):
            projection = {}
        reading = page(entry, last, self.limits.contributions_page, projection, whole=True)
        documents, reached = yield from readable_page(entry.model.__name__, reading, last)

        def attempt(some: Sequence[Raw]) -> Plan[list[None]]:
            yield from contributions.record(entry, rules, (yield from as_current(entry.root, some)))
            return []

        def alone(document: Raw, error: Exception) -> Plan[list[None]]:
            yield from set_aside(entry.model.__name__, entry.collection, document["_id"], error)
            return []

        yield from in_pieces(self.limits, documents, attempt, alone)
        return reached

    def verify(self, entry: Entry[Any], last: list[Any] | None) -> Plan[list[Any] | None]:
        """Verify and mend a page of documents; the id of the last one, in a list, or None at the end."""
        reading = page(entry, last, self.limits.worker_resync_page, whole=True)
        documents, reached = yield from readable_page(entry.model.__name__, reading, last)
        for exact, own in entry.by_class(documents):
            yield from self._verify_class(exact, own)
        self._count("verified", len(documents))
        if reached is None and entry.group is not None:
            # Groups without a document, which no page of documents shows.
            mended = yield from mend(self.graph, self.server, entry, (yield from differing(entry)))
            self._count("mended", len(mended))
        return reached

    def _verify_class(self, entry: Entry[Any], documents: list[Raw]) -> Plan[None]:
        findings = yield from examine_each(self.server, entry, documents)
        wrong = {freeze(each.document_id) for each in findings}
        keys = [entry.key_of(each) for each in documents if freeze(each["_id"]) in wrong]
        self._count("mended", len((yield from mend(self.graph, self.server, entry, keys))))
