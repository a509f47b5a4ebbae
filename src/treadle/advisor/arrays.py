"""What the lengths of an array say; shared by the rules on arrays, so that each array is theirs only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan

DOCUMENTS_MIN = 20
OUTLIER_LENGTH_MIN = 1_000
OUTLIER_TIMES = 100
LONG_LENGTH_MIN = 50
HUGE_LENGTH_MIN = 1_000

Verdict = Literal["outlier", "long", "huge"]


def arrays(scan: Scan) -> Iterator[tuple[CollectionFacts, FieldFacts]]:
    for facts in scan.plain():
        for each in facts.fields.values():
            if each.lengths is not None and each.lengths.count:
                yield facts, each


def holds_objects(facts: CollectionFacts, array: FieldFacts) -> bool:
    inside = facts.fields.get(array.path + "[]")
    return inside is not None and inside.type == "object"


def verdict(facts: CollectionFacts, array: FieldFacts) -> Verdict | None:
    """A few giants among many small ones, long as a rule, or just too long."""
    lengths = array.lengths
    if lengths is None:
        return None
    largest, median = lengths.maximum, lengths.median
    if (
        lengths.count >= DOCUMENTS_MIN
        and largest >= OUTLIER_LENGTH_MIN
        and largest >= OUTLIER_TIMES * max(median, 1)
        and lengths.p99 <= largest / 10
    ):
        return "outlier"
    is_long = lengths.quantile(0.5) >= LONG_LENGTH_MIN or lengths.quantile(0.9) >= 2 * LONG_LENGTH_MIN
    if lengths.count >= DOCUMENTS_MIN and is_long and holds_objects(facts, array):
        return "long"
    return "huge" if largest >= HUGE_LENGTH_MIN else None
