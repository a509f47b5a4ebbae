"""From a trial to a plan: which findings, in which steps, how long, and how to take each back.

A finding goes into the plan if the trial says "do", and if it can be applied
beside writers that do not know of it: it adds fields and indexes, and moves
no document. Everything else is left out, and the plan says why.
"""

from __future__ import annotations

from typing import Any

from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding
from treadle.advisor.plans.folder import ChangePlan, LeftOut, Place, Step
from treadle.advisor.plans.models import Combined, combine, load_models
from treadle.advisor.report import Report
from treadle.advisor.trials.results import TrialReport
from treadle.advisor.wording import names
from treadle.engine.indexes import compare_indexes
from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.upkeep.rebuild import in_order
from treadle.upkeep.set_up import maintenance_indexes

# What adds fields and indexes, and nothing else.
APPLICABLE = frozenset({"extended-reference", "computed", "subset", "query-without-index"})
NEEDS_CODE = {
    "approximation": "It changes how the application counts, and nothing that is stored.",
    "bucket": "It moves documents to another collection, which the application must know of.",
    "outlier": "It moves items out of documents that others read whole.",
    "tree": "Writers that do not use Treadle would leave the ancestors wrong; declare it in the application.",
}
# Where a trial does not say how long the change takes.
DOCUMENTS_PER_SECOND = 2_000
STOP_SECONDS_MIN = 600.0
STOP_FACTOR = 10
STOP_SET_ASIDE_MIN = 10
STOP_SET_ASIDE_SHARE = 0.001
INDEX_WEIGHT = 0.05


def make(
    report: Report, trial: TrialReport, *, identity: str, made: str, maintain: str = "stream"
) -> ChangePlan:
    """The plan for what the trial supports; raises where that is nothing."""
    chosen, left_out = _chosen(report, trial)
    combined = combine(report.scan, chosen, maintain)
    left_out += [LeftOut(key_of(each), reason) for each, reason in combined.left_out]
    if not combined.findings:
        reasons = "".join(f"\n  {each.key}: {each.reason}" for each in left_out)
        raise DataError(
            f"The trial supports no finding on {report.scan.database}, so there is nothing to plan.{reasons}",
            code="plan-empty",
        )
    return ChangePlan(
        id=identity,
        made=made,
        database=report.scan.database,
        maintain=maintain,
        findings=tuple(key_of(each) for each in combined.findings),
        left_out=tuple(left_out),
        places=tuple(
            dict.fromkeys(Place(each.collection, each.stored, each.existing) for each in combined.additions)
        ),
        steps=tuple(_steps(report.scan, combined, trial)),
        trial=trial,
        models=combined.text,
    )


def key_of(finding: Finding) -> str:
    """How a trial and a plan name a finding."""
    return f"{finding.code}@{finding.where}"


def _chosen(report: Report, trial: TrialReport) -> tuple[list[Finding], list[LeftOut]]:
    results = {each.key: each for each in trial.results}
    chosen, left_out = list[Finding](), list[LeftOut]()
    for finding in report.findings:
        key = key_of(finding)
        result = results.get(key)
        if result is None:
            left_out.append(LeftOut(key, NEEDS_CODE.get(finding.code, "The trial has no figure for it.")))
        elif result.verdict != "do":
            left_out.append(LeftOut(key, result.reason))
        elif finding.code not in APPLICABLE:
            reason = NEEDS_CODE.get(finding.code, "It is no change that can be applied beside other writers.")
            left_out.append(LeftOut(key, reason))
        else:
            chosen.append(finding)
    return chosen, left_out


# -- steps ---------------------------------------------------------------------------------


def _steps(scan: Scan, combined: Combined, trial: TrialReport) -> list[Step]:
    graph = Graph(load_models(combined.text))
    indexes = {entry.collection: _missing(scan, graph, entry) for entry in graph.entries.values()}
    filled = [entry for entry in in_order(graph.entries.values()) if entry.collection in scan.collections]
    counts = {name: scan.collections[name].count for name in indexes if name in scan.collections}
    indexed = sum(counts.get(name, 0) * len(made) for name, made in indexes.items())
    weight = INDEX_WEIGHT * indexed + sum(counts[entry.collection] for entry in filled)
    keys = {key_of(each) for each in combined.findings}
    whole = sum(each.change_seconds for each in trial.results if each.key in keys)
    per_document = (whole or weight / DOCUMENTS_PER_SECOND) / max(weight, 1)
    steps = [_set_up(indexes, indexed, INDEX_WEIGHT * indexed * per_document)]
    for collection in sorted({each.collection for each in combined.additions if each.existing}):
        steps.append(_keep(combined, collection, counts.get(collection, 0)))
    for entry in filled:
        steps.append(_fill(entry, counts[entry.collection], counts[entry.collection] * per_document))
    steps.append(
        Step(
            "follow the changes",
            "follow",
            "Apply every change that was made meanwhile, and verify. From then on run "
            "treadle watch --app models:store in this folder, which keeps the values right whoever writes.",
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
        what
        + "Let the server keep former states of documents where the worker needs them. No validator changes.",
        "Drop these indexes, and stop keeping former states where that was not so before.",
        documents=documents,
        seconds=round(seconds, 1),
        load="one index build at a time; reads and writes go on" if listed else "none",
        stop_seconds=max(STOP_SECONDS_MIN, STOP_FACTOR * seconds),
    )


def _keep(combined: Combined, collection: str, documents: int) -> Step:
    fields = [each.stored for each in combined.additions if each.collection == collection and each.existing]
    return Step(
        f"keep former values of {collection}",
        "keep",
        f"Copy {names(fields)} of every document of {collection} to treadle.former.{collection} first.",
        "Write the former values back, and drop that collection.",
        about=collection,
        documents=documents,
        seconds=round(documents / (10 * DOCUMENTS_PER_SECOND), 1),
        load=f"{documents:,} small documents are inserted",
    )


def _fill(entry: Entry[Any], documents: int, seconds: float) -> Step:
    fields = sorted({path for rule in entry.rules for path in rule.maintained()})
    return Step(
        f"fill {entry.collection}",
        "fill",
        f"Compute {names(fields)} of every document of {entry.collection}, in small transactions.",
        f"Remove {names(fields)} and _treadle from the documents of {entry.collection}.",
        about=entry.model.__name__,
        documents=documents,
        seconds=round(seconds, 1),
        load=f"{documents:,} documents are read and written once; --throttle slows it down",
        stop_seconds=max(STOP_SECONDS_MIN, STOP_FACTOR * seconds),
        stop_set_aside=max(STOP_SET_ASIDE_MIN, int(STOP_SET_ASIDE_SHARE * documents)),
    )


def _missing(scan: Scan, graph: Graph, entry: Entry[Any]) -> list[str]:
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
