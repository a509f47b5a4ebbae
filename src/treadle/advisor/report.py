"""A scan with what the rules made of it; as rich text and as JSON.

The JSON has a version of its own, `SCHEMA`. Keys are added within a version
and never change their meaning; `docs/advisor.md` describes them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.advisor.decide import Decision, Relationship, decide
from treadle.advisor.facts import CollectionFacts, Distribution, FieldFacts, Relation, Scan
from treadle.advisor.rule import SEVERITIES, Finding, Severity
from treadle.advisor.rules import load
from treadle.advisor.wording import duration, number, plural, share

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "treadle-scan/1"
_STYLES = {"info": "cyan", "warning": "yellow", "problem": "bold red"}
_BEFORE = {"problem": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, what is to be changed, and what is fine."""

    scan: Scan
    findings: tuple[Finding, ...]
    # Rules that failed on these facts: a defect of the rule, said and not hidden.
    failures: tuple[str, ...] = ()

    @classmethod
    def of(cls, scan: Scan) -> Report:
        findings: list[Finding] = []
        failures: list[str] = []
        for code, (_, find) in load().items():
            try:
                findings += list(find(scan))
            except Exception as error:
                # A rule that stumbles over odd data must not take the other findings with it.
                failures.append(f"The rule {code} failed ({type(error).__name__}); please report it.")
        findings.sort(
            key=lambda each: (
                _BEFORE[each.severity],
                each.rule.pattern == "anti-pattern",
                each.code,
                each.where,
            )
        )
        return cls(scan, tuple(findings), tuple(failures))

    @property
    def healthy(self) -> list[CollectionFacts]:
        """The collections that were looked into and have no finding."""
        named = {name for each in self.findings for name in (each.collection, *each.also)}
        return [facts for facts in self.scan.plain() if facts.name not in named]

    @property
    def decisions(self) -> list[tuple[Relation, Decision]]:
        """Embed or reference, for each relation that was measured."""
        parents = {relation.parent for relation in self.scan.relations}
        return [
            (
                relation,
                decide(
                    Relationship.measured(
                        relation, self.scan.collections[relation.child], relation.child in parents
                    )
                ),
            )
            for relation in self.scan.relations
            if relation.child != relation.parent
        ]

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
            "complete": scan.complete,
            "values_shown": scan.values_shown,
            "notes": [*scan.notes, *self.failures],
            "findings": [_finding(each) for each in self.findings],
            "healthy": [facts.name for facts in self.healthy],
            "collections": [_collection(facts) for facts in scan.collections.values()],
            "relations": [_relation(relation) for relation in scan.relations],
            "workload": None
            if scan.workload is None
            else {
                "source": scan.workload.source,
                "operations": scan.workload.operations,
                "shapes": len(scan.workload.queries),
                "seconds": scan.workload.seconds,
                "complete": scan.workload.complete,
            },
        }


def _finding(each: Finding) -> dict[str, Any]:
    return {
        "code": each.code,
        "pattern": each.rule.pattern,
        "severity": each.severity,
        "confidence": each.confidence,
        "collection": each.collection,
        "also": list(each.also),
        "path": each.path,
        "summary": each.summary,
        "evidence": dict(each.evidence),
        "remedy": each.rule.remedy,
        "costs": each.rule.costs,
        "gains": each.rule.gains,
        "when_not": each.rule.when_not,
        "declaration": each.declaration,
        "steps": list(each.steps),
    }


def _collection(facts: CollectionFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "kind": facts.kind,
        "skipped": facts.skipped,
        "notes": list(facts.notes),
        "documents": facts.count,
        "looked_at": facts.looked_at,
        "data_bytes": facts.data_bytes,
        "storage_bytes": facts.storage_bytes,
        "index_bytes": facts.index_bytes,
        "capped": facts.capped,
        "sharded": facts.sharded,
        "validated": facts.validated,
        "depth": facts.depth,
        "shapes": len(facts.shapes),
        "sizes": _distribution(facts.sizes),
        "fields": [_field(each) for each in facts.fields.values()],
        "indexes": [
            {
                "name": index.name,
                "keys": [[path, way] for path, way in index.keys],
                "unique": index.unique,
                "partial": index.partial,
                "expires": index.expires,
                "bytes": index.bytes,
                "uses": index.uses,
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
        "path": each.path,
        "types": dict(each.types),
        "looked_at": each.looked_at,
        "share": round(each.share, 6),
        "lengths": _distribution(each.lengths),
        "bytes_max": each.bytes_max,
    }


def _relation(relation: Relation) -> dict[str, Any]:
    return {
        "child": relation.child,
        "path": relation.path,
        "parent": relation.parent,
        "key": relation.key,
        "many": relation.many,
        "found_by": relation.found_by,
        "references": relation.references,
        "orphans": relation.orphans,
        "checked": relation.checked,
        "parents": relation.parents,
        "childless": relation.childless,
        "children": _distribution(relation.children),
        "read_together": relation.read_together,
        "child_reads": relation.child_reads,
    }


def _distribution(found: Distribution | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "count": found.count,
        "sampled_of": found.sampled_of,
        "min": found.minimum,
        "median": found.median,
        "mean": round(found.mean, 3),
        "p99": found.p99,
        "max": found.maximum,
        "bins": [[each.low, each.high, each.count] for each in rebinned(found)],
    }


def rebinned(found: Distribution) -> list[Any]:
    """The bins joined to one per doubling: 0, 1, 2–3, 4–7 …"""
    joined: dict[int, list[float]] = {}
    for each in found.bins:
        place = int(each.low).bit_length()
        row = joined.setdefault(place, [each.low, each.high, 0])
        row[0], row[1], row[2] = min(row[0], each.low), max(row[1], each.high), row[2] + each.count
    kind = type(found.bins[0]) if found.bins else None
    return [] if kind is None else [kind(low, high, int(n)) for _, (low, high, n) in sorted(joined.items())]


# -- rich text ---------------------------------------------------------------------------


def printable(text: str) -> str:
    """Text from a database, without control characters that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show(report: Report, console: Console, declarations: bool = True) -> None:
    """Print the report."""
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text

    scan = report.scan
    documents = sum(facts.count for facts in scan.collections.values())
    console.print(
        Text(
            f"{printable(scan.database)}: {plural(len(scan.names), 'collection')}, "
            f"{plural(documents, 'document')}, "
            f"{plural(len(scan.relations), 'relation')}, workload {_workload(scan)}"
        )
    )
    for note in (*scan.notes, *report.failures):
        console.print(Text(note, style="yellow"))
    if report.findings:
        table = Table("finding", "where", "severity", "confidence", "evidence")
        for each in report.findings:
            style = _STYLES[each.severity]
            table.add_row(
                each.code,
                Text(printable(each.where)),
                Text(each.severity, style=style),
                each.confidence,
                Text(printable(each.summary)),
            )
        console.print(table)
    for number_, each in enumerate(report.findings, 1):
        if declarations:
            console.print()
            console.rule(Text(f"{number_}. {each.rule.title}: {printable(each.where)}"), align="left")
            _show_finding(each, console, Syntax)
    _show_rest(report, console)


def _workload(scan: Scan) -> str:
    if scan.workload is None:
        return "not seen (turn on the profiler, or give --workload)"
    return f"of {plural(scan.workload.operations, 'operation')} over {duration(scan.workload.seconds)}"


def _show_finding(each: Finding, console: Console, syntax: Any) -> None:
    from rich.text import Text

    console.print(Text(printable(each.summary)))
    for name, value in each.evidence.items():
        shown = number(value) if isinstance(value, (int, float)) else printable(value)
        console.print(Text(f"  {printable(name)}: {shown}"))
    console.print(Text(f"Do: {each.rule.remedy}"))
    console.print(Text(f"Costs: {each.rule.costs} Gains: {each.rule.gains}"))
    console.print(Text(f"When not: {each.rule.when_not}"))
    for step in each.steps:
        console.print(Text(f"Then: {printable(step)}"))
    # Unwrapped, so that what is copied from the terminal is still Python.
    console.print(
        syntax(each.declaration, "python", theme="ansi_light").highlight(each.declaration), soft_wrap=True
    )


def _show_rest(report: Report, console: Console) -> None:
    from rich.text import Text

    healthy = report.healthy
    if not report.findings:
        console.print("Nothing to change was found.")
    if healthy:
        console.print(Text("Healthy: " + ", ".join(printable(facts.name) for facts in healthy)))
    for facts in report.scan.collections.values():
        said = [facts.skipped] if facts.skipped else list(facts.notes)
        if said:
            console.print(Text(f"{printable(facts.name)}: {printable('; '.join(said))}", style="dim"))


def show_decisions(report: Report, console: Console) -> None:
    """Embed or reference for each measured relation, with the way that led there."""
    from rich.text import Text

    if not report.decisions:
        console.print("No relation between two collections was found.")
    for relation, decision in report.decisions:
        console.print(
            Text(
                f"{printable(relation.child)}.{printable(relation.path)} to "
                f"{printable(relation.parent)}: {decision.advice}",
                style="bold",
            )
        )
        for answer in decision.path:
            console.print(Text(f"  {answer.question} {answer.answer}"))
        for factor in decision.factors:
            console.print(Text(f"  {factor}", style="dim"))
        console.print(
            Text(
                f"  children per parent: {number(relation.children.minimum)} to "
                f"{number(relation.children.maximum)}, "
                f"median {number(relation.children.median)}; orphans "
                f"{share(relation.orphans, relation.checked)}"
                f"; {share(relation.childless, relation.parents)} of the parents have none",
                style="dim",
            )
        )
