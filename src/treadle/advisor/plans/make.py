"""From a trial to a plan: which findings, in which steps, how long, and how to take each back.

A finding goes into the plan if the trial says "do", or if it was asked for by
name, and if it can be applied beside writers that do not know of it
(`kinds.py`). Everything else is named, with the reason and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding
from treadle.advisor.plans import kinds
from treadle.advisor.plans.folder import Applied, ByApplication, ChangePlan, LeftOut, Place, Step
from treadle.advisor.plans.models import Combined, combine, load_models
from treadle.advisor.report import Report
from treadle.advisor.trials.results import TrialReport
from treadle.advisor.trials.trial import select
from treadle.advisor.wording import names
from treadle.engine.indexes import compare_indexes
from treadle.errors import DataError
from treadle.graph.calls import PastRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.upkeep.rebuild import in_order
from treadle.upkeep.set_up import maintenance_indexes

# Where a trial does not say how long the change takes.
DOCUMENTS_PER_SECOND = 2_000
STOP_SECONDS_MIN = 600.0
STOP_FACTOR = 10
STOP_SET_ASIDE_MIN = 10
STOP_SET_ASIDE_SHARE = 0.001
INDEX_WEIGHT = 0.05

NOTHING_APPLIED = Applied()


def make(
    report: Report,
    trial: TrialReport,
    *,
    identity: str,
    made: str,
    maintain: str = "stream",
    also: Collection[str] = (),
    applied: Applied = NOTHING_APPLIED,
) -> ChangePlan:
    """The plan for what the trial supports; raises where that is nothing.

    `also` names findings that no request can show to be quicker, as CODE@PLACE
    or by their code. The declarations of plans that are `applied` already stay
    in the models, so that one worker follows them all.
    """
    chosen = _chosen(report, trial, also)
    combined = combine(report.scan, [*chosen.measured, *chosen.asked], maintain, applied.models)
    left_out = [*chosen.left_out, *(LeftOut(key_of(each), reason) for each, reason in combined.left_out)]
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
        maintain=maintain,
        findings=tuple(key_of(each) for each in combined.findings),
        left_out=tuple(left_out),
        places=tuple(
            dict.fromkeys(Place(each.collection, each.stored, each.existing) for each in combined.additions)
        ),
        steps=tuple(_steps(report.scan, combined, trial)),
        trial=trial,
        models=combined.text,
        by_application=tuple(chosen.by_application),
        asked=tuple(key_of(each) for each in combined.findings if each in chosen.asked),
        on=applied.plans,
    )


def key_of(finding: Finding) -> str:
    """How a trial and a plan name a finding."""
    return f"{finding.code}@{finding.where}"


@dataclass(slots=True)
class _Chosen:
    """What becomes of each finding."""

    measured: list[Finding] = field(default_factory=list)
    asked: list[Finding] = field(default_factory=list)
    by_application: list[ByApplication] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def _chosen(report: Report, trial: TrialReport, also: Collection[str]) -> _Chosen:
    select(report, also)
    results = {each.key: each for each in trial.results}
    chosen = _Chosen()
    for finding in report.findings:
        key = key_of(finding)
        result = results.get(key)
        wanted = key in also or finding.code in also
        if finding.code in kinds.BY_APPLICATION and (result is not None or wanted):
            said = result.reason if result is not None else ""
            chosen.by_application.append(_by_application(finding, said))
        elif wanted and (result is None or result.verdict == "no evidence"):
            chosen.asked.append(finding)
        elif result is None:
            chosen.left_out.append(LeftOut(key, kinds.NOT_TRIED))
        elif result.verdict == "do":
            chosen.measured.append(finding)
        elif result.verdict == "no evidence":
            # Copies and counts that are kept by hand become right, though no request becomes quicker.
            chosen.left_out.append(LeftOut(key, f"{result.reason} {kinds.ON_REQUEST.format(key=key)}"))
        else:
            chosen.left_out.append(LeftOut(key, result.reason))
    return chosen


def _by_application(finding: Finding, said: str) -> ByApplication:
    why = kinds.BY_APPLICATION[finding.code]
    return ByApplication(key_of(finding), why, said, finding.steps, finding.declaration)


# -- steps ---------------------------------------------------------------------------------


def _steps(scan: Scan, combined: Combined, trial: TrialReport) -> list[Step]:
    graph = Graph(load_models(combined.text))
    indexes = {entry.collection: _missing(scan, graph, entry) for entry in graph.entries.values()}
    filled = [
        entry
        for entry in in_order(graph.entries.values())
        if entry.collection in scan.collections and entry.collection in combined.changed
    ]
    counts = {name: scan.collections[name].count for name in indexes if name in scan.collections}
    indexed = sum(counts.get(name, 0) * len(made) for name, made in indexes.items())
    weight = INDEX_WEIGHT * indexed + sum(counts[entry.collection] for entry in filled)
    keys = {key_of(each) for each in combined.findings}
    whole = sum(each.change_seconds for each in trial.results if each.key in keys)
    per_document = (whole or weight / DOCUMENTS_PER_SECOND) / max(weight, 1)
    steps = [_set_up(indexes, indexed, INDEX_WEIGHT * indexed * per_document)]
    steps += [
        _validate(entry)
        for entry in graph.entries.values()
        if entry.settings.validation != "off" and entry.collection in combined.validated
    ]
    for collection in sorted({each.collection for each in combined.additions if each.existing}):
        steps.append(_keep(combined, collection, counts.get(collection, 0)))
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
        stop_seconds=max(STOP_SECONDS_MIN, STOP_FACTOR * seconds),
    )


def _validate(entry: Entry[Any]) -> Step:
    return Step(
        f"validate {entry.collection}",
        "validate",
        f"Give {entry.collection} a validator made from its model, which only warns: no write is refused, "
        "and the server's log names what does not fit.",
        "Remove the validator. The server then lists its own defaults for the collection (strict, error), as "
        "for any that once had one; they refuse nothing.",
        about=entry.model.__name__,
        load="none",
    )


def _keep(combined: Combined, collection: str, documents: int) -> Step:
    fields = [each.stored for each in combined.additions if each.collection == collection and each.existing]
    seconds = documents / (10 * DOCUMENTS_PER_SECOND)
    return Step(
        f"keep former values of {collection}",
        "keep",
        f"Copy {names(fields)} of every document of {collection} to a collection treadle.former.… first.",
        "Write the former values back, and drop the collection that holds them.",
        about=collection,
        documents=documents,
        seconds=round(seconds, 1),
        load=f"{documents:,} small documents are inserted",
        stop_seconds=max(STOP_SECONDS_MIN, STOP_FACTOR * seconds),
    )


def _fill(entry: Entry[Any], documents: int, seconds: float) -> Step:
    fields = sorted({path for rule in entry.rules for path in rule.maintained()})
    beside = [str(rule.declared.collection) for rule in entry.rules if isinstance(rule, PastRule)]
    what, undo = list[str](), list[str]()
    if fields:
        what.append(
            f"Compute {names(fields)} of every document of {entry.collection}, in small transactions."
        )
        undo.append(f"Remove {names(fields)} and _treadle from the documents of {entry.collection}.")
    if beside:
        what.append(f"Write the present state of every document of {entry.collection} to {names(beside)}.")
        undo.append(f"Drop {names(beside)}, and remove _treadle from the documents of {entry.collection}.")
    return Step(
        f"fill {entry.collection}",
        "fill",
        " ".join(what),
        " ".join(undo),
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
