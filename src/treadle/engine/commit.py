"""Which way to commit a server has."""

from __future__ import annotations

from treadle.engine.standalone import ByIntents
from treadle.engine.transaction import ByTransaction
from treadle.engine.work import Commit
from treadle.graph.graph import Graph
from treadle.plan.capabilities import Capabilities


def commit_on(graph: Graph, server: Capabilities) -> Commit:
    """Committing by transaction, or by intents where the server has none."""
    return ByTransaction(graph, server) if server.transactions else ByIntents(graph, server)
