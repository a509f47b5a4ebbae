"""What the lengths of an array mean; shared by the rules on arrays, so that only one of them claims it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from treadle.advisor.facts import WHOLE, CollectionFacts, Distribution, FieldFacts, Scan
from treadle.advisor.naming import last_word, words

DOCUMENTS_MIN = 20
OUTLIER_LENGTH_MIN = 1_000
OUTLIER_TIMES = 100
LONG_LENGTH_MIN = 50
HUGE_LENGTH_MIN = 1_000

# A page or bucket is bounded on purpose; a longer array is none.
PAGE_LENGTH_MAX = 10_000
FIRST = frozenset({"start", "first", "from", "begin", "min", "oldest"})
LAST = frozenset({"end", "last", "to", "until", "max", "newest"})
_COUNTS = frozenset({"count", "n", "size", "number", "nsamples", "samples", "length"})

Verdict = Literal["outlier", "long", "huge", "page"]


def arrays(scan: Scan) -> Iterator[tuple[CollectionFacts, FieldFacts, Distribution]]:
    """The arrays that were measured, with their lengths."""
    for facts in scan.plain():
        for each in facts.fields.values():
            if each.lengths is not None and each.lengths.count:
                yield facts, each, each.lengths


def _is_page(facts: CollectionFacts, array: FieldFacts, lengths: Distribution) -> bool:
    """Whether the documents are pages or buckets: bounded parts of something longer.

    Such a document is one of many with the same owner, told apart by a number
    or a time: a unique index says so, or a count and a time beside an array
    that never grows beyond what most of them have.
    """
    if len(array.steps) > 1 or lengths.maximum > PAGE_LENGTH_MAX:
        return False
    fields = facts.top()
    ordinals = {
        each.path for each in fields if each.value_types and set(each.value_types) <= {*WHOLE, "date"}
    }
    for index in facts.indexes:
        if index.unique and len(index.keys) > 1 and set(index.fields[1:]) <= ordinals:
            return True
    common = [each for each in fields if each.share > 0.99]
    has_count = any(last_word(each.name) in _COUNTS for each in common)
    has_time = any(set(each.value_types) == {"date"} for each in common)
    if (
        has_count
        and any(_is_end(each, FIRST) for each in common)
        and any(_is_end(each, LAST) for each in common)
    ):
        # From when to when, and how many: that is a bucket, however full it is.
        return True
    return has_count and has_time and lengths.quantile(0.9) == lengths.maximum


def _is_end(each: FieldFacts, names: frozenset[str]) -> bool:
    return set(each.value_types) == {"date"} and bool(names & set(words(each.name)))


def common_maximum(lengths: Distribution) -> float:
    """What nearly all do not exceed: the 99th percentile, or of fewer than a hundred, all but one."""
    return lengths.quantile(min(0.99, (lengths.count - 1) / max(1, lengths.count)))


def verdict(facts: CollectionFacts, array: FieldFacts, lengths: Distribution) -> Verdict | None:
    """A few giants among many small ones, long in general, just too long, or bounded on purpose."""
    huge: Verdict | None = "huge" if lengths.maximum >= HUGE_LENGTH_MIN else None
    if array.in_array:
        return huge
    if _is_page(facts, array, lengths):
        return "page"
    if lengths.count < DOCUMENTS_MIN:
        return huge
    if (
        lengths.maximum >= OUTLIER_LENGTH_MIN
        and lengths.maximum >= OUTLIER_TIMES * max(lengths.median, 1)
        and common_maximum(lengths) <= lengths.maximum / 10
    ):
        return "outlier"
    items = facts.fields.get(array.path + "[]")
    is_long = lengths.median >= LONG_LENGTH_MIN or lengths.quantile(0.9) >= 2 * LONG_LENGTH_MIN
    return "long" if is_long and items is not None and items.type == "object" else huge
