"""What a rule is, and what it finds.

A rule is a file in `rules/` with a `RULE` and a function `find`: facts in,
findings out, nothing else. It says nothing where it has no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from treadle.advisor.facts import Scan

Severity = Literal["info", "warning", "problem"]
Confidence = Literal["low", "medium", "high"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "problem")


@dataclass(frozen=True, slots=True)
class Rule:
    """What `treadle explain` tells about a code."""

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
    severity: Severity
    confidence: Confidence
    collection: str
    path: str
    summary: str
    # Numbers, and names of collections, fields and indexes; never values.
    evidence: Mapping[str, str | int | float]
    declaration: str
    steps: tuple[str, ...] = field(default=())
    # Other collections that it is about too.
    also: tuple[str, ...] = field(default=())

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def where(self) -> str:
        return f"{self.collection}.{self.path}" if self.path else self.collection


Find = Callable[[Scan], Iterator[Finding]]
