"""Ancestor Array: each node holds its parent and all its ancestors, root first.

Kept right: the parent exists, no node is its own ancestor, and `ancestors` is
the parent's own ancestors and the parent. Descendants are one range of the
index on the array. A move rewrites the arrays of all descendants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.patterns.tree.fields import Role
from treadle.patterns.tree.rule import TreePattern


@dataclass(frozen=True)
class AncestorArray(TreePattern):
    """A tree whose nodes name their parent, and list all ancestors in the field `ancestors`."""

    pattern: ClassVar[str] = "ancestor-array"

    parent: str
    ancestors: str

    def roles(self) -> dict[Role, str]:
        return {"parent": self.parent, "ancestors": self.ancestors}
