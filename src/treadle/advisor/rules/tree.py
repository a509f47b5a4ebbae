"""A hierarchy by parent references alone, walked level by level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, can_declare, quote, with_reference_type
from treadle.advisor.facts import CollectionFacts, Relation, Scan, TreeFacts
from treadle.advisor.interface import Evidence, Finding, Rule, children_evidence
from treadle.advisor.naming import words
from treadle.advisor.wording import number, share

RULE = Rule(
    "tree",
    "Tree",
    "A hierarchy",
    "Documents name a parent in their own collection, but not the ancestors above it.",
    "Keep the ancestors in each node, so that a subtree or a path is one query.",
    "Moving a node rewrites its subtree.",
    "Ancestors, descendants and breadcrumbs in one indexed query; cycles are refused.",
    "Not where requests ask for the direct children or parent only.",
)
NODES_MIN = 50
DEPTH_MIN = 2
_ANCESTOR_NAMES = frozenset(
    {"ancestors", "path", "materialized_path", "materialised_path", "parents", "lineage", "breadcrumbs"}
)


def find(scan: Scan) -> Iterator[Finding]:
    for relation in scan.relations:
        facts = scan.collections[relation.child]
        tree = facts.tree
        if tree is None or relation.path != tree.parent or facts.count < NODES_MIN:
            continue
        if tree.depth_max < DEPTH_MIN and tree.looked_at:
            continue
        if not _stores_ancestors(facts) and relation.key == "_id" and can_declare(scan, relation):
            yield _finding(scan, facts, tree, relation)


def _stores_ancestors(facts: CollectionFacts) -> bool:
    return any("_".join(words(each.name)) in _ANCESTOR_NAMES for each in facts.top())


def _finding(scan: Scan, facts: CollectionFacts, tree: TreeFacts, relation: Relation) -> Finding:
    evidence: Evidence = {
        "nodes": facts.count,
        "roots": tree.roots,
        "depth, mean": round(tree.depth_mean, 1),
        "depth, max": tree.depth_max,
        **children_evidence(relation),
        "parents that do not exist": f"{relation.orphans:,} of {relation.checked:,} checked",
    }
    reads = sum(
        query.count
        for query in scan.queries
        if query.collection == facts.name and query.kind == "find" and query.filter_paths == (relation.path,)
    )
    if scan.workload is not None:
        evidence["reads of one level in the workload"] = reads
    steps = ["Run setup(), then rebuild() to fill the ancestors."]
    if tree.cyclic or relation.orphans:
        missing = share(relation.orphans, relation.checked)
        steps.insert(0, f"First repair what is broken ({missing} of the parents are missing).")
    cycle = ""
    if tree.cyclic:
        evidence["nodes on or below a cycle"] = tree.cyclic
        cycle = f"; {tree.cyclic:,} lie on or below a cycle"
    return Finding(
        RULE,
        facts.name,
        relation.path,
        f"{facts.count:,} nodes in {number(tree.roots)} trees, up to {tree.depth_max} levels below a root"
        f"{cycle}.",
        evidence,
        _declaration(facts, relation),
        tuple(steps),
        severity="problem" if tree.cyclic else "warning" if reads else "info",
        confidence="high" if reads or tree.cyclic else "medium",
    )


def _declaration(facts: CollectionFacts, relation: Relation) -> str:
    source = Source()
    place = Source.new_name(facts, "ancestors")
    parent = quote(Source.names(facts)[relation.path])
    typed = with_reference_type(facts, relation.path, facts)
    # A root has no parent, even if no root was among the documents looked at.
    field = typed.fields[relation.path]
    optional = replace(field, types={**field.types, "null": 1}, looked_at=field.present + 1)
    source.document(
        replace(typed, fields={**typed.fields, relation.path: optional}),
        keywords=[f"tree=AncestorArray(parent={parent}, ancestors={quote(place)})"],
        added=[f"{place}: list[{Source.identity(facts)}] = []"],
    )
    return source.text()
