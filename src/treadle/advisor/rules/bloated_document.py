"""Documents so large that reading one field reads far too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, python_name, snake_case
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import size

RULE = Rule(
    "bloated-document",
    "anti-pattern",
    "Bloated documents",
    "Most documents are tens of kilobytes, or one comes near the limit of 16 MB.",
    "Keep what is read often in the document, and move the rest to a document of its own with the same id.",
    "A second read where the details are needed.",
    "More documents fit into memory; writes touch less data.",
    "Not where documents are always read and written whole.",
)
MEDIAN_BYTES_MIN = 64_000
MAXIMUM_BYTES_MIN = 4_000_000
PROBLEM_BYTES = 12_000_000


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        sizes = facts.sizes
        if sizes is None or not sizes.count:
            continue
        if sizes.median < MEDIAN_BYTES_MIN and sizes.maximum < MAXIMUM_BYTES_MIN:
            continue
        yield Finding(
            RULE,
            facts.name,
            "",
            f"Half of the documents have {size(sizes.median)} or more; the largest has "
            f"{size(sizes.maximum)} of the 16.8 MB allowed.",
            {
                "documents": sizes.count,
                "size, median": size(sizes.median),
                "size, p99": size(sizes.p99),
                "size, max": size(sizes.maximum),
                "largest, share of the 16 MB limit": f"{100 * sizes.maximum / (16 * 1024 * 1024):.0f} %",
            },
            _declaration(facts),
            ("Copy the heavy fields into the new collection under the same _id, then remove them.",),
            severity="problem" if sizes.maximum >= PROBLEM_BYTES else "warning",
        )


def _declaration(facts: CollectionFacts) -> str:
    source = Source()
    heavy = frozenset(each.name for each in _heavy(facts))
    parent = source.document(facts, without=heavy)
    source.document(
        replace(facts, name=f"{facts.name}_details"),
        only=heavy,
        name=f"{parent}Details",
        collection=python_name(f"{snake_case(facts.name, 'document')}_details", set()),
    )
    return source.text()


def _heavy(facts: CollectionFacts) -> list[FieldFacts]:
    """What probably weighs most: large values, else arrays and objects."""
    fields = facts.top()
    large = [each for each in fields if (each.bytes_mean or 0) >= 4_000 or (each.bytes_max or 0) >= 100_000]
    nested = [each for each in fields if {"array", "object", "binData"} & set(each.types)]
    return large or nested or fields[-1:]
