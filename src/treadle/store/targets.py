"""How a group of writes whose transaction conflicts is split."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# The documents that a write may conflict about; empty where that is not known.
Targets: TypeAlias = frozenset[Hashable]


def split(items: Sequence[T], targets: Sequence[Targets], *, by_sets: bool = False) -> list[list[T]]:
    """Return the items in two parts, about halves, that have no target in common.

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
    parts: tuple[list[T], list[T]] = [], []
    # The largest first, so that the other part is empty only if there is one group.
    for _, members in sorted(groups, key=lambda group: -len(group[1])):
        parts[2 * len(parts[0]) >= len(items)].extend(members)
    return [part for part in parts if part]
