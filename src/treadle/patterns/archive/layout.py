"""The calls on a model with an archive: a write of one archived document restores it first, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.write_path import ATTEMPTS_MAX
from treadle.errors import DataError
from treadle.graph.write import Selector, Write
from treadle.model.document import Document
from treadle.patterns.archive.moves import ArchiveMoves
from treadle.plan import Plan

D = TypeVar("D", bound=Document)
R = TypeVar("R")


class ArchiveLayout(DocumentLayout[D]):
    """Documents one by one, in a collection and its archive."""

    def __init__(self, rule: ArchiveMoves, default: DocumentLayout[D]) -> None:
        super().__init__(default.entry, default.write_path)
        self._rule = rule

    def _execute(self, make: Callable[[], Write[R]]) -> Plan[R]:
        """Execute a write of one document; if it is archived, again after it was restored."""
        write = make()
        for _ in range(ATTEMPTS_MAX):
            try:
                outcome = yield from self.write_path.execute(write)
            except DataError as error:
                if error.code != "document-gone" or not (yield from self.bring_back(write.selector)):
                    raise
            else:
                if outcome is not None or not (yield from self.bring_back(write.selector)):
                    return outcome
            write = make()
        return (yield from self.write_path.execute(write))

    def bring_back(self, selector: Selector) -> Plan[bool]:
        return self._rule.restore_for_write(selector.filter)

    def restore(self, identity: Any) -> Plan[D | None]:
        yield from self.write_path.index_check.require([self.entry])
        document: D | None = yield from self._rule.restore(self.write_path, identity)
        if document is not None or self.entry.paths.deletion is None:
            return document
        return (yield from super().restore(identity))
