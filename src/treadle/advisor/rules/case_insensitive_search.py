"""Case-insensitive regular expressions, which no ordinary index serves."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.facts import CollectionFacts, Query, Scan
from treadle.advisor.index_models import declare_indexes, model
from treadle.advisor.rule import Finding, Rule, query_evidence
from treadle.advisor.structure import is_known

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
COLLATION = 'collation={"locale": "en", "strength": 2}'


def find(scan: Scan) -> Iterator[Finding]:
    searches: dict[tuple[str, str], list[Query]] = {}
    for query in scan.queries:
        for path in query.case_insensitive:
            searches.setdefault((query.collection, path), []).append(query)
    for (collection, path), queries in sorted(searches.items()):
        facts = scan.collections.get(collection)
        if facts is None or not facts.plain or not is_known(facts, path):
            continue
        if sum(query.count for query in queries) >= QUERIES_MIN:
            yield _finding(facts, path, queries)


def _finding(facts: CollectionFacts, path: str, queries: list[Query]) -> Finding:
    evidence = query_evidence(queries)
    has_index = any(
        index.fields[:1] == (path,) and index.collation_strength in (1, 2) for index in facts.indexes
    )
    return Finding(
        RULE,
        facts.name,
        path,
        f"{path} was searched {evidence['queries']:,} times by a regular expression without case.",
        {**evidence, "an index without case": "there is one" if has_index else "there is none"},
        declare_indexes(facts, [model([(path, 1)], f"{path}_any_case", f", {COLLATION}")]),
        (f"Query with {COLLATION} and the plain value.",),
    )
