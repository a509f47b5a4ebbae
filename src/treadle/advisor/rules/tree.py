"""A hierarchy by parent references alone, walked level by level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, has_one_identity, python_name, quoted, referring
from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.relations import words
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import number, share

RULE = Rule(
    "tree",
    "Tree",
    "A hierarchy",
    "Documents name a parent in their own collection, and nothing tells a node's ancestors.",
    "Keep the ancestors in each node, so that a subtree or a path is one query.",
    "Moving a node rewrites its subtree.",
    "Ancestors, descendants and breadcrumbs in one indexed query; cycles are refused.",
    "Not where nobody asks for more than the direct children or parent.",
)
NODES_MIN = 50
DEPTH_MIN = 2
_KEPT = frozenset(
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
        # Ids of several types are to be mended first; `mixed-types` says so.
        if not has_one_identity(facts):
            continue
        if _is_kept(facts) or relation.key != "_id" or not is_plain_name(relation.path):
            continue
        yield _finding(scan, facts, relation)


def _is_kept(facts: CollectionFacts) -> bool:
    """Whether ancestors or paths are already stored."""
    return any("_".join(words(each.name)) in _KEPT for each in facts.top())


def _finding(scan: Scan, facts: CollectionFacts, relation: Relation) -> Finding:
    tree = facts.tree
    assert tree is not None
    evidence: dict[str, str | int | float] = {
        "nodes": facts.count,
        "roots": tree.roots,
        "depth, mean": round(tree.depth_mean, 1),
        "depth, max": tree.depth_max,
        "children per parent, median": relation.children.median,
        "children per parent, max": relation.children.maximum,
        "parents that do not exist": f"{relation.orphans:,} of {relation.checked:,} checked",
    }
    walked = 0
    if scan.workload is not None:
        walked = sum(
            query.count
            for query in scan.workload.queries
            if query.collection == facts.name and query.kind == "find" and query.filtered == (relation.path,)
        )
        evidence["reads of one level in the workload"] = walked
    if tree.cyclic:
        evidence["nodes on or below a cycle"] = tree.cyclic
    broken = tree.cyclic or relation.orphans
    return Finding(
        RULE,
        "problem" if tree.cyclic else "warning" if walked else "info",
        "high" if walked or tree.cyclic else "medium",
        facts.name,
        relation.path,
        f"{facts.count:,} nodes in {number(tree.roots)} trees, up to {tree.depth_max} levels below a root"
        + (f"; {tree.cyclic:,} lie on or below a cycle." if tree.cyclic else "."),
        evidence,
        _declaration(facts, relation),
        (
            *(
                (
                    f"Mend first what is broken ({share(relation.orphans, relation.checked)} of the "
                    "parents are missing).",
                )
                if broken
                else ()
            ),
            "Run setup(), then rebuild() to fill the ancestors.",
        ),
    )


def _declaration(facts: CollectionFacts, relation: Relation) -> str:
    source = Source()
    source.use("treadle", "AncestorArray")
    names = source.names(facts)
    place = python_name("ancestors", set(names.values()))
    kind = source.identity(facts)
    typed = referring(facts, relation.path, facts)
    # A root has no parent, even if no root was among the documents looked at.
    parent = typed.fields[relation.path]
    known = replace(parent, types={**parent.types, "null": 1}, looked_at=parent.present + 1)
    source.document(
        replace(typed, fields={**typed.fields, relation.path: known}),
        keywords=[f"tree=AncestorArray(parent={quoted(names[relation.path])}, ancestors={quoted(place)})"],
        added=(f"{place}: list[{kind}] = []",),
    )
    return source.text()
