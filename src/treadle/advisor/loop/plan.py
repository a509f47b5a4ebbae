"""A plan: what a trial supports, as a folder that `treadle apply`, `prove` and `undo` read.

A finding goes into the plan if its trial says "do" and its draft can be applied beside writers that do not
know of it. Everything else is named, with the reason and what to do. `plan.json` holds the plan with a
checksum, and the models that were tried; `models.py` is the same text for the user's own worker. Nothing here
talks to a server, and nothing here was ever read from one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from treadle.advisor.facts import IndexFacts, Scan
from treadle.advisor.interface import Finding
from treadle.advisor.loop.results import TrialReport, TrialResult
from treadle.advisor.model_text import load_models, render_module
from treadle.advisor.proposals import Conflict, Draft, Index, merge, without_prefixes
from treadle.advisor.report import Report
from treadle.advisor.wording import names
from treadle.engine.indexes import compare_indexes, maintenance_indexes
from treadle.errors import DataError, TreadleError, UsageError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry

SCHEMA = "treadle-plan/2"
PLAN, MODELS, README, READS = "plan.json", "models.py", "README.md", "reads.workload"
BYTES_MAX = 50_000_000
# Where a trial does not say how long the change takes.
DOCUMENTS_PER_SECOND = 2_000
NOT_TRIED = "It was not tried: --only names other findings."

# A draft can be applied beside writers that do not know of it, because it adds fields or indexes, follows the
# change stream, and can be taken back exactly. Why the application has to do everything else:
BY_APPLICATION = {
    "approximation": "It changes how the application counts, and nothing that is stored.",
    "attributes": "Programs that write or search these fields must use the array in their place.",
    "bloated-document": "It moves parts out of documents that others read whole.",
    "blobs": "It moves values out of documents that others read whole.",
    "bucket": "Readings become parts of other documents, in a collection that writers must write to.",
    "case-insensitive-search": "Its index serves only queries that name the collation, as programs must.",
    "deep-nesting": "It gives documents that others read and write another shape.",
    "history": "It makes no request quicker; add it to the application's models and run setup().",
    "huge-array": "It moves items out of documents that others read whole.",
    "links": "It moves documents of two collections into one, which every program must know of.",
    "mixed-types": "It converts values that other programs wrote as they are, and would write so again.",
    "no-validation": "It makes no request quicker; add it to the application's models and run setup().",
    "normalised-everything": "It moves documents into others, where every program must look for them.",
    "outlier": "It moves items out of documents that others read whole.",
    "polymorphic": "It changes how programs read and write these documents, and nothing that is stored.",
    "redundant-index": "To take that back, a dropped index is built again, under load.",
    "schema-versioning": "What its migrations do is for the team to write.",
    "too-many-collections": "It moves documents of many collections into one, where programs must look.",
    "too-many-indexes": "One recording does not say which of them other programs need.",
    "tree": "No worker follows a tree: a node that is moved past Treadle would leave its ancestors wrong.",
    "unused-index": "One recording does not say which of them a monthly job needs.",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A finding that is not part of the plan, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ByApplication:
    """A finding that the application has to follow, with all that it takes."""

    key: str
    # Why `apply` does not do it.
    why: str
    steps: tuple[str, ...]
    declaration: str


class Step(NamedTuple):
    """One step of `apply`, for people: what it does, how long, and how to take it back."""

    kind: Literal["set up", "fill", "verify"]
    name: str
    what: str
    undo: str
    documents: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """What `treadle plan` decided."""

    id: str
    made: str
    database: str
    findings: tuple[str, ...]
    draft: Draft
    # The text of models.py: it was tried, and it is what is applied.
    models: str
    trial: TrialReport
    left_out: tuple[LeftOut, ...] = ()
    by_application: tuple[ByApplication, ...] = ()
    # What set-up makes beside the fields, judging by the scan.
    indexes: tuple[str, ...] = ()
    # Documents per collection whose fields are filled.
    documents: dict[str, int] = field(default_factory=dict)

    @property
    def results(self) -> list[TrialResult]:
        """What the trial measured of the findings in the plan."""
        return [each for each in self.trial.results if each.key in self.findings]

    @property
    def places(self) -> list[str]:
        """The fields that the plan adds."""
        return [f"{each.target}.{each.name}" for each in self.draft.derived]

    @property
    def steps(self) -> list[Step]:
        """What `apply` does, in order."""
        listed = names(list(self.indexes), 20)
        made = f"Build {listed}. " if self.indexes else "No index is missing. "
        steps = [
            Step(
                "set up",
                "set up",
                made + "Let the server keep former states of documents where the worker needs them.",
                "Drop these indexes, and stop keeping former states where that was not so before.",
            )
        ]
        whole = sum(each.change_seconds for each in self.results)
        total = sum(self.documents.values())
        per_document = (whole or total / DOCUMENTS_PER_SECOND) / max(total, 1)
        for collection, documents in self.documents.items():
            fields = names(sorted(self.draft.fields(collection)))
            steps.append(
                Step(
                    "fill",
                    f"fill {collection}",
                    f"Compute {fields} of every document of {collection}, in small transactions; --throttle "
                    "slows it down.",
                    f"Remove {fields} and _treadle from the documents of {collection}.",
                    documents,
                    round(documents * per_document, 1),
                )
            )
        steps.append(
            Step(
                "verify",
                "verify",
                "Apply the changes that other programs made in the meantime, and verify every value. From "
                "then on run treadle watch --app models:store in this folder.",
                "Stop treadle watch.",
            )
        )
        return steps

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


_ADAPTER = TypeAdapter(AdoptionPlan)


# -- from a trial to a plan ----------------------------------------------------------------


def make(report: Report, trial: TrialReport, *, identity: str, made: str) -> AdoptionPlan:
    """The plan for what the trial supports; raises where that is nothing."""
    results = {each.key: each for each in trial.results}
    supported: list[Finding] = []
    left_out: list[LeftOut] = []
    by_application: list[ByApplication] = []
    for finding in report.findings:
        result = results.get(finding.key)
        if result is None:
            left_out.append(LeftOut(finding.key, NOT_TRIED))
        elif finding.code in BY_APPLICATION:
            why = BY_APPLICATION[finding.code]
            by_application.append(ByApplication(finding.key, why, finding.steps, finding.declaration))
        elif result.verdict == "do":
            supported.append(finding)
        else:
            left_out.append(LeftOut(finding.key, result.reason))
    draft, models, findings = together(report.scan, supported, left_out)
    if not findings:
        _refuse_empty(report.scan.database, left_out, by_application)
    scanned = report.scan.collections
    return AdoptionPlan(
        id=identity,
        made=made,
        database=report.scan.database,
        findings=tuple(each.key for each in findings),
        draft=draft,
        models=models,
        trial=trial,
        left_out=tuple(left_out),
        by_application=tuple(by_application),
        indexes=tuple(_missing_indexes(report.scan, models)),
        documents={
            name: scanned[name].count for name in dict.fromkeys(each.target for each in draft.derived)
        },
    )


def together(
    scan: Scan, findings: list[Finding], left_out: list[LeftOut]
) -> tuple[Draft, str, list[Finding]]:
    """The merged draft of findings, its models, and the findings in it; `left_out` gets the others."""
    merged, chosen = Draft(), list[Finding]()
    for each in findings:
        try:
            attempt = merge([merged, each.draft])
            Graph(load_models(render_module(scan, attempt)))
        except (Conflict, TreadleError) as error:
            reason = f"It does not go together with the others: {getattr(error, 'message', error)}"
            left_out.append(LeftOut(each.key, reason))
        else:
            merged = attempt
            chosen.append(each)
    merged = _without_needless_indexes(scan, merged)
    return merged, render_module(scan, merged), chosen


def _without_needless_indexes(scan: Scan, draft: Draft) -> Draft:
    """The draft without indexes with whose keys those begin that its patterns need anyway."""
    graph = Graph(load_models(render_module(scan, draft)))
    needed = [
        Index(source.collection, tuple(index.document["key"].items()))
        for rule in graph.rules
        for source, index in rule.storage().indexes
    ]
    return Draft(draft.derived, without_prefixes(draft.indexes, needed))


def _refuse_empty(database: str, left_out: list[LeftOut], by_application: list[ByApplication]) -> None:
    reasons = [f"{each.key}: {each.reason}" for each in left_out]
    reasons += [f"{each.key}: for the application. {each.why}" for each in by_application]
    listed = "".join(f"\n  {each}" for each in reasons)
    raise DataError(
        f"The trial supports no finding on {database}, so there is nothing to plan.{listed}",
        code="plan-empty",
    )


def _missing_indexes(scan: Scan, models: str) -> list[str]:
    graph = Graph(load_models(models))
    return [
        f"{entry.collection}: {name}"
        for entry in graph.entries.values()
        for name in _missing(scan, graph, entry)
    ]


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


# -- the folder ------------------------------------------------------------------------------


def require_free(folder: Path) -> None:
    """Refuse a folder that holds anything but a plan."""
    own = {PLAN, MODELS, README, READS}
    others = {each.name for each in folder.iterdir()} - own if folder.is_dir() else set()
    if others or folder.is_file():
        raise UsageError(
            f"-o {folder} holds other files; name a folder that is empty or not there yet",
            code="output-invalid",
        )


def write(plan: AdoptionPlan, folder: Path, readme: str) -> None:
    """Write the files of a plan; refuses a folder that holds anything else."""
    require_free(folder)
    described = {"schema": SCHEMA, **_ADAPTER.dump_python(plan, mode="json")}
    described["checksum"] = _checksum(described)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODELS).write_text(plan.models, encoding="utf-8")
        (folder / README).write_text(readme, encoding="utf-8")
        text = json.dumps(described, indent=1, ensure_ascii=False)
        (folder / PLAN).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {folder} cannot be written: {error.strerror}.", code="output-invalid") from None


def read(folder: Path, edited: bool = False) -> AdoptionPlan:
    """The plan in a folder. One of which models.py was changed is refused, unless it may be `edited`."""
    if not folder.is_dir():
        raise _invalid(folder, "is no folder; name the one that treadle plan -o wrote")
    try:
        described = json.loads(_text(folder, PLAN))
    except ValueError:
        raise _invalid(folder, f"has a {PLAN} that is no JSON; make it again with treadle plan") from None
    if not isinstance(described, dict) or described.pop("schema", None) != SCHEMA:
        raise _invalid(folder, f"holds no plan of this version ({SCHEMA}); make it again with treadle plan")
    checksum = described.pop("checksum", None)
    whole = checksum == _checksum({"schema": SCHEMA, **described})
    if not whole or not (edited or _text(folder, MODELS) == described.get("models")):
        raise UsageError(
            f"{folder / PLAN} or {MODELS} was edited since treadle plan wrote it, so the trial says nothing "
            "about it; restore both, or make the plan again",
            code="plan-folder-edited",
        )
    try:
        return _ADAPTER.validate_python(described)
    except ValidationError:
        raise _invalid(folder, "is damaged; make it again with treadle plan") from None


def _text(folder: Path, name: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            return file.read(BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError):
        reason = f"has no readable {name}; name the folder that treadle plan -o wrote"
        raise _invalid(folder, reason) from None


def _checksum(described: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _invalid(folder: Path, reason: str) -> UsageError:
    return UsageError(f"{folder} {reason}", code="plan-folder-invalid")
