"""Queries that read a whole collection to return a little of it."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import free_name
from treadle.advisor.facts import CollectionFacts, Query, Scan
from treadle.advisor.interface import Finding, Rule, query_evidence
from treadle.advisor.model_text import render
from treadle.advisor.proposals import Draft, Index, Keys
from treadle.advisor.structure import is_known, query_path

RULE = Rule(
    "query-without-index",
    "anti-pattern",
    "Queries without an index",
    "The workload has queries that scan a collection and return a small part of it.",
    "Create an index on the filtered fields, then the sorted ones.",
    "Each write also maintains the index.",
    "The server examines little more than it returns.",
    "Not for a nightly job that reads most of the collection anyway.",
)
EXAMINED_MIN = 1_000
EXAMINED_PER_RETURNED_MIN = 100
FIELDS_MAX = 4


def find(scan: Scan) -> Iterator[Finding]:
    shapes: dict[tuple[str, tuple[str, ...], Keys], list[Query]] = {}
    for query in scan.queries:
        few = query.grouped or query.examined >= EXAMINED_PER_RETURNED_MIN * max(1, query.returned)
        scans = query.collection_scan and query.filter_paths and query.examined >= EXAMINED_MIN * query.count
        if few and scans:
            shapes.setdefault((query.collection, query.filter_paths, query.sort), []).append(query)
    for (collection, paths, sort), queries in sorted(shapes.items()):
        facts = scan.collections.get(collection)
        # Keys that are data cannot be indexed, and must not be shown.
        if facts is None or not facts.plain or not all(is_known(facts, path) for path in paths):
            continue
        if not _is_served(facts, paths):
            yield _finding(scan, facts, paths, sort, queries)


def _is_served(facts: CollectionFacts, paths: tuple[str, ...]) -> bool:
    """Whether an index has been made since the query was recorded."""
    return any(
        index.fields
        and index.fields[0] in paths
        and not (index.partial or index.special or index.collation_strength or index.hidden)
        for index in facts.indexes
    )


def _index_keys(facts: CollectionFacts, paths: tuple[str, ...], sort: Keys) -> list[tuple[str, int]]:
    """The filter's fields, then the sort's; one array at most, since the server indexes no two together."""
    sort = tuple(pair for pair in sort if pair[0] not in paths and is_known(facts, pair[0]))
    arrays = {
        query_path(each.steps) for each in facts.fields.values() if "array" in each.types or each.in_array
    }
    keys: list[tuple[str, int]] = []
    roots: set[str] = set()
    for path, way in (*((path, 1) for path in paths[:FIELDS_MAX]), *sort[:FIELDS_MAX]):
        root = path.partition(".")[0]
        if path in arrays and roots - {root}:
            continue
        if path in arrays:
            roots.add(root)
        keys.append((path, way))
    return keys


def _finding(
    scan: Scan, facts: CollectionFacts, paths: tuple[str, ...], sort: Keys, queries: list[Query]
) -> Finding:
    evidence = query_evidence(queries)
    keys = _index_keys(facts, paths, sort)
    draft = Draft(indexes=(Index(facts.name, tuple(keys), free_name(facts, keys)),))
    return Finding(
        RULE,
        facts.name,
        ", ".join(paths),
        f"{evidence['queries']:,} queries by {', '.join(paths)} examined "
        f"{evidence['documents examined per query']} documents each and returned "
        f"{evidence['documents returned per query']}.",
        {**evidence, "documents in the collection": facts.count},
        render(scan, draft),
        ("setup() creates the index.",),
        draft=draft,
    )
