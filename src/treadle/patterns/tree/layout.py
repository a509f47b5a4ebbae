"""The calls on a tree: bulk loads insert parents before children."""

from __future__ import annotations

from typing import Any, TypeVar

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.inserts import Insert
from treadle.model.document import Document
from treadle.patterns.tree.bulk import in_pieces
from treadle.patterns.tree.fields import TreeRule
from treadle.plan import Plan

D = TypeVar("D", bound=Document)


class TreeLayout(DocumentLayout[D]):
    """Nodes one by one."""

    inserts_apart = True

    def __init__(self, rule: TreeRule, default: DocumentLayout[D]) -> None:
        super().__init__(default.entry, default.write_path)
        self._rule = rule

    def _inserts(self, documents: list[D]) -> Plan[list[Insert[Any]]]:
        pieces = yield from in_pieces(self._rule.tree, documents, self.entry.limits.insert_max)
        return [Insert(self.entry, piece, {self._rule: given}) for piece, given in pieces]
