"""What the lengths of an array say; shared by the rules on arrays, so that each array is theirs only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from treadle.advisor.facts import WHOLE, CollectionFacts, Distribution, FieldFacts, Scan
from treadle.advisor.relations import words

DOCUMENTS_MIN = 20
OUTLIER_LENGTH_MIN = 1_000
OUTLIER_TIMES = 100
LONG_LENGTH_MIN = 50
HUGE_LENGTH_MIN = 1_000

# A page or bucket is bounded on purpose; more than this is none.
PAGE_LENGTH_MAX = 10_000
_COUNTS = frozenset({"count", "n", "size", "number", "nsamples", "samples", "length"})

Verdict = Literal["outlier", "long", "huge", "page"]


def arrays(scan: Scan) -> Iterator[tuple[CollectionFacts, FieldFacts]]:
    for facts in scan.plain():
        for each in facts.fields.values():
            if each.lengths is not None and each.lengths.count:
                yield facts, each


def holds_objects(facts: CollectionFacts, array: FieldFacts) -> bool:
    inside = facts.fields.get(array.path + "[]")
    return inside is not None and inside.type == "object"


def is_page(facts: CollectionFacts, array: FieldFacts) -> bool:
    """Whether the documents are pages or buckets: parts of something longer, and bounded.

    Such a document is one of many of its owner, told apart by a number or a
    time: a unique index says so, or a count and a time beside an array that
    never grows beyond what most of them have.
    """
    lengths = array.lengths
    if lengths is None or len(array.steps) > 1 or lengths.maximum > PAGE_LENGTH_MAX:
        return False
    telling = {each.path for each in facts.top() if set(each.filled) and set(each.filled) <= {*WHOLE, "date"}}
    for index in facts.indexes:
        if index.unique and len(index.keys) > 1 and set(index.fields[1:]) <= telling:
            return True
    fields = [each for each in facts.top() if each.share > 0.99]
    counted = any(words(each.name)[-1:] and words(each.name)[-1] in _COUNTS for each in fields)
    timed = any(set(each.filled) == {"date"} for each in fields)
    return counted and timed and lengths.quantile(0.9) == lengths.maximum


def usual_most(lengths: Distribution) -> float:
    """What nearly all do not exceed: the 99th percentile, or of fewer than a hundred, all but one."""
    return lengths.quantile(min(0.99, (lengths.count - 1) / max(1, lengths.count)))


def verdict(facts: CollectionFacts, array: FieldFacts) -> Verdict | None:
    """A few giants among many small ones, long as a rule, just too long, or bounded on purpose."""
    lengths = array.lengths
    if lengths is None:
        return None
    largest, median = lengths.maximum, lengths.median
    if array.in_array:
        return "huge" if largest >= HUGE_LENGTH_MIN else None
    if is_page(facts, array):
        return "page"
    if (
        lengths.count >= DOCUMENTS_MIN
        and largest >= OUTLIER_LENGTH_MIN
        and largest >= OUTLIER_TIMES * max(median, 1)
        and usual_most(lengths) <= largest / 10
    ):
        return "outlier"
    is_long = lengths.quantile(0.5) >= LONG_LENGTH_MIN or lengths.quantile(0.9) >= 2 * LONG_LENGTH_MIN
    if lengths.count >= DOCUMENTS_MIN and is_long and holds_objects(facts, array):
        return "long"
    return "huge" if largest >= HUGE_LENGTH_MIN else None
