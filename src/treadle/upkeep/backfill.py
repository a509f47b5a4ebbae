"""One page of a backfill: what the worker does where events were lost, or a rule is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.engine.pages import projection_of
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.upkeep.groups import differing
from treadle.upkeep.rebuild import repair_documents
from treadle.upkeep.verify import examine_each

# Documents at a time where events were lost.
WORKER_RESYNC_PAGE = 200


class Backfill:
    """The documents of a collection, page by page."""

    def __init__(self, graph: Graph, server: Capabilities, count: Callable[[str, int], None]) -> None:
        self.graph = graph
        self.server = server
        self._count = count

    def verify(self, entry: ModelEntry, last: list[Any] | None) -> Plan[list[Any] | None]:
        """Verify and repair a page of documents. Returns the id of the last one, in a list, or None."""
        # Deleted documents too: their histories are maintained.
        scope = entry.kinds.root.targets.with_deleted
        page = yield from scope.page(last, WORKER_RESYNC_PAGE, projection=projection_of(entry))
        documents, reached = [image.document for image in page.images], page.last
        for exact, own in entry.kinds.split(documents):
            yield from self._verify_class(exact, own)
        self._count("verified", len(documents))
        if reached is None and entry.rules.group is not None:
            # Groups without a document, which no page of documents shows.
            repaired = yield from repair_documents(
                self.graph, self.server, entry, (yield from differing(entry))
            )
            self._count("repaired", len(repaired))
        return reached

    def _verify_class(self, entry: ModelEntry, documents: list[Raw]) -> Plan[None]:
        findings = yield from examine_each(self.server, entry, documents)
        wrong = {freeze(each.document_id) for each in findings}
        keys = [entry.key_of(each) for each in documents if freeze(each["_id"]) in wrong]
        self._count("repaired", len((yield from repair_documents(self.graph, self.server, entry, keys))))
