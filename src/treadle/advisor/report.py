"""A scan with the findings of the rules, and both as JSON.

The JSON has a version of its own, `SCHEMA`. Keys are added within a version
and never change their meaning; `docs/advisor.md` describes them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from treadle.advisor.decide import Decision, Relationship, decide, link_ends
from treadle.advisor.facts import Bin, CollectionFacts, Distribution, FieldFacts, Relation, Scan
from treadle.advisor.interface import SEVERITIES, Finding, Severity
from treadle.advisor.rules import load

SCHEMA = "treadle-scan/1"


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, what to change, and what is fine."""

    scan: Scan
    findings: tuple[Finding, ...]
    # Rules that failed on these facts: a defect of the rule, reported and not hidden.
    failures: tuple[str, ...] = ()

    @classmethod
    def of(cls, scan: Scan) -> Report:
        findings: list[Finding] = []
        failures: list[str] = []
        for code, (_, find) in load().items():
            try:
                findings += list(find(scan))
            except Exception as error:
                # A rule that fails on odd data must not cost the findings of the others.
                failures.append(f"The rule {code} failed ({type(error).__name__}); please report it.")
        findings.sort(key=_rank)
        return cls(scan, tuple(findings), tuple(failures))

    @property
    def healthy(self) -> list[CollectionFacts]:
        """The collections that were read and have no finding."""
        affected = {name for each in self.findings for name in (each.collection, *each.also)}
        return [facts for facts in self.scan.plain() if facts.name not in affected]

    @property
    def decisions(self) -> list[tuple[Relation, Decision]]:
        """Embed or reference, for each relation that was measured."""
        parents = {relation.parent for relation in self.scan.relations}
        decisions = []
        for relation in self.scan.relations:
            if relation.child != relation.parent:
                child = self.scan.collections[relation.child]
                relationship = Relationship.of(relation, child, relation.child in parents)
                # The two ends of a link document are what is many-to-many.
                if link_ends(self.scan, child) is not None:
                    relationship = replace(relationship, many_to_many=True)
                decisions.append((relation, decide(relationship)))
        return decisions

    def fails(self, severity: Severity) -> bool:
        """Whether there is a finding of this severity or a worse one."""
        least = SEVERITIES.index(severity)
        return any(SEVERITIES.index(each.severity) >= least for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The documented keys, with values that JSON knows."""
        scan = self.scan
        return {
            "schema": SCHEMA,
            "database": scan.database,
            "server_version": ".".join(map(str, scan.version)),
            **_values(scan, "complete", "values_shown"),
            "notes": [*scan.notes, *self.failures],
            "findings": [_finding(each) for each in self.findings],
            "healthy": [facts.name for facts in self.healthy],
            "collections": [_collection(facts) for facts in scan.collections.values()],
            "relations": [_relation(relation) for relation in scan.relations],
            "workload": None
            if scan.workload is None
            else {
                **_values(scan.workload, "source", "operations"),
                "shapes": len(scan.workload.queries),
                **_values(scan.workload, "seconds", "complete"),
            },
        }


def _rank(finding: Finding) -> tuple[int, bool, str, str]:
    """The worst first, then patterns before anti-patterns."""
    severity = SEVERITIES.index(finding.severity)
    return -severity, finding.rule.pattern == "anti-pattern", finding.code, finding.where


def _values(source: object, *names: str) -> dict[str, Any]:
    """The attributes whose names are keys of the JSON; tuples become lists."""
    values = {name: getattr(source, name) for name in names}
    return {name: list(each) if isinstance(each, tuple) else each for name, each in values.items()}


def _finding(each: Finding) -> dict[str, Any]:
    return {
        **_values(each.rule, "code", "pattern"),
        **_values(each, "severity", "confidence", "collection", "also", "path", "summary", "evidence"),
        **_values(each.rule, "remedy", "costs", "gains", "when_not"),
        **_values(each, "declaration", "steps"),
    }


def _collection(facts: CollectionFacts) -> dict[str, Any]:
    return {
        **_values(facts, "name", "kind", "skipped", "notes"),
        "documents": facts.count,
        **_values(facts, "looked_at", "data_bytes", "storage_bytes", "index_bytes"),
        **_values(facts, "capped", "sharded", "validated", "depth"),
        "shapes": len(facts.shapes),
        "sizes": _distribution(facts.sizes),
        "fields": [_field(each) for each in facts.fields.values()],
        "indexes": [
            {
                "name": index.name,
                "keys": [[path, way] for path, way in index.keys],
                **_values(index, "unique", "partial", "expires", "bytes", "uses"),
            }
            for index in facts.indexes
        ],
        "growth": None
        if facts.growth is None
        else {
            "first": facts.growth.first.isoformat(),
            "last": facts.growth.last.isoformat(),
            "documents_per_day": round(facts.growth.per_day, 1),
        },
    }


def _field(each: FieldFacts) -> dict[str, Any]:
    return {
        **_values(each, "path", "types", "looked_at"),
        "share": round(each.share, 6),
        "lengths": _distribution(each.lengths),
        "bytes_max": each.bytes_max,
    }


def _relation(relation: Relation) -> dict[str, Any]:
    return {
        **_values(relation, "child", "path", "parent", "key", "many", "found_by", "references", "orphans"),
        **_values(relation, "checked", "parents", "childless"),
        "children": _distribution(relation.children),
        **_values(relation, "read_together", "child_reads"),
    }


def _distribution(distribution: Distribution | None) -> dict[str, Any] | None:
    if distribution is None:
        return None
    return {
        **_values(distribution, "count", "sampled_of"),
        "min": distribution.minimum,
        "median": distribution.median,
        "mean": round(distribution.mean, 3),
        "p99": distribution.p99,
        "max": distribution.maximum,
        "bins": [[each.low, each.high, each.count] for each in rebin(distribution)],
    }


def rebin(distribution: Distribution) -> list[Bin]:
    """The bins merged into one per doubling: 0, 1, 2–3, 4–7 …"""
    merged: dict[int, Bin] = {}
    for each in distribution.bins:
        place = int(each.low).bit_length()
        before = merged.get(place, Bin(each.low, each.high, 0))
        low, high = min(before.low, each.low), max(before.high, each.high)
        merged[place] = Bin(low, high, before.count + each.count)
    return [merged[place] for place in sorted(merged)]
