"""What a trial found: plain values, without any value of a document or a request.

A figure is a `Measured`: the value, and the interval in which another run of
the same kind is expected. Everything goes to JSON and comes back (`as_json`,
`report_from_json`); the JSON has a version, `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from treadle.errors import UsageError

SCHEMA = "treadle-trial/1"
Verdict = Literal["do", "do not", "no evidence"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure, and the interval in which another run is expected."""

    value: float
    low: float
    high: float
    # The lower end by the rounds alone, without what other servers and times may add.
    measured_low: float | None = None

    @property
    def sure(self) -> float:
        """The value that this run showed at least."""
        return self.low if self.measured_low is None else self.measured_low

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Side:
    """What a request costs in one of two ways, per run."""

    p50_ms: Measured
    p99_ms: Measured
    documents_examined: float
    bytes: float
    commands: float
    mean_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Requests of one shape, before and after."""

    kind: Literal["read", "write"]
    # The shape, without values: "reviews: find by product_id, first 5 by -date".
    request: str
    # What takes its place: "products: read of recent_reviews".
    after: str
    # How often it was recorded, and per second of the recording.
    recorded: int
    per_second: float
    # How many of them were tried, how many answers were compared, and how many of these differed.
    tried: int
    compared: int
    different: int
    costs_before: Side
    costs_after: Side
    # Time before over time after: above 1 is quicker after.
    ratio: Measured
    # What to know about this comparison, such as fields that the card does not hold.
    note: str = ""
    # What the worker that follows the change stream takes for one such write; None where no worker follows.
    upkeep_ms: float | None = None

    @property
    def instead(self) -> str:
        """What takes its place, and how it compares: `after` in a sentence."""
        if self.upkeep_ms is None:
            return self.after
        return f"{self.after} ({self.upkeep_ms:.2f} ms of its work per write)"


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of the collections concerned on the copy, and the indexes that were added and removed."""

    data_before: int
    data_after: int
    index_before: int
    index_after: int
    indexes_added: tuple[str, ...] = ()
    indexes_removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One finding, tried on the copy."""

    code: str
    place: str
    declaration: str
    verdict: Verdict
    # One sentence: why.
    reason: str
    requests: tuple[RequestResult, ...] = ()
    # Over all reads that the pattern changes, weighted by how often they were recorded.
    ratio: Measured | None = None
    storage: Storage | None = None
    # Seconds of work per day of this workload: what reads save, and what writes cost more.
    gain_seconds_per_day: float = 0.0
    cost_seconds_per_day: float = 0.0
    # What the change itself costs: set-up and backfill, reckoned for the whole database.
    change_seconds: float = 0.0
    # gain - cost - the change itself spread over a year, in seconds per day.
    score: float = 0.0
    break_even_days: float | None = None

    @property
    def key(self) -> str:
        """How `--only` and a plan name it: `computed@reviews.product_id`."""
        return f"{self.code}@{self.place}"


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """What was recorded."""

    seconds: float
    operations: int
    reads: int
    writes: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Copied:
    """How many documents of a collection were copied, of how many."""

    collection: str
    documents: int
    of: int


@dataclass(frozen=True, slots=True)
class TrialReport:
    """All findings that were tried."""

    database: str
    server_version: str
    workload: WorkloadSummary
    copied: tuple[Copied, ...]
    results: tuple[TrialResult, ...]
    notes: tuple[str, ...] = ()

    @property
    def documents(self) -> int:
        return sum(each.documents for each in self.copied)

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def report_from_json(value: Mapping[str, Any]) -> TrialReport:
    """The report that `as_json` made."""
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        raise UsageError(
            f"This is no trial report of this version ({SCHEMA}); make it again with treadle trial.",
            code="trial-report-invalid",
        )
    try:
        return _ADAPTER.validate_python({name: part for name, part in value.items() if name != "schema"})
    except ValidationError:
        raise UsageError(
            "The trial report is damaged; make it again with treadle trial.", code="trial-report-invalid"
        ) from None


_ADAPTER = TypeAdapter(TrialReport)
