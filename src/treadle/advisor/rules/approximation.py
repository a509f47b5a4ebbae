"""A counter that is written far more often than anyone could read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from treadle.advisor.declare import Source, has_one_identity, quote
from treadle.advisor.facts import NUMBERS, READS, WRITES, CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.model_text import render
from treadle.advisor.proposals import Draft, Line
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
    increments: Counter[tuple[str, str]] = Counter()
    for query in workload.queries:
        if len(query.increments) == 1:
            increments[query.collection, query.increments[0]] += query.count
    for (collection, path), updates in sorted(increments.items()):
        per_minute = updates / max(workload.seconds, 1.0) * 60
        facts = scan.collections.get(collection)
        if updates < OPERATIONS_MIN or per_minute < PER_MINUTE_MIN or facts is None or not facts.plain:
            continue
        field = facts.fields.get(path)
        if field is None or path not in Source.names(facts) or not has_one_identity(facts):
            continue
        if not field.value_types or not set(field.value_types) <= NUMBERS:
            continue
        draft = _draft(facts, field)
        yield Finding(
            RULE,
            facts.name,
            path,
            f"{path} was incremented {per_minute:,.0f} times a minute.",
            {
                "increments": updates,
                "seen over": duration(workload.seconds),
                "per minute": round(per_minute),
                "share of the collection's writes": share(updates, workload.count(facts.name, WRITES)),
                "reads of the collection": workload.count(facts.name, READS),
            },
            render(scan, draft),
            ("Count with store.counter(…).add(id) instead of an update each.",),
            confidence="medium" if workload.seconds < 10 else "high",
            draft=draft,
        )


def _draft(facts: CollectionFacts, field: FieldFacts) -> Draft:
    name = Source.names(facts)[field.name]
    kind = Source().annotation(facts, field, "")
    default = "Decimal(0)" if kind == "Decimal" else "0"
    if name != field.name:
        default = f"Field({default}, alias={quote(field.name)})"
    pattern = "Approximate(every=100, within=timedelta(seconds=5))"
    line = f"{name}: Annotated[{kind}, {pattern}] = {default}"
    return Draft(lines=(Line(facts.name, line, field.name),))
