"""A scan: measures a database and reports on it. Only it and its parts read data.

In this order: which collections there are; each by itself (`measure.py`); the
workload; the relations between collections (`prove.py`); then what is stored
twice (`compare.py`). Results are kept as they come, so that an interrupted scan still has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pymongo.database import Database

from treadle.advisor import statistics
from treadle.advisor.compare import Comparer
from treadle.advisor.facts import CollectionFacts, Limits, Relation, Scan, Workload
from treadle.advisor.measure import Measurer
from treadle.advisor.prove import Prover
from treadle.advisor.reading import Lost, Reader, Refused
from treadle.advisor.relations import without_copies
from treadle.advisor.report import Report
from treadle.advisor.workload import read as parse_workload
from treadle.errors import UsageError

# How many collections one operation counts, where there are very many.
COUNT_BATCH = 100
DECLARED_MAX = 10_000
# Plans and locks are most of a profiler document, and not needed.
PROFILE_FIELDS = (
    *("op", "ns", "client", "command", "planSummary", "millis", "ts"),
    *("docsExamined", "nreturned", "nMatched", "ndeleted"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The progress of a scan."""

    what: str
    done: int
    total: int


Reporter = Callable[[Step], None]


@dataclass(slots=True)
class Profiler:
    """One scan in progress; its attributes hold the results so far."""

    reader: Reader
    limits: Limits
    values_shown: bool
    report: Reporter
    collections: dict[str, CollectionFacts] = field(default_factory=dict)
    relations: list[Relation] = field(default_factory=list)
    workload: Workload | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    comparer: Comparer | None = None
    version: tuple[int, ...] = (0,)
    complete: bool = False
    lost: bool = False

    def run(self) -> None:
        """Measure everything; may raise `Lost` or KeyboardInterrupt at any point."""
        self.version = self._read_version()
        selection = self._select()
        total = len(selection) + 1
        measurer = Measurer(self.reader, self.limits, self.version, self.values_shown)
        for number, (name, entry) in enumerate(selection):
            self.report(Step(name, number, total))
            self.collections[name] = measurer.collection(name, entry, statistics.is_gridfs(name, self.names))
        self.report(Step("relations", len(selection), total))
        if self.workload is None:
            self.workload = self._read_workload()
        Prover(
            self.reader,
            self.limits,
            self.collections,
            measurer.samples,
            measurer.referring,
            self.workload,
            self.relations,
            self.notes,
        ).run(lambda what, done, total: self.report(Step(what, done, total)))
        self.report(Step("copies", len(selection), total))
        self.comparer = Comparer(self.reader, self.limits, self.collections, self._read_declared())
        self.comparer.run(self.relations)
        self.relations[:] = without_copies(self.relations, self.comparer.copies)
        self.report(Step("done", total, total))
        self.complete = True

    def facts(self) -> Scan:
        """The results so far."""
        return Scan(
            self.reader.database.name,
            self.version,
            dict(sorted(self.collections.items())),
            tuple(self.relations),
            self.workload,
            self.limits,
            tuple(self.notes),
            self.complete,
            self.lost,
            self.values_shown,
            tuple(sorted(self.names)),
            **self._compared(),
        )

    def _compared(self) -> dict[str, Any]:
        if self.comparer is None:
            return {}
        names = ("copies", "tallies", "pasts")
        return {name: tuple(getattr(self.comparer, name)) for name in names}

    def _read_version(self) -> tuple[int, ...]:
        try:
            return tuple(self.reader.command({"buildInfo": 1}, of_admin=True)["versionArray"][:3])
        except Refused:
            return (4, 4)

    def _select(self) -> list[tuple[str, dict[str, Any]]]:
        """The collections to read: all, or the largest where there are too many."""
        entries = {
            each["name"]: each
            for each in self.reader.collections()
            if not each["name"].startswith(("system.", "treadle."))
        }
        self.names = list(entries)
        if not entries:
            self.notes.append("The database has no collections, or the login may see none.")
        names = sorted(entries)
        if len(names) > self.limits.collections:
            # The count of a view would have to be computed.
            countable = [name for name in names if entries[name].get("type", "collection") == "collection"]
            counts: Counter[str] = Counter()
            for start in range(0, len(countable), COUNT_BATCH):
                self.report(Step("counting collections", start, len(countable)))
                counts.update(self._count_documents(countable[start : start + COUNT_BATCH]))
            largest = sorted(names, key=lambda name: (-counts[name], name))
            names = sorted(largest[: self.limits.collections])
            self.notes.append(
                f"The database has {len(entries):,} collections; the {len(names)} largest were looked into."
            )
        return [(name, entries[name]) for name in names]

    def _count_documents(self, names: list[str]) -> dict[str, int]:
        """Counts from the server's catalogue; one by one where it refuses several at once."""
        try:
            return statistics.read_counts(self.reader.aggregate(names[0], statistics.counts_pipeline(names)))
        except Refused:
            if len(names) == 1:
                return {}
            return {name: number for each in names for name, number in self._count_documents([each]).items()}

    def _read_declared(self) -> frozenset[str]:
        """The places of the rules that Treadle maintains here, as names are compared."""
        try:
            rows = self.reader.find("treadle.setup", {"kind": "rule"}, {"_id": 1}, limit=DECLARED_MAX)
        except Refused:
            return frozenset()
        places = (str(row["_id"]).partition(".")[2] for row in rows)
        return frozenset(place.replace("_", "").lower() for place in places if place)

    def _read_workload(self) -> Workload | None:
        """What `system.profile` holds, newest first, if profiling is or was on."""
        projection = dict.fromkeys(PROFILE_FIELDS, 1)
        rows = self.reader.stream("system.profile", projection, sort=[("$natural", -1)])
        name = self.reader.database.name
        try:
            workload = parse_workload(rows, name, "system.profile", self.limits.workload_operations)
        except Refused:
            return None
        return workload if workload.queries else None


def scan(
    database: Database[Any],
    *,
    limits: Limits | None = None,
    workload: Iterable[Mapping[str, Any]] | None = None,
    secondary: bool = False,
    show_values: bool = False,
    progress: Reporter | None = None,
) -> Report:
    """Look at a database and say what to change. Reads only, one operation at a time.

    `workload` takes profiler documents; without it `system.profile` is read
    where there is one. `secondary` prefers a secondary member. No value of a
    document is kept unless `show_values` is set. Ctrl-C and a lost connection
    give a report of the results so far, with `scan.complete` false.
    """
    if not isinstance(database, Database):
        raise UsageError(
            f"scan takes a PyMongo database, not a {type(database).__name__}; give it MongoClient()['shop']",
            code="database-invalid",
        )
    limits = limits or Limits()
    reader = Reader.on(database, limits.operation_seconds, secondary)
    profiler = Profiler(reader, limits, show_values, progress or (lambda step: None))
    if workload is not None:
        profiler.workload = parse_workload(workload, database.name, "file", limits.workload_operations)
        if not profiler.workload.queries:
            profiler.notes.append("The workload file holds no operation on this database.")
    try:
        profiler.run()
    except KeyboardInterrupt:
        profiler.notes.append("Interrupted; this is what was known by then.")
    except Lost as lost:
        if not profiler.collections:
            raise
        profiler.lost = True
        profiler.notes.append(f"The connection was lost ({lost}); this is what was known by then.")
    return Report.of(profiler.facts())
