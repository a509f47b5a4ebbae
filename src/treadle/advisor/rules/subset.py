"""A hot document that embeds, or is always read with, more than anyone looks at."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.array_lengths import arrays, verdict
from treadle.advisor.declare import (
    Source,
    can_declare,
    class_name,
    quote,
    snake_case,
)
from treadle.advisor.facts import CollectionFacts, Distribution, FieldFacts, Query, Relation, Scan
from treadle.advisor.interface import Evidence, Finding, Rule, children_evidence, length_evidence
from treadle.advisor.model_text import render
from treadle.advisor.naming import subject, words
from treadle.advisor.proposals import Derived, Draft
from treadle.advisor.wording import share, size
from treadle.advisor.workload import of_children

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
    for facts, array, lengths in arrays(scan):
        if verdict(facts, array, lengths) == "long":
            yield _long_array(scan, facts, array, lengths)
    for relation in scan.relations:
        if relation.child == relation.parent or not can_declare(scan, relation):
            continue
        asked = (*scan.queries, *of_children(scan.queries))
        queries = [query for query in asked if _reads_first_few(query, relation)]
        if sum(query.count for query in queries) >= READS_MIN and not _has_subset(scan, relation):
            yield _page_reads(scan, relation, queries)


# -- embedded arrays that are long in most documents ------------------------------------


def _long_array(scan: Scan, facts: CollectionFacts, array: FieldFacts, lengths: Distribution) -> Finding:
    pushes = scan.pushes(facts.name, array.path)
    evidence: Evidence = {
        **length_evidence(lengths),
        "document size, median": size(facts.sizes.median) if facts.sizes else "not measured",
        "document size, max": size(facts.sizes.maximum) if facts.sizes else "not measured",
    }
    if scan.workload is not None:
        evidence["pushes without a bound in the workload"] = pushes
    return Finding(
        RULE,
        facts.name,
        array.path,
        f"Half of the documents embed {lengths.median:,.0f} items or more, one has {lengths.maximum:,.0f}.",
        evidence,
        _long_array_declaration(facts, array),
        (
            f"Copy the items of {array.path} into the new collection, each with its parent's id.",
            "Then run setup() and rebuild(), and remove the old array.",
        ),
        confidence="high" if pushes else "medium",
    )


def _long_array_declaration(facts: CollectionFacts, array: FieldFacts) -> str:
    source = Source()
    owner = snake_case(facts.name, "parent")
    items = [
        FieldFacts(each.name, dict(each.types), each.looked_at, (each.name,), is_uuid=each.is_uuid)
        for each in facts.fields.values()
        if each.steps[:-1] == (*array.steps, "[]") and each.name not in ("_id", "[]")
    ]
    child = CollectionFacts(f"{owner}_{array.name}", fields={each.name: each for each in items})
    by = Source.new_name(child, f"{owner}_id", f"{owner}_reference")
    names = Source.names(child)
    child_class = source.document(child, added=[f"{by}: {Source.identity(facts)}"])
    dates = [names[each.name] for each in items if each.type == "date" and each.name in names]
    sort = quote(f"-{dates[0]}" if dates else "-id")
    card = source.card(f"{child_class}Card", child, _scalars(child)[:CARD_FIELDS_MAX])
    item = snake_case(array.name, "item")
    place = Source.new_name(facts, f"recent_{item}s", f"recent_{item}s_by_{'_'.join(words(by))}")
    pattern = f"Subset({child_class}, by={quote(by)}, sort={sort}, size={SIZE_DEFAULT})"
    source.document(
        facts,
        without=frozenset({array.steps[0]}) if len(array.steps) == 1 else frozenset(),
        added=[f"{place}: Annotated[", f"    list[{card}], {pattern}", "] = []"],
        name=class_name(facts.name),
    )
    return source.text()


def _scalars(facts: CollectionFacts) -> list[FieldFacts]:
    names = Source.names(facts)
    return [each for each in facts.top() if each.name in names and each.type not in ("array", "object")]


# -- children of which each page shows the first few --------------------------------------


def _reads_first_few(query: Query, relation: Relation) -> bool:
    return (
        query.collection == relation.child
        and query.kind in ("find", "aggregate")
        and relation.path in query.filter_paths
        and bool(query.sort)
        and 0 < query.limit <= SIZE_MAX
    )


def _has_subset(scan: Scan, relation: Relation) -> bool:
    """Whether the parent already embeds some of these children."""
    about = subject(relation.child)
    return any(
        each.type == "array" and about and subject(each.name)[-len(about) :] == about
        for each in scan.collections[relation.parent].top()
    )


def _page_reads(scan: Scan, relation: Relation, queries: list[Query]) -> Finding:
    child, parent = scan.ends(relation)
    commonest = max(queries, key=lambda query: query.count)
    reads = sum(query.count for query in queries)
    alone = scan.workload.count(child.name, ("find", "aggregate")) if scan.workload else 0
    all_reads = alone + sum(each.count for each in of_children(scan.queries) if each.collection == child.name)
    draft = Draft((_derived(child, parent, relation, commonest, _read_fields(queries)),))
    return Finding(
        RULE,
        child.name,
        relation.path,
        f"{share(reads, all_reads)} of the reads of {child.name} ask for the first {commonest.limit} of "
        "one parent.",
        {
            "such reads": reads,
            "reads of the collection": all_reads,
            "first": commonest.limit,
            **children_evidence(relation),
        },
        render(scan, draft),
        ("Run setup(), then rebuild() to fill the arrays.",),
        draft=draft,
    )


def _read_fields(queries: list[Query]) -> frozenset[str] | None:
    """The fields of the children that any of these reads shows; None where one shows all."""
    return (
        frozenset(name for query in queries for name in query.shown)
        if all(query.shown for query in queries)
        else None
    )


def _derived(
    child: CollectionFacts,
    parent: CollectionFacts,
    relation: Relation,
    query: Query,
    read: frozenset[str] | None,
) -> Derived:
    names = Source.names(child)
    sort = tuple(
        (path, way)
        for path, way in query.sort
        if path == "_id" or (path in names and not {"array", "object"} & set(child.fields[path].types))
    )
    fields = [each for each in _scalars(child) if each.path != relation.path]
    # What is never read would be copied at each change, for nothing.
    fields = [each for each in fields if read is None or each.name in read] or fields
    item, after = snake_case(child.name, "child"), "_".join(words(relation.path))
    return Derived(
        parent.name,
        Source.new_name(parent, f"recent_{item}s", f"recent_{item}s_by_{after}"),
        child.name,
        relation.path,
        relation.key,
        "top",
        tuple(each.name for each in fields[:CARD_FIELDS_MAX]),
        sort or (("_id", -1),),
        query.limit,
        Source.new_name(parent, f"recent_{item}s_by_{after}"),
    )
