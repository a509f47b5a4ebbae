"""Indexes that another index contains."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declare_without
from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import names, size

RULE = Rule(
    "redundant-index",
    "anti-pattern",
    "Redundant indexes",
    "An index's keys are the first keys of another one.",
    "Drop the shorter one; the longer one serves the same queries.",
    "Hardly any: the longer index is a little larger to read.",
    "Faster writes; less memory and disk.",
    "Not where the shorter one is unique, partial, or has another collation: then it serves another purpose.",
)


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        pairs = [
            (index, other)
            for index in facts.indexes
            for other in facts.indexes
            if index is not other and _is_contained(index, other)
        ]
        if not pairs:
            continue
        redundant = {index.name: index for index, _ in pairs}
        yield Finding(
            RULE,
            facts.name,
            "",
            f"{names([index.name for index in redundant.values()])}: contained in a longer index.",
            {
                "redundant indexes": names([f"{index.name} in {other.name}" for index, other in pairs]),
                "size": size(sum(index.bytes or 0 for index in redundant.values())),
                "indexes": len(facts.indexes),
            },
            declare_without(facts, redundant),
            tuple(f"In mongosh: dropIndex for {name}." for name in list(redundant)[:5]),
        )


def _is_contained(index: IndexFacts, other: IndexFacts) -> bool:
    if index.name == "_id_" or index.unique or index.partial or index.expires or index.special:
        return False
    if other.partial or other.special or index.collation_strength != other.collation_strength:
        return False
    # No query uses the longer one.
    if other.hidden and not index.hidden:
        return False
    length = len(index.keys)
    if length > len(other.keys) or (length == len(other.keys) and index.name <= other.name):
        return False
    # The server also walks an index backwards, which reverses all directions.
    first = other.keys[:length]
    return index.keys in (first, tuple((name, -way) for name, way in first))
