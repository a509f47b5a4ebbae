"""A hot document that embeds, or is always read with, more than anyone looks at."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.arrays import arrays, verdict
from treadle.advisor.declare import (
    Source,
    class_name,
    has_one_identity,
    python_name,
    quoted,
    referring,
)
from treadle.advisor.facts import CollectionFacts, FieldFacts, Query, Relation, Scan
from treadle.advisor.relations import subject
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import share, size

RULE = Rule(
    "subset",
    "Subset",
    "An array grows without bound in a hot document",
    "Documents embed long arrays of sub-documents, or each read of a parent asks for its newest few "
    "children.",
    "Keep all of them in a collection of their own, and the first few embedded in the parent.",
    "Each new child also updates its parent; the children need a collection and an index.",
    "Small documents that stay in memory; one read for the usual page.",
    "Not where all items are always read together and stay few, nor where the number shown keeps changing.",
)
READS_MIN = 10
SIZE_DEFAULT = 10
SIZE_MAX = 100
CARD_FIELDS_MAX = 6


def find(scan: Scan) -> Iterator[Finding]:
    for facts, array in arrays(scan):
        if verdict(facts, array) == "long":
            yield _embedded(scan, facts, array)
    for relation in scan.relations:
        if relation.many or relation.key != "_id" or relation.child == relation.parent:
            continue
        if relation.path not in scan.collections[relation.child].fields or not is_plain_name(relation.path):
            continue
        # Ids of several types are to be mended first; `mixed-types` says so.
        if not has_one_identity(scan.collections[relation.parent]):
            continue
        queries = _first_few(scan, relation)
        if sum(query.count for query in queries) >= READS_MIN and not _has_subset(scan, relation):
            yield _read(scan, relation, queries)


# -- embedded arrays that are long as a rule --------------------------------------------


def _embedded(scan: Scan, facts: CollectionFacts, array: FieldFacts) -> Finding:
    lengths = array.lengths
    assert lengths is not None
    evidence: dict[str, str | int | float] = {
        "documents": lengths.count,
        "items, median": lengths.median,
        "items, p99": lengths.p99,
        "items, max": lengths.maximum,
        "document size, median": size(facts.sizes.median) if facts.sizes else "not measured",
        "document size, max": size(facts.sizes.maximum) if facts.sizes else "not measured",
    }
    pushes = 0
    if scan.workload is not None:
        pushes = sum(
            query.count
            for query in scan.workload.queries
            if query.collection == facts.name and array.path in query.pushes
        )
        evidence["pushes without a bound in the workload"] = pushes
    return Finding(
        RULE,
        "warning",
        "high" if pushes else "medium",
        facts.name,
        array.path,
        f"Half of the documents embed {lengths.median:,.0f} items or more, one has {lengths.maximum:,.0f}.",
        evidence,
        _embedded_declaration(facts, array),
        (
            f"Copy the items of {array.path} into the new collection, each with its parent's id.",
            "Then run setup() and rebuild(), and remove the old array.",
        ),
    )


def _embedded_declaration(facts: CollectionFacts, array: FieldFacts) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("treadle", "Document", "Id", "Subset")
    parent = class_name(facts.name)
    inside = CollectionFacts(
        f"{'_'.join(subject(facts.name)) or 'parent'}_{array.name}",
        fields={each.name: _lifted(each, array) for each in facts.fields.values() if _is_item(each, array)},
    )
    names = source.names(inside)
    taken = set(names.values())
    by = python_name(f"{'_'.join(subject(facts.name)) or 'parent'}_id", taken)
    kind = source.identity(facts)
    child = source.document(inside, added=(f"{by}: {kind}",))
    dates = [each for each in inside.top() if each.type == "date"]
    sort = f"-{names[dates[0].name]}" if dates and dates[0].name in names else "-id"
    fields = [each for each in inside.top() if each.name in names and each.type not in ("array", "object")]
    card = source.card(f"{child}Card", inside, fields[:CARD_FIELDS_MAX])
    outer = source.names(facts)
    place = python_name(f"recent_{'_'.join(subject(array.name)) or 'item'}s", set(outer.values()))
    source.document(
        facts,
        without=frozenset({array.steps[0]}) if len(array.steps) == 1 else frozenset(),
        added=(
            f"{place}: Annotated[",
            f"    list[{card}], Subset({child}, by={quoted(by)}, sort={quoted(sort)}, size={SIZE_DEFAULT})",
            "] = []",
        ),
        name=parent,
    )
    return source.text()


def _is_item(each: FieldFacts, array: FieldFacts) -> bool:
    return (
        len(each.steps) == len(array.steps) + 2
        and each.steps[: len(array.steps)] == array.steps
        and each.name not in ("_id", "[]")
    )


def _lifted(each: FieldFacts, array: FieldFacts) -> FieldFacts:
    return FieldFacts(each.name, dict(each.types), each.looked_at, (each.name,), is_uuid=each.is_uuid)


# -- children of which each page shows the first few --------------------------------------


def _first_few(scan: Scan, relation: Relation) -> list[Query]:
    if scan.workload is None:
        return []
    return [
        query
        for query in scan.workload.queries
        if query.collection == relation.child
        and query.kind in ("find", "aggregate")
        and relation.path in query.filtered
        and query.sorted_by
        and 0 < query.limit <= SIZE_MAX
    ]


def _has_subset(scan: Scan, relation: Relation) -> bool:
    """Whether the parent already embeds some of these children."""
    parent, child = scan.collections[relation.parent], scan.collections[relation.child]
    about = subject(child.name)
    return any(
        each.type == "array" and about and subject(each.name)[-len(about) :] == about for each in parent.top()
    )


def _read(scan: Scan, relation: Relation, queries: list[Query]) -> Finding:
    child, parent = scan.collections[relation.child], scan.collections[relation.parent]
    usual = max(queries, key=lambda query: query.count)
    reads = sum(query.count for query in queries)
    all_reads = scan.workload.of(child.name, ("find", "aggregate")) if scan.workload else reads
    return Finding(
        RULE,
        "warning",
        "high",
        child.name,
        relation.path,
        f"{share(reads, all_reads)} of the reads of {child.name} ask for the first {usual.limit} of "
        "one parent.",
        {
            "such reads": reads,
            "reads of the collection": all_reads,
            "first": usual.limit,
            "children per parent, median": relation.children.median,
            "children per parent, max": relation.children.maximum,
        },
        _read_declaration(child, parent, relation, usual),
        ("Run setup(), then rebuild() to fill the arrays.",),
    )


def _read_declaration(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, query: Query
) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("treadle", "Subset")
    child = referring(child, relation.path, parent)
    child_class = source.document(child)
    names = source.names(child)
    sort = [
        ("-" if way < 0 else "") + ("id" if path == "_id" else names[path])
        for path, way in query.sorted_by
        if path == "_id" or (path in names and not {"array", "object"} & set(child.fields[path].types))
    ]
    scalar = [each for each in child.top() if each.name in names and each.type not in ("array", "object")]
    fields = [each for each in scalar if each.path != relation.path][:CARD_FIELDS_MAX]
    card = source.card(f"{child_class}Card", child, fields)
    place = python_name(
        f"recent_{'_'.join(subject(child.name)) or 'child'}s", set(source.names(parent).values())
    )
    order = quoted(sort[0]) if len(sort) == 1 else "[" + ", ".join(map(quoted, sort or ["-id"])) + "]"
    by = quoted(names[relation.path])
    source.document(
        parent,
        added=(
            f"{place}: Annotated[",
            f"    list[{card}], Subset({child_class}, by={by}, sort={order}, size={query.limit})",
            "] = []",
        ),
    )
    return source.text()
