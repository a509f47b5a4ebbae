"""Parent Reference: each node of a tree holds the id of its parent.

Kept right: the parent exists, and no node is its own ancestor. A move is one
write. Ancestors and descendants are found with `$graphLookup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.patterns.tree.fields import Role
from treadle.patterns.tree.rule import TreePattern


@dataclass(frozen=True)
class ParentReference(TreePattern):
    """A tree whose nodes name their parent in the field `parent`; None is a root."""

    pattern: ClassVar[str] = "parent-reference"

    parent: str

    def roles(self) -> dict[Role, str]:
        return {"parent": self.parent}
