"""Tries what a scan found: with recorded requests, on a copy in a private server.

The copy is made once. For each finding a second copy gets the pattern: set up
and rebuilt by Treadle from the advisor's own declaration. Then both answer the
same requests. Nothing is written to the scanned database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.interface import Finding
from treadle.advisor.loop.compare import ROUNDS, compare_reads
from treadle.advisor.loop.copying import Copier, clone
from treadle.advisor.loop.families import collections_of, touched
from treadle.advisor.loop.perform import Row
from treadle.advisor.loop.plan import BY_APPLICATION
from treadle.advisor.loop.results import Copied, TrialReport, TrialResult
from treadle.advisor.loop.rewrite import Rewritten
from treadle.advisor.loop.rewrite import unchanged as unchanged_read
from treadle.advisor.loop.storage import checkpoint, collection_sizes, compared_storage
from treadle.advisor.loop.units import Collector, Group, Unit, collect, reads_of
from treadle.advisor.loop.values import values
from treadle.advisor.loop.verdict import Trial, judge
from treadle.advisor.loop.workload_file import Workload
from treadle.advisor.loop.write_cost import ROUNDS as WRITE_ROUNDS
from treadle.advisor.loop.write_cost import WriteCounter, watched_fields, write_costs
from treadle.advisor.model_text import load_models, render_module
from treadle.advisor.proposals import Draft
from treadle.advisor.report import Report
from treadle.errors import TreadleError, UsageError
from treadle.graph.graph import Graph
from treadle.model.document import Document
from treadle.server.local import start
from treadle.store.blocking.store import Store

DOCUMENTS = 100_000
PROFILE_BYTES = 32_000_000
# The copy is small, and the machine may have little memory: the least cache that a server takes.
SMALL_SERVER = ("--wiredTigerCacheSizeGB=0.25",)
BEFORE = "before"

Progress = Callable[[str, int, int], None]
# The reads of a trial, and what was recorded of writes.
Requests = tuple[list[Group], WriteCounter]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finding with the models that its declaration makes."""

    finding: Finding
    models: Sequence[type[Document]]
    draft: Draft
    text: str


def try_findings(
    database: Database[Any],
    report: Report,
    workload: Workload,
    *,
    only: Iterable[str] = (),
    documents: int = DOCUMENTS,
    progress: Progress | None = None,
    rounds: int = ROUNDS,
) -> TrialReport:
    """Try the findings of a scan, each by itself.

    `only` names findings as `CODE@PLACE`, or by their code alone. What cannot
    be tried is in the report too, without evidence. Clients write as they do,
    and a worker follows.
    """
    findings = select(report, only)
    say = progress or (lambda what, done, total: None)
    ready: list[Candidate] = []
    # By the finding itself: two may have one name.
    results: dict[int, TrialResult] = {}
    for finding in findings:
        made = _candidate(report, finding)
        if isinstance(made, Candidate):
            ready.append(made)
        else:
            results[id(finding)] = _without_evidence(finding, made)
    summary = workload.summary()
    notes: list[str] = []
    copied: tuple[Copied, ...] = ()
    if ready:
        with _private() as client:
            bench = _Bench(client, report, workload, summary.seconds, say, rounds)
            copied = bench.copy(database, ready, documents)
            for number, (candidate, requests) in enumerate(zip(ready, bench.collect(ready), strict=True)):
                say(candidate.finding.key, number, len(ready))
                results[id(candidate.finding)] = bench.try_one(candidate, requests)
            notes += bench.notes
    return TrialReport(
        report.scan.database,
        ".".join(map(str, report.scan.version)),
        summary,
        copied,
        tuple(results[id(each)] for each in findings),
        tuple(dict.fromkeys(notes)),
    )


def select(report: Report, only: Iterable[str]) -> list[Finding]:
    """The findings that are named; all of them where none is."""
    names = list(only)
    chosen_findings = [
        each for each in report.findings if not names or each.key in names or each.code in names
    ]
    known = {name for each in report.findings for name in (each.key, each.code)}
    for name in names:
        if name not in known:
            raise UsageError(
                f"The scan has no finding {name!r}; it has "
                f"{', '.join(each.key for each in report.findings) or 'none'}.",
                code="finding-unknown",
            )
    return chosen_findings


def _without_evidence(finding: Finding, reason: str) -> TrialResult:
    return TrialResult(finding.code, finding.where, finding.declaration, "no evidence", reason)


def _candidate(report: Report, finding: Finding) -> Candidate | str:
    """The models of a finding; a sentence where it cannot be tried."""
    if finding.code in BY_APPLICATION:
        return f"It is left to the application. {BY_APPLICATION[finding.code]}"
    if not finding.draft.can_apply:
        return (
            "Programs write its fields themselves, or its collection is not there yet; declare it in the "
            "application's models, then run setup() and repair()."
        )
    text = render_module(report.scan, finding.draft)
    try:
        models = load_models(text)
        Graph(models)
    except TreadleError as error:
        return f"Its declaration is refused ({error.code})."
    return Candidate(finding, models, finding.draft, text)


@contextlib.contextmanager
def _private() -> Iterator[MongoClient[Any]]:
    """A server of its own, gone afterwards."""
    with start(arguments=SMALL_SERVER) as server:
        client: MongoClient[Any] = MongoClient(server.uri)
        with client:
            yield client


@dataclass(slots=True)
class _Bench:
    """The private server, with the copy in the database `before`."""

    client: MongoClient[Any]
    report: Report
    workload: Workload
    seconds: float
    say: Progress
    rounds: int
    notes: list[str] = field(default_factory=list)
    # Whether the copy holds what a unit names.
    usable: Callable[[Unit], bool] = lambda unit: True
    # How many documents one on the copy stands for.
    scale: float = 1.0
    number: int = 0

    @property
    def before(self) -> Database[Any]:
        return self.client[BEFORE]

    def copy(
        self, database: Database[Any], candidates: Sequence[Candidate], documents: int
    ) -> tuple[Copied, ...]:
        names, named = touched(self.workload)
        for candidate in candidates:
            names |= {candidate.finding.collection, *candidate.draft.collections}
        scanned = self.report.scan.collections
        present = sorted(name for name in names if name in scanned and scanned[name].plain)
        copier = Copier(database, self.before, self.report.scan, documents, named, self.say)
        preferred = [(each.finding.collection, each.finding.path) for each in candidates]
        copied = copier.run(present, preferred)
        self.usable = lambda unit: all(map(copier.holds, unit))
        self.notes += copier.notes
        self.scale = sum(each.of for each in copied) / max(1, sum(each.documents for each in copied))
        _widen_profile(self.before)
        return copied

    def collect(self, candidates: Sequence[Candidate]) -> list[Requests]:
        """The requests that each trial takes, in one pass over the workload."""
        pairs = [(_reads(each), WriteCounter(watched_fields(each.draft))) for each in candidates]
        for reads, _ in pairs:
            reads.usable = self.usable
        collect(self.workload, [each for pair in pairs for each in pair])
        for candidate, (reads, _) in zip(candidates, pairs, strict=True):
            key = candidate.finding.key
            if reads.left_out:
                self.notes.append(f"{key}: {reads.left_out:,} reads of still other shapes are left out.")
            self.notes += [
                f"{key} does not change {count:,} × {text}" for text, count in reads.missed.items()
            ]
        return [(reads.groups(), writes) for reads, writes in pairs]

    def try_one(self, candidate: Candidate, requests: Requests) -> TrialResult:
        finding = candidate.finding
        names = (finding.code, finding.where, candidate.text)
        if not requests[0]:
            return TrialResult(*names, "no evidence", "No recorded request is changed by it.")
        self.number += 1
        after = self.client[f"after{self.number}"]
        try:
            return self._measure(candidate, names, requests, after)
        except TreadleError as error:
            return TrialResult(*names, "no evidence", f"Treadle refuses it on the copy ({error.code}).")
        except PyMongoError as error:
            return TrialResult(*names, "no evidence", f"It failed on the copy ({type(error).__name__}).")
        finally:
            self.client.drop_database(after.name)

    def _measure(
        self,
        candidate: Candidate,
        names: tuple[str, str, str],
        requests: Requests,
        after: Database[Any],
    ) -> TrialResult:
        groups, writes = requests
        draft = candidate.draft
        after_way: Draft | Callable[[Unit], Rewritten | None] = draft if draft.derived else unchanged_read
        needed = {
            name for group in groups for unit in group.units for each in unit for name in collections_of(each)
        }
        needed |= draft.collections
        present = sorted(needed & set(self.before.list_collection_names()))
        clone(self.before, after, present)
        # Of the fresh copy: files of one that was written to are larger than what they hold.
        checkpoint(after)
        sizes = {name: collection_sizes(after, name) for name in present}
        _widen_profile(after)
        with Store(after, models=list(candidate.models)) as store:
            begin = perf_counter()
            store.setup()
            store.rebuild()
            change = (perf_counter() - begin) * self.scale
            results, untried = compare_reads(
                self.before, after, groups, after_way, self.seconds, rounds=self.rounds, count=count_work
            )
            storage = compared_storage(sizes, after)
            written, unwritten = write_costs(
                self.before, store, writes, self.seconds, count_work, min(self.rounds, WRITE_ROUNDS)
            )
            # After the writes: what was copied must have followed.
            wrong = len(store.verify())
        self.notes += [f"{names[0]}@{names[1]}, not tried: {each}" for each in (*untried, *unwritten)]
        return judge(Trial(*names, [*results, *written], storage, change, [*untried, *unwritten], wrong))


def _reads(candidate: Candidate) -> Collector:
    """Collect the reads that a finding changes; of an index, the reads that scan."""
    if candidate.draft.derived:
        return reads_of(candidate.draft)
    collection = candidate.finding.collection
    paths = set(candidate.finding.path.split(", "))

    def scans(unit: Unit) -> bool:
        request = unit[0]
        if not request.is_read or request.collection != collection or request.plan != "COLLSCAN":
            return False
        sort = request.body.get("sort")
        named = {path for path, _ in values(request)} | set(sort if isinstance(sort, Mapping) else ())
        return bool(named & paths)

    return Collector(Draft(), scans)


def _widen_profile(database: Database[Any]) -> None:
    """Room for all that a round of requests leaves in the profiler of the private server."""
    database.create_collection("system.profile", capped=True, size=PROFILE_BYTES)


def count_work(database: Database[Row], work: Callable[[], Any]) -> tuple[int, int, int]:
    """Commands, documents examined and bytes answered of some work, by the private server's profiler."""
    profile = database["system.profile"]
    seen = profile.estimated_document_count()
    database.command({"profile": 2})
    try:
        work()
    finally:
        database.command({"profile": 0})
    rows = [
        row
        for row in profile.find({}, {"docsExamined": 1, "responseLength": 1, "ns": 1, "command.profile": 1})
        .sort("$natural", 1)
        .skip(seen)
        if row.get("ns") != f"{database.name}.system.profile" and "profile" not in (row.get("command") or {})
    ]
    examined = sum(int(row.get("docsExamined", 0)) for row in rows)
    return len(rows), examined, sum(int(row.get("responseLength", 0)) for row in rows)
