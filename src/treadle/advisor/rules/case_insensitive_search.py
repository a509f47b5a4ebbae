"""Regular expressions without case, which no ordinary index serves."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.facts import CollectionFacts, Query, Scan
from treadle.advisor.index_models import declared, model
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_known
from treadle.advisor.wording import number

RULE = Rule(
    "case-insensitive-search",
    "anti-pattern",
    "Case-insensitive search by regular expression",
    "Queries use $regex with the option i.",
    "Make an index with a collation that ignores case, and query by equality with that collation.",
    "An index more; queries must name the collation.",
    "An exact look-up instead of a walk through every key.",
    "Not for searching words inside text: that wants a text index.",
)
QUERIES_MIN = 5


def find(scan: Scan) -> Iterator[Finding]:
    if scan.workload is None:
        return
    found: dict[tuple[str, str], list[Query]] = {}
    for query in scan.workload.queries:
        for path in query.insensitive:
            found.setdefault((query.collection, path), []).append(query)
    for (collection, path), queries in sorted(found.items()):
        facts = scan.collections.get(collection)
        if facts is None or not facts.plain or not is_known(facts, path):
            continue
        if sum(query.count for query in queries) >= QUERIES_MIN:
            yield _finding(facts, path, queries)


def _finding(facts: CollectionFacts, path: str, queries: list[Query]) -> Finding:
    count = sum(query.count for query in queries)
    served = any(
        index.fields[:1] == (path,) and index.collation_strength in (1, 2) for index in facts.indexes
    )
    collation = ', collation={"locale": "en", "strength": 2}'
    return Finding(
        RULE,
        "warning",
        "high",
        facts.name,
        path,
        f"{path} was searched {count:,} times by a regular expression without case.",
        {
            "queries": count,
            "documents examined per query": number(sum(query.examined for query in queries) / count),
            "documents returned per query": number(sum(query.returned for query in queries) / count),
            "milliseconds per query": round(sum(query.milliseconds for query in queries) / count, 1),
            "an index without case": "there is one" if served else "there is none",
        },
        declared(facts, [model([(path, 1)], f"{path}_any_case", collation)]),
        ('Query with collation={"locale": "en", "strength": 2} and the plain value.',),
    )
