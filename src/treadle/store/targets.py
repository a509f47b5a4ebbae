"""How a group of writes whose transaction conflicts is split."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# The documents that a write may conflict about; empty where that is not known.
Targets: TypeAlias = frozenset[Hashable]


# Into how many parts a group is split at a time. More would make a commit of each write where one of many
# is contended, fewer would let most of them conflict again.
PARTS = 8


def split(items: Sequence[T], targets: Sequence[Targets], *, by_sets: bool = False) -> list[list[T]]:
    """Return the items in parts of about one size that have no target in common.

    Returns one part where there are no such; with `by_sets`, only where all have the same targets.
    """
    groups: list[tuple[Targets, list[T]]] = []
    for item, own in zip(items, targets, strict=True):
        common, members, others = own, [item], list[tuple[Targets, list[T]]]()
        for group in groups:
            if own and (group[0] == own if by_sets else group[0] & own):
                common, members = group[0] | common, [*group[1], *members]
            else:
                others.append(group)
        groups = [*others, (common, members)]
    parts = [list[T]() for _ in groups[:PARTS]]
    for _, members in sorted(groups, key=lambda group: -len(group[1])):
        min(parts, key=len).extend(members)
    return parts
