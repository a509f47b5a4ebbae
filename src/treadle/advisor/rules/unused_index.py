"""Indexes that every write maintains and no read uses."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declare_without
from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import duration, names, size

RULE = Rule(
    "unused-index",
    "anti-pattern",
    "Unused indexes",
    "The server has counted no use of an index since it began to count.",
    "Hide the index for a while, then drop it.",
    "A query that needed it once a year becomes slow.",
    "Faster writes; less memory and disk.",
    "Not for indexes of yearly jobs, nor where other members of the replica set serve the reads.",
)
DOCUMENTS_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        unused = [index for index in facts.indexes if _is_unused(index, scan.limits.index_age_seconds_min)]
        if facts.count < DOCUMENTS_MIN or not unused:
            continue
        seconds = min(index.counted_seconds or 0 for index in unused)
        yield Finding(
            RULE,
            facts.name,
            "",
            f"{len(unused)} of {len(facts.indexes)} indexes of {facts.name} were not used in "
            f"{duration(seconds)}.",
            {
                "unused indexes": names([index.name for index in unused]),
                "counted for": duration(seconds),
                "size": size(sum(index.bytes or 0 for index in unused)),
                "indexes": len(facts.indexes),
            },
            declare_without(facts, [index.name for index in unused]),
            tuple(
                f"In mongosh: db.getCollection(…).hideIndex(…) for {index.name}, later dropIndex."
                for index in unused[:5]
            ),
            severity="info",
            confidence="high" if seconds > 30 * 86_400 else "medium",
        )


def _is_unused(index: IndexFacts, age_min: float) -> bool:
    """Unique and expiring indexes work without being read."""
    if index.name == "_id_" or index.unique or index.expires or index.uses is None:
        return False
    return index.uses == 0 and (index.counted_seconds or 0) >= age_min
