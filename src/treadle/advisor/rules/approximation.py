"""A counter that is written far more often than anyone could read it."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source, has_one_identity, quoted
from treadle.advisor.facts import NUMBERS, READS, CollectionFacts, Scan
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import duration, share

RULE = Rule(
    "approximation",
    "Approximation",
    "Counters written thousands of times a minute",
    "Updates that do nothing but increment one field make up a large part of the writes.",
    "Collect increments and write their sum every hundred events or few seconds.",
    "The stored number lags a little; a crash loses what was not flushed, unless the buffer is durable.",
    "A hundredth of the writes.",
    "Not for money, stock or anything that must be exact at once.",
)
PER_MINUTE_MIN = 1_000
OPERATIONS_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    workload = scan.workload
    if workload is None or workload.seconds <= 0:
        return
    counted: dict[tuple[str, str], int] = {}
    for query in workload.queries:
        if len(query.increments) == 1:
            place = (query.collection, query.increments[0])
            counted[place] = counted.get(place, 0) + query.count
    for (collection, path), updates in sorted(counted.items()):
        per_minute = updates / max(workload.seconds, 1.0) * 60
        facts = scan.collections.get(collection)
        if facts is None or not facts.plain or updates < OPERATIONS_MIN or per_minute < PER_MINUTE_MIN:
            continue
        field = facts.fields.get(path)
        if field is None or len(field.steps) > 1 or not is_plain_name(path):
            continue
        # Ids of several types are to be mended first; `mixed-types` says so.
        if not field.filled or not set(field.filled) <= NUMBERS or not has_one_identity(facts):
            continue
        yield _finding(scan, facts, path, updates, per_minute)


def _finding(scan: Scan, facts: CollectionFacts, path: str, updates: int, per_minute: float) -> Finding:
    assert scan.workload is not None
    writes = scan.workload.of(facts.name, ("insert", "update", "delete"))
    reads = scan.workload.of(facts.name, READS)
    return Finding(
        RULE,
        "warning",
        "medium" if scan.workload.seconds < 10 else "high",
        facts.name,
        path,
        f"{path} was incremented {per_minute:,.0f} times a minute.",
        {
            "increments": updates,
            "seen over": duration(scan.workload.seconds),
            "per minute": round(per_minute),
            "share of the collection's writes": share(updates, writes),
            "reads of the collection": reads,
        },
        _declaration(facts, path),
        ("Count with store.counter(…).add(id) instead of an update each.",),
    )


def _declaration(facts: CollectionFacts, path: str) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("datetime", "timedelta")
    source.use("treadle", "Approximate")
    names = source.names(facts)
    line = "Approximate(every=100, within=timedelta(seconds=5))"
    kind = source.annotation(facts, facts.fields[path], "")
    default = "Decimal(0)" if kind == "Decimal" else "0"
    if names[path] != path:
        source.use("pydantic", "Field")
        default = f"Field({default}, alias={quoted(path)})"
    source.document(
        facts, without=frozenset({path}), added=(f"{names[path]}: Annotated[{kind}, {line}] = {default}",)
    )
    return source.text()
