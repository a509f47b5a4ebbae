"""Child References: each node of a tree holds the ids of its children, in their order.

Kept right: a node is in one list at most, each listed child exists, and no
node is its own descendant. The lists are the truth: a node that is in none is
a root. A list lives in its node's document, which MongoDB bounds to 16 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.patterns.tree.fields import Role
from treadle.patterns.tree.rule import TreePattern


@dataclass(frozen=True)
class ChildReferences(TreePattern):
    """A tree whose nodes list their children in the field `children`."""

    pattern: ClassVar[str] = "child-references"

    children: str

    def roles(self) -> dict[Role, str]:
        return {"children": self.children}
