"""Looks at a database and measures it; this and its two parts alone read data.

In this order: which collections there are; each by itself (`measure.py`); the
workload; then the relations between collections (`prove.py`). What is known is
kept as it comes, so that whoever interrupts a scan has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pymongo.database import Database

from treadle.advisor import statistics, workload
from treadle.advisor.facts import CollectionFacts, Limits, Relation, Scan, Workload
from treadle.advisor.measure import Measurer
from treadle.advisor.prove import Prover
from treadle.advisor.reading import Lost, Reader, Refused

# How many collections one operation counts, where there are very many.
COUNTED_TOGETHER = 100


@dataclass(frozen=True, slots=True)
class Step:
    """How far a scan is."""

    what: str
    done: int
    total: int


Reporter = Callable[[Step], None]


@dataclass(slots=True)
class Profiler:
    """One scan in progress; `found` holds what is known so far, for whoever interrupts it."""

    reader: Reader
    limits: Limits
    values_shown: bool = False
    report: Reporter = lambda step: None
    found: dict[str, CollectionFacts] = field(default_factory=dict)
    relations: list[Relation] = field(default_factory=list)
    workload: Workload | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    version: tuple[int, ...] = (0,)
    complete: bool = False
    lost: bool = False

    def run(self, recorded: Workload | None) -> None:
        """Measure everything; raises `Lost` or KeyboardInterrupt with `found` as far as it came."""
        self.workload = recorded
        self.version = self._version()
        chosen = self._choose()
        measurer = Measurer(self.reader, self.limits, self.version, self.values_shown)
        for number, (name, listed) in enumerate(chosen):
            self.report(Step(name, number, len(chosen) + 1))
            self.found[name] = measurer.collection(name, listed)
        self.report(Step("relations", len(chosen), len(chosen) + 1))
        if self.workload is None:
            self.workload = self._recorded()
        prover = Prover(
            self.reader,
            self.limits,
            self.found,
            measurer.samples,
            self.workload,
            self.relations,
            self.notes,
        )
        prover.run(lambda what, done, total: self.report(Step(what, done, total)))
        self.report(Step("done", len(chosen) + 1, len(chosen) + 1))
        self.complete = True

    def scan(self) -> Scan:
        """What is known, as facts."""
        return Scan(
            self.reader.database.name,
            self.version,
            dict(sorted(self.found.items())),
            tuple(self.relations),
            self.workload,
            self.limits,
            tuple(self.notes),
            self.complete,
            self.lost,
            self.values_shown,
            tuple(sorted(self.names)),
        )

    # -- which collections -----------------------------------------------------------

    def _version(self) -> tuple[int, ...]:
        try:
            told = self.reader.command({"buildInfo": 1}, of_admin=True)["versionArray"]
        except Refused:
            return (4, 4)
        return tuple(told[:3])

    def _choose(self) -> list[tuple[str, dict[str, Any]]]:
        """The collections to look into: all, or the largest where there are too many."""
        listed = {
            each["name"]: each
            for each in self.reader.collections()
            if not each["name"].startswith(("system.", "treadle."))
        }
        self.names = list(listed)
        if not listed:
            self.notes.append("The database has no collections, or the login may see none.")
        kept = sorted(listed)
        if len(kept) > self.limits.collections:
            # A view would have to be computed.
            stored = [name for name in kept if listed[name].get("type", "collection") == "collection"]
            counts: Counter[str] = Counter()
            for start in range(0, len(stored), COUNTED_TOGETHER):
                self.report(Step("counting collections", start, len(stored)))
                counts.update(self._documents(stored[start : start + COUNTED_TOGETHER]))
            kept = sorted(sorted(kept, key=lambda name: (-counts[name], name))[: self.limits.collections])
            self.notes.append(
                f"The database has {len(listed):,} collections; the {len(kept)} largest were looked into."
            )
        return [(name, listed[name]) for name in kept]

    def _documents(self, names: list[str]) -> dict[str, int]:
        """How many documents, as the server's catalogue says; one by one where it refuses several at once."""
        try:
            rows = self.reader.aggregate(names[0], statistics.counts(names))
        except Refused:
            if len(names) == 1:
                return {}
            return {name: number for each in names for name, number in self._documents([each]).items()}
        return statistics.read_counts(rows)

    def _recorded(self) -> Workload | None:
        """What `system.profile` holds, if profiling is or was on; the newest first."""
        rows = self.reader.each("system.profile", PROFILE_PROJECTION, [("$natural", -1)])
        try:
            found = workload.read(
                rows, self.reader.database.name, "system.profile", self.limits.workload_operations
            )
        except Refused:
            return None
        return found if found.queries else None


# Neither the plans nor the locks are needed, and they are most of it.
PROFILE_PROJECTION = dict.fromkeys(
    (
        "op",
        "ns",
        "client",
        "command",
        "docsExamined",
        "nreturned",
        "nMatched",
        "ndeleted",
        "planSummary",
        "millis",
        "ts",
    ),
    1,
)


def profile(
    database: Database[dict[str, Any]],
    limits: Limits,
    recorded: Iterable[Mapping[str, Any]] | None = None,
    secondary: bool = False,
    values_shown: bool = False,
    report: Reporter | None = None,
) -> Scan:
    """Measure a database. Ctrl-C and a lost connection give what is known by then, marked incomplete."""
    reader = Reader.on(database, limits.operation_seconds, secondary)
    profiler = Profiler(reader, limits, values_shown, report or (lambda step: None))
    given = None
    if recorded is not None:
        given = workload.read(recorded, database.name, "file", limits.workload_operations)
        if not given.queries:
            profiler.notes.append("The workload file holds no operation on this database.")
    try:
        profiler.run(given)
    except KeyboardInterrupt:
        profiler.notes.append("Interrupted; this is what was known by then.")
    except Lost as lost:
        if not profiler.found:
            raise
        profiler.lost = True
        profiler.notes.append(f"The connection was lost ({lost}); this is what was known by then.")
    return profiler.scan()
