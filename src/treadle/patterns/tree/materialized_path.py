"""Materialized Path: each node holds its path from the root, `,company,engineering,`.

Kept right: the path is the parent's path and the node's own segment, and no
two nodes share one. Descendants are a range of the index on the path. A move
or a rename rewrites the paths of all descendants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.patterns.tree.fields import Role
from treadle.patterns.tree.rule import TreePattern


@dataclass(frozen=True)
class MaterializedPath(TreePattern):
    """A tree whose nodes hold their whole path; `segment` is the field with a node's own part of it.

    With `parent=` the node holds its parent's id as well. Then children and
    roots are looked up instead of searched, and `repair` can derive the paths.
    """

    pattern: ClassVar[str] = "materialized-path"

    path: str
    segment: str
    parent: str | None = None

    def roles(self) -> dict[Role, str]:
        named: dict[Role, str] = {"path": self.path, "segment": self.segment}
        if self.parent is not None:
            named["parent"] = self.parent
        return named
