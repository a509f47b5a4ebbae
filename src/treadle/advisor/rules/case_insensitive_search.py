"""Case-insensitive regular expressions, which no ordinary index serves."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declare_indexes, index_model
from treadle.advisor.facts import Query, Scan
from treadle.advisor.interface import Finding, Rule, query_evidence
from treadle.advisor.structure import is_known

RULE = Rule(
    "case-insensitive-search",
    "anti-pattern",
    "Case-insensitive search by regular expression",
    "Queries use $regex with the option i.",
    "Make an index with a collation that ignores case, and query by equality with that collation.",
    "One more index; queries must name the collation.",
    "An index lookup instead of a scan of every key.",
    "Not for searching words inside text: that needs a text index.",
)
QUERIES_MIN = 5
COLLATION = 'collation={"locale": "en", "strength": 2}'


def find(scan: Scan) -> Iterator[Finding]:
    searches: dict[tuple[str, str], list[Query]] = {}
    for query in scan.queries:
        for path in query.case_insensitive:
            searches.setdefault((query.collection, path), []).append(query)
    for (collection, path), queries in sorted(searches.items()):
        count = sum(query.count for query in queries)
        facts = scan.collections.get(collection)
        if count < QUERIES_MIN or facts is None or not facts.plain or not is_known(facts, path):
            continue
        indexes = [each for each in facts.indexes if each.fields[:1] == (path,)]
        has_index = any(index.collation_strength in (1, 2) for index in indexes)
        yield Finding(
            RULE,
            facts.name,
            path,
            f"{path} was searched {count:,} times by a case-insensitive regular expression.",
            {
                **query_evidence(queries),
                "case-insensitive index": "exists" if has_index else "missing",
            },
            declare_indexes(facts, [index_model([(path, 1)], f"{path}_any_case", f", {COLLATION}")]),
            (f"Query with {COLLATION} and the plain value.",),
        )
