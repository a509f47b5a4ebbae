"""A database laid out like tables: many small flat collections, joined at every read."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import could_embed
from treadle.advisor.declare import Source, class_name, python_name
from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import names, share

RULE = Rule(
    "normalised-everything",
    "anti-pattern",
    "Everything normalised",
    "Most collections are flat and refer to each other, and children that belong to one parent lie "
    "apart from it.",
    "Embed the few children that belong to one parent; keep references where there are many.",
    "Embedded children have no life of their own: what others refer to must stay apart.",
    "One read for what is read together, and one atomic write.",
    "Not where the children are read on their own, or others refer to them.",
)
COLLECTIONS_MIN = 4
FLAT_SHARE_MIN = 0.7
RELATED_SHARE_MIN = 0.7
DOCUMENTS_MIN = 20


def find(scan: Scan) -> Iterator[Finding]:
    large = [facts for facts in scan.plain() if facts.count >= DOCUMENTS_MIN]
    related = {
        name for each in scan.relations for name in (each.child, each.parent) if each.child != each.parent
    }
    flat = [facts for facts in large if _is_flat(facts)]
    joined = [facts for facts in flat if facts.name in related]
    if len(large) < COLLECTIONS_MIN or len(joined) < RELATED_SHARE_MIN * len(large):
        return
    if len(flat) < FLAT_SHARE_MIN * len(large):
        return
    small = [relation for relation in scan.relations if could_embed(scan, relation)]
    if not small:
        return
    yield _finding(scan, large, flat, small)


def _is_flat(facts: CollectionFacts) -> bool:
    return not any({"array", "object"} & set(each.types) for each in facts.top())


def _finding(
    scan: Scan, large: list[CollectionFacts], flat: list[CollectionFacts], small: list[Relation]
) -> Finding:
    first = max(small, key=lambda relation: (relation.references, relation.child))
    return Finding(
        RULE,
        "warning",
        "medium" if scan.workload is None else "high",
        first.child,
        first.path,
        f"{len(flat)} of {len(large)} collections are flat and joined by references; "
        f"{first.child} could be embedded in {first.parent}.",
        {
            "collections": len(large),
            "flat ones": f"{len(flat)} ({share(len(flat), len(large))})",
            "references between them": len(scan.relations),
            "children that could be embedded": names([f"{each.child} in {each.parent}" for each in small], 4),
            f"{first.child} per parent, median": first.children.median,
            f"{first.child} per parent, max": first.children.maximum,
        },
        _declaration(scan, first),
        (f"Copy each document of {first.child} into its parent's list, then drop the collection.",),
    )


def _declaration(scan: Scan, relation: Relation) -> str:
    source = Source()
    child, parent = scan.collections[relation.child], scan.collections[relation.parent]
    names_ = source.names(child)
    fields = [each for each in child.top() if each.path != relation.path and each.name in names_]
    item = source.card(class_name(child.name), child, fields)
    place = python_name(child.name.rpartition(".")[2] or child.name, set(source.names(parent).values()))
    source.document(parent, added=(f"{place}: list[{item}] = []",))
    return source.text()
