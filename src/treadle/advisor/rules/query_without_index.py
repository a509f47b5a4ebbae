"""Queries that read a whole collection to return a little of it."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor import structure
from treadle.advisor.facts import CollectionFacts, Query, Scan
from treadle.advisor.index_models import declared, free_name, model
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import number

RULE = Rule(
    "query-without-index",
    "anti-pattern",
    "Queries without an index",
    "The workload has queries that scan a collection and return a small part of it.",
    "Make an index on what is filtered, then sorted.",
    "Each write also maintains the index.",
    "Documents examined fall to about those returned.",
    "Not for a nightly job that reads most of the collection anyway.",
)
EXAMINED_MIN = 1_000
EXAMINED_PER_RETURNED_MIN = 100
FIELDS_MAX = 4


def find(scan: Scan) -> Iterator[Finding]:
    if scan.workload is None:
        return
    shapes: dict[tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]], list[Query]] = {}
    for query in scan.workload.queries:
        few = query.grouped or query.examined >= EXAMINED_PER_RETURNED_MIN * max(1, query.returned)
        if query.collection_scan and query.filtered and few and query.examined >= EXAMINED_MIN * query.count:
            shapes.setdefault((query.collection, query.filtered, query.sorted_by), []).append(query)
    for (collection, filtered, order), queries in sorted(shapes.items()):
        facts = scan.collections.get(collection)
        # Keys that are data make no index; nor are they to be shown.
        nameable = facts is not None and all(structure.is_known(facts, path) for path in filtered)
        if facts is not None and facts.plain and nameable and not _is_served(facts, filtered):
            yield _finding(facts, filtered, order, queries)


def _is_served(facts: CollectionFacts, filtered: tuple[str, ...]) -> bool:
    """Whether an index has come since the query was recorded."""
    return any(
        index.fields
        and index.fields[0] in filtered
        and not (index.partial or index.special or index.collation_strength)
        for index in facts.indexes
    )


def _keys(
    facts: CollectionFacts, filtered: tuple[str, ...], order: tuple[tuple[str, int], ...]
) -> list[tuple[str, int]]:
    """What is filtered, then what is sorted by; of arrays one, for the server indexes no two together."""
    wanted = [(path, 1) for path in filtered[:FIELDS_MAX]]
    sorts = [pair for pair in order if pair[0] not in filtered and structure.is_known(facts, pair[0])]
    wanted += sorts[:FIELDS_MAX]
    arrays = {
        structure.queried(each.steps)
        for each in facts.fields.values()
        if "array" in each.types or each.in_array
    }
    kept: list[tuple[str, int]] = []
    roots: set[str] = set()
    for path, way in wanted:
        if path in arrays:
            if roots - {path.partition(".")[0]}:
                continue
            roots.add(path.partition(".")[0])
        kept.append((path, way))
    return kept


def _finding(
    facts: CollectionFacts,
    filtered: tuple[str, ...],
    order: tuple[tuple[str, int], ...],
    queries: list[Query],
) -> Finding:
    count = sum(query.count for query in queries)
    examined, returned = sum(query.examined for query in queries), sum(query.returned for query in queries)
    keys = _keys(facts, filtered, order)
    return Finding(
        RULE,
        "warning",
        "high",
        facts.name,
        ", ".join(filtered),
        f"{count:,} queries by {', '.join(filtered)} examined {number(examined / count)} documents each "
        f"and returned {number(returned / count)}.",
        {
            "queries": count,
            "documents examined per query": number(examined / count),
            "documents returned per query": number(returned / count),
            "milliseconds per query": round(sum(query.milliseconds for query in queries) / count, 1),
            "documents in the collection": facts.count,
        },
        declared(facts, [model(keys, free_name(facts, keys))]),
        ("setup() makes the index.",),
    )
