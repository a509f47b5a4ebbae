"""Parent Reference: each node of a tree holds the id of its parent.

Kept right: the parent exists, and no node is its own ancestor. A move is one
write. Ancestors and descendants are found with `$graphLookup`. The logic that
all trees share is in `treadle/trees/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.patterns.tree.fields import Role
from treadle.patterns.tree.rule import NodeRule, TreePattern


class ParentReferenceRule(NodeRule):
    """Parents that exist, and no circles."""

    pattern = "parent-reference"


@dataclass(frozen=True)
class ParentReference(TreePattern):
    """A tree whose nodes name their parent in the field `parent`; None is a root."""

    pattern: ClassVar[str] = "parent-reference"
    rule: ClassVar[type[NodeRule]] = ParentReferenceRule

    parent: str

    def roles(self) -> dict[Role, str]:
        return {"parent": self.parent}
