"""A collection of which most is older than anything that is read."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source, quote
from treadle.advisor.facts import Ages, CollectionFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import duration, share, size

RULE = Rule(
    "archive",
    "Archive",
    "Most of a collection is older than anything that is read",
    "All reads of the workload ask for dates, and most documents are older than the oldest of these.",
    "Move documents of some age to another collection, and go on counting them.",
    "A read of an old document looks in two places; the move has to run now and then.",
    "Indexes and a working set of what is read; smaller backups of it.",
    "Not where a yearly report that this workload does not show reads everything, nor where old documents "
    "may simply expire.",
)
OLDER_SHARE_MIN = 0.8
DAYS = (7, 14, 30, 60, 90, 180, 365, 730, 1_095, 1_825, 3_650)
DAY_SECONDS = 86_400.0


def find(scan: Scan) -> Iterator[Finding]:
    for ages in scan.ages:
        facts = scan.collections[ages.collection]
        if ages.older >= OLDER_SHARE_MIN * ages.documents and ages.path in Source.names(facts):
            yield _finding(scan, facts, ages)


def _finding(scan: Scan, facts: CollectionFacts, ages: Ages) -> Finding:
    part = share(ages.older, ages.documents)
    return Finding(
        RULE,
        facts.name,
        ages.path,
        f"{part} of the documents are older than anything that was read in {ages.reads:,} operations.",
        {
            "documents": ages.documents,
            "older than anything that is read": ages.older,
            "older, share": part,
            "reads and updates seen": ages.reads,
            "reads reach back": duration(ages.reach_seconds),
            "seen over": duration(scan.workload.seconds if scan.workload else 0.0),
            "data of the older ones, about": size(facts.mean_bytes * ages.older),
        },
        _declaration(scan, facts, ages),
        (
            "Make sure that the workload was recorded over all that happens, the monthly jobs too.",
            "Run setup(), then treadle archive, or run_due() now and then.",
        ),
        confidence="high" if ages.reads >= 1_000 else "medium",
    )


def _declaration(scan: Scan, facts: CollectionFacts, ages: Ages) -> str:
    days = ages.reach_seconds / DAY_SECONDS
    after = next((each for each in DAYS if each >= days), int(days) + 1)
    into = f"{facts.name}_archive"
    while into in scan.names:
        into += "_2"
    by = quote(Source.names(facts)[ages.path])
    source = Source()
    source.document(
        facts, keywords=[f"archive=Archive(by={by}, after=timedelta(days={after}), into={quote(into)})"]
    )
    return source.text()
