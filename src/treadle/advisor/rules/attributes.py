"""Dozens of sparse fields that are searched for in turn, each with an index of its own."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source, quote
from treadle.advisor.facts import READS, CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.structure import Steps, has_plain_path, label, query_path
from treadle.advisor.wording import names, share, size

RULE = Rule(
    "attributes",
    "Attributes",
    "Dozens of sparse fields, each with an index of its own",
    "Many fields that few documents have are searched for in turn, and each has its own index.",
    "Store them as pairs of name and value in one array, under one index.",
    "Filters become $elemMatch, which Treadle writes; a sort by an attribute uses no index.",
    "One index instead of dozens; a new attribute needs none.",
    "Not for fields that nearly all documents have, nor for a handful.",
)
SPARSE_SHARE_MAX = 0.5
INDEXED_MIN = 8
QUERIED_MIN = 3
DOCUMENTS_MIN = 100
_TYPES = {
    "string": "str",
    "int": "int",
    "long": "int",
    "double": "float",
    "bool": "bool",
    "date": "datetime",
    "decimal": "Decimal",
    "objectId": "Id",
}


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        if facts.count < DOCUMENTS_MIN:
            continue
        holders: dict[Steps, list[FieldFacts]] = {}
        for each in facts.fields.values():
            if _is_sparse(each):
                holders.setdefault(each.steps[:-1], []).append(each)
        for holder, sparse in holders.items():
            indexed = [each for each in sparse if _has_own_index(facts, each)]
            if len(indexed) < INDEXED_MIN:
                continue
            queried = _queried(scan, facts, sparse)
            # A workload that asks for none of them shows indexes that are not needed.
            if scan.workload is None or len(queried) >= QUERIED_MIN:
                yield _finding(scan, facts, holder, sparse, indexed, queried)


def _is_sparse(each: FieldFacts) -> bool:
    is_scalar = bool(each.value_types) and set(each.value_types) <= set(_TYPES)
    fits = len(each.steps) in (1, 2) and not each.in_array and has_plain_path(each)
    return is_scalar and fits and each.path != "_id" and each.share <= SPARSE_SHARE_MAX


def _has_own_index(facts: CollectionFacts, each: FieldFacts) -> bool:
    path = query_path(each.steps)
    return any(
        index.fields == (path,) and not (index.unique or index.expires or index.special)
        for index in facts.indexes
    )


def _queried(scan: Scan, facts: CollectionFacts, sparse: list[FieldFacts]) -> dict[str, int]:
    """How often the workload filters by each of the fields."""
    paths = {query_path(each.steps) for each in sparse}
    counts: dict[str, int] = {}
    for query in scan.queries:
        if query.collection == facts.name and query.kind in READS:
            for path in paths & set(query.filter_paths):
                counts[path] = counts.get(path, 0) + query.count
    return counts


def _finding(
    scan: Scan,
    facts: CollectionFacts,
    holder: Steps,
    sparse: list[FieldFacts],
    indexed: list[FieldFacts],
    queried: dict[str, int],
) -> Finding:
    paths = {query_path(each.steps) for each in indexed}
    own = [index for index in facts.indexes if len(index.fields) == 1 and index.fields[0] in paths]
    evidence: Evidence = {
        "documents": facts.count,
        "sparse fields": len(sparse),
        "of these, with an index of their own": len(indexed),
        "documents with the commonest": share(max(each.share for each in sparse), 1),
        "fields": names(sorted(paths)),
        "size of their indexes": size(sum(index.bytes or 0 for index in own)),
    }
    if scan.workload is not None:
        evidence["fields that the workload searches by"] = len(queried)
        evidence["such reads"] = sum(queried.values())
    else:
        evidence["used since the server began to count"] = sum(bool(index.uses) for index in own)
    place = label(holder)
    return Finding(
        RULE,
        facts.name,
        place,
        f"{len(sparse)} fields that few documents have are searched for in turn, {len(indexed)} of them "
        "under an index of their own.",
        evidence,
        _declaration(facts, holder, sparse),
        (
            "Write each of these fields as a pair {k, v} into the array, then drop the fields and their "
            "indexes.",
        ),
        severity="warning" if queried else "info",
        confidence="high" if queried else "medium",
    )


def _declaration(facts: CollectionFacts, holder: Steps, sparse: list[FieldFacts]) -> str:
    source = Source()
    types = sorted({_TYPES[kind] for each in sparse for kind in each.value_types})
    annotation = f"Annotated[dict[str, {' | '.join(types)}], Attributes()]"
    if holder:
        name = Source.names(facts)[holder[0]]
        default = "{}" if name == holder[0] else f"Field({{}}, alias={quote(holder[0])})"
        source.document(facts, without=frozenset(holder), added=[f"{name}: {annotation} = {default}"])
    else:
        without = frozenset(each.name for each in sparse)
        place = Source.new_name(facts, "attributes")
        source.document(facts, without=without, added=[f"{place}: {annotation} = {{}}"])
    return source.text()
