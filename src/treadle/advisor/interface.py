"""What a rule is, and what it finds.

A rule is a file in `rules/` with a `RULE` and a function `find`: facts in,
findings out, nothing else. It says nothing where it has no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from treadle.advisor.facts import Distribution, Query, Relation, Scan
from treadle.advisor.proposals import Draft
from treadle.advisor.wording import number

Severity = Literal["info", "warning", "problem"]
Confidence = Literal["low", "medium", "high"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "problem")
NOTHING_PROPOSED = Draft()
# Numbers, and names of collections, fields and indexes; never values.
Evidence = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Rule:
    """What `treadle explain` prints for a code."""

    code: str
    # The pattern that answers the symptom, or "anti-pattern".
    pattern: str
    title: str
    symptom: str
    remedy: str
    costs: str
    gains: str
    when_not: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One symptom in one place, with the numbers that show it."""

    rule: Rule
    collection: str
    path: str
    summary: str
    evidence: Evidence
    declaration: str
    steps: tuple[str, ...] = ()
    # Other collections that it is about too.
    also: tuple[str, ...] = ()
    severity: Severity = "warning"
    confidence: Confidence = "high"
    # The same as `declaration`, as data: where a plan can apply it, or other proposals go with it.
    draft: Draft = NOTHING_PROPOSED

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def where(self) -> str:
        return f"{self.collection}.{self.path}" if self.path else self.collection

    @property
    def key(self) -> str:
        """How `--only` and a plan name it: `computed@reviews.product_id`."""
        return f"{self.code}@{self.where}"


Find = Callable[[Scan], Iterator[Finding]]


def length_evidence(lengths: Distribution) -> Evidence:
    return {
        "documents": lengths.count,
        "items, median": lengths.median,
        "items, p99": lengths.p99,
        "items, max": lengths.maximum,
    }


def children_evidence(relation: Relation) -> Evidence:
    return {
        "children per parent, median": relation.children.median,
        "children per parent, max": relation.children.maximum,
    }


def query_evidence(queries: Sequence[Query]) -> Evidence:
    count = sum(query.count for query in queries)
    return {
        "queries": count,
        "documents examined per query": number(sum(query.examined for query in queries) / count),
        "documents returned per query": number(sum(query.returned for query in queries) / count),
        "milliseconds per query": round(sum(query.milliseconds for query in queries) / count, 1),
    }
