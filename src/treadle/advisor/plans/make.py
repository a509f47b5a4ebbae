"""From a trial to a plan: which findings, in which steps, how long, and how to take each back.

A finding goes into the plan if the trial says "do" and if it can be applied
beside writers that do not know of it (`kinds.py`). Everything else is named,
with the reason and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding
from treadle.advisor.plans import kinds
from treadle.advisor.plans.folder import ByApplication, ChangePlan, LeftOut, Step
from treadle.advisor.plans.models import Combined, combine, load_models
from treadle.advisor.report import Report
from treadle.advisor.trials.results import TrialReport
from treadle.advisor.wording import names
from treadle.engine.indexes import compare_indexes, maintenance_indexes
from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.upkeep.rebuild import in_order

# Where a trial does not say how long the change takes.
DOCUMENTS_PER_SECOND = 2_000
INDEX_WEIGHT = 0.05


def make(report: Report, trial: TrialReport, *, identity: str, made: str) -> ChangePlan:
    """The plan for what the trial supports; raises where that is nothing."""
    chosen = _chosen(report, trial)
    combined = combine(report.scan, chosen.measured)
    left_out = [*chosen.left_out, *(LeftOut(each.key, reason) for each, reason in combined.left_out)]
    if not combined.findings:
        reasons = "".join(f"\n  {each.key}: {each.reason}" for each in left_out)
        reasons += "".join(
            f"\n  {each.key}: for the application. {each.why}" for each in chosen.by_application
        )
        raise DataError(
            f"The trial supports no finding on {report.scan.database}, so there is nothing to plan.{reasons}",
            code="plan-empty",
        )
    return ChangePlan(
        id=identity,
        made=made,
        database=report.scan.database,
        findings=tuple(each.key for each in combined.findings),
        left_out=tuple(left_out),
        places=combined.places,
        steps=tuple(_steps(report.scan, combined, trial)),
        trial=trial,
        models=combined.text,
        by_application=tuple(chosen.by_application),
    )


@dataclass(slots=True)
class _Chosen:
    """What becomes of each finding."""

    measured: list[Finding] = field(default_factory=list)
    by_application: list[ByApplication] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def _chosen(report: Report, trial: TrialReport) -> _Chosen:
    results = {each.key: each for each in trial.results}
    chosen = _Chosen()
    for finding in report.findings:
        key = finding.key
        result = results.get(key)
        if result is None:
            chosen.left_out.append(LeftOut(key, kinds.NOT_TRIED))
        elif finding.code in kinds.BY_APPLICATION:
            why = kinds.BY_APPLICATION[finding.code]
            chosen.by_application.append(ByApplication(key, why, finding.steps, finding.declaration))
        elif result.verdict == "do":
            chosen.measured.append(finding)
        else:
            chosen.left_out.append(LeftOut(key, result.reason))
    return chosen


# -- steps ---------------------------------------------------------------------------------


def _steps(scan: Scan, combined: Combined, trial: TrialReport) -> list[Step]:
    graph = Graph(load_models(combined.text))
    indexes = {entry.collection: _missing(scan, graph, entry) for entry in graph.entries.values()}
    changed = {each.collection for each in combined.places}
    filled = [
        entry
        for entry in in_order(graph.entries.values())
        if entry.collection in scan.collections and entry.collection in changed
    ]
    counts = {name: scan.collections[name].count for name in indexes if name in scan.collections}
    indexed = sum(counts.get(name, 0) * len(made) for name, made in indexes.items())
    weight = INDEX_WEIGHT * indexed + sum(counts[entry.collection] for entry in filled)
    keys = {each.key for each in combined.findings}
    whole = sum(each.change_seconds for each in trial.results if each.key in keys)
    per_document = (whole or weight / DOCUMENTS_PER_SECOND) / max(weight, 1)
    steps = [_set_up(indexes, indexed, INDEX_WEIGHT * indexed * per_document)]
    for entry in filled:
        steps.append(_fill(entry, counts[entry.collection], counts[entry.collection] * per_document))
    steps.append(
        Step(
            "follow the changes",
            "follow",
            "Apply every change that was made meanwhile, and verify everything. From then on run "
            "treadle watch --app models:store in this folder: it keeps values right whoever writes.",
            "Stop treadle watch.",
        )
    )
    return steps


def _set_up(indexes: dict[str, list[str]], documents: int, seconds: float) -> Step:
    listed = [f"{collection}: {name}" for collection, made in sorted(indexes.items()) for name in made]
    what = f"Build {names(listed, 20)}. " if listed else "No index is missing. "
    return Step(
        "set up",
        "set up",
        what + "Let the server keep former states of documents where the worker needs them.",
        "Drop these indexes, and stop keeping former states where that was not so before.",
        documents=documents,
        seconds=round(seconds, 1),
        load="one index build at a time; reads and writes go on" if listed else "none",
    )


def _fill(entry: ModelEntry, documents: int, seconds: float) -> Step:
    fields = names(sorted({owned.path for rule in entry.rules for owned in rule.owns()}))
    return Step(
        f"fill {entry.collection}",
        "fill",
        f"Compute {fields} of every document of {entry.collection}, in small transactions.",
        f"Remove {fields} and _treadle from the documents of {entry.collection}.",
        about=entry.model.__name__,
        documents=documents,
        seconds=round(seconds, 1),
        load=f"{documents:,} documents are read and written once; --throttle slows it down",
    )


def _missing(scan: Scan, graph: Graph, entry: ModelEntry) -> list[str]:
    """The names of the indexes that set-up would make, judging by the scan."""
    facts = scan.collections.get(entry.collection)
    present = [_raw(index) for index in facts.indexes] if facts is not None else []
    missing, _ = compare_indexes(entry, present)
    return [index.document["name"] for index in [*missing, *maintenance_indexes(graph, entry, present)]]


def _raw(index: IndexFacts) -> dict[str, Any]:
    """An index as the server lists it, as far as the facts say."""
    raw: dict[str, Any] = {"name": index.name, "key": dict(index.keys)}
    if index.unique:
        raw["unique"] = True
    if index.partial:
        raw["partialFilterExpression"] = {"_id": {"$exists": True}}
    if index.collation_strength is not None:
        raw["collation"] = {"locale": "en", "strength": index.collation_strength}
    return raw
