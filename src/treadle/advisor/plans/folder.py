"""A plan as it lies in a folder: `plan.json`, `models.py`, `README.md`, and the recorded reads.

What was tried is what is applied: both files are covered by a checksum, and a
folder that was edited is refused. Nothing here talks to a server.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from treadle.advisor.trials.results import TrialReport, TrialResult, report_from_json
from treadle.errors import UsageError

SCHEMA = "treadle-plan/1"
PLAN, MODELS, README, READS = "plan.json", "models.py", "README.md", "reads.workload"
BYTES_MAX = 50_000_000
# The recorded reads hold values.
MODE_PRIVATE = 0o600
StepKind = Literal["set up", "fill", "follow"]


@dataclass(frozen=True, slots=True)
class Place:
    """A field that the plan adds and fills."""

    collection: str
    field: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it does, how long, and how to take it back."""

    name: str
    kind: StepKind
    what: str
    undo: str
    # The model that is filled.
    about: str = ""
    documents: int = 0
    seconds: float = 0.0
    load: str = ""


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


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What `treadle plan` decided."""

    id: str
    made: str
    database: str
    findings: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    places: tuple[Place, ...]
    steps: tuple[Step, ...]
    trial: TrialReport
    models: str
    by_application: tuple[ByApplication, ...] = ()

    @property
    def results(self) -> list[TrialResult]:
        """What the trial measured of the findings in the plan."""
        return [each for each in self.trial.results if each.key in self.findings]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def fields(self, collection: str) -> list[str]:
        """The fields that the plan adds to a collection."""
        return [each.field for each in self.places if each.collection == collection]


def require_free(folder: Path) -> None:
    """Refuse a folder that holds anything but a plan."""
    others = (
        {each.name for each in folder.iterdir()} - {PLAN, MODELS, README, READS} if folder.is_dir() else set()
    )
    if others or folder.is_file():
        raise UsageError(
            f"-o {folder} holds other files; name a folder that is empty or not there yet",
            code="output-invalid",
        )


def write(plan: ChangePlan, folder: Path, readme: str) -> None:
    """Write the files of a plan; refuses a folder that holds anything else."""
    require_free(folder)
    described = asdict(plan)
    text, described["trial"] = described.pop("models"), plan.trial.as_json()
    described = {"schema": SCHEMA, **described}
    described["checksum"] = _checksum(described, text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODELS).write_text(text, encoding="utf-8")
        (folder / README).write_text(readme, encoding="utf-8")
        (folder / PLAN).write_text(
            json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"-o {folder} cannot be written: {error.strerror}.", code="output-invalid") from None


def read(folder: Path, edited: bool = False) -> ChangePlan:
    """The plan in a folder; anything else is refused, and one that was edited unless it may be."""
    if not folder.is_dir():
        raise _invalid(folder, "is no folder; name the one that treadle plan -o wrote")
    described, text = _json(folder), _text(folder, MODELS)
    if not isinstance(described, dict) or described.get("schema") != SCHEMA:
        raise _invalid(folder, f"holds no plan of this version ({SCHEMA}); make it anew with treadle plan")
    if described.pop("checksum", None) != _checksum(described, text) and not edited:
        raise UsageError(
            f"{folder / PLAN} or {MODELS} was edited since treadle plan wrote it, so the trial says nothing "
            "about it; restore both, or make the plan anew",
            code="plan-folder-edited",
        )
    try:
        return ChangePlan(
            **{name: described[name] for name in ("id", "made", "database")},
            findings=tuple(described["findings"]),
            left_out=tuple(LeftOut(**each) for each in described["left_out"]),
            places=tuple(Place(**each) for each in described["places"]),
            steps=tuple(Step(**each) for each in described["steps"]),
            trial=report_from_json(described["trial"]),
            models=text,
            by_application=tuple(
                ByApplication(**{**each, "steps": tuple(each["steps"])})
                for each in described.get("by_application", ())
            ),
        )
    except (KeyError, TypeError):
        raise _invalid(folder, "is damaged; make it anew with treadle plan") from None


def _json(folder: Path) -> Any:
    try:
        return json.loads(_text(folder, PLAN))
    except ValueError:
        raise _invalid(folder, f"has a {PLAN} that is no JSON; make it anew with treadle plan") from None


def _text(folder: Path, name: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            return file.read(BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError):
        raise _invalid(
            folder, f"has no readable {name}; name the folder that treadle plan -o wrote"
        ) from None


def _checksum(described: dict[str, Any], text: str) -> str:
    whole = json.dumps(described, sort_keys=True) + text
    return hashlib.sha256(whole.encode()).hexdigest()


def _invalid(folder: Path, reason: str) -> UsageError:
    return UsageError(f"{folder} {reason}", code="plan-folder-invalid")
