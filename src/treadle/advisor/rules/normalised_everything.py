"""A database laid out like tables: many small flat collections, joined at every read."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import could_embed
from treadle.advisor.declare import Source, class_name
from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import names, share

RULE = Rule(
    "normalised-everything",
    "anti-pattern",
    "Everything normalised",
    "Most collections are flat and refer to each other, and children of a single parent are stored "
    "apart from it.",
    "Embed the few children that belong to one parent; keep references where there are many.",
    "Nothing else can refer to embedded children; those that others refer to must stay apart.",
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
    related_count = sum(facts.name in related for facts in flat)
    if len(large) < COLLECTIONS_MIN or related_count < RELATED_SHARE_MIN * len(large):
        return
    small = [relation for relation in scan.relations if could_embed(scan, relation)]
    if small and len(flat) >= FLAT_SHARE_MIN * len(large):
        yield _finding(scan, len(large), len(flat), small)


def _is_flat(facts: CollectionFacts) -> bool:
    return not any({"array", "object"} & set(each.types) for each in facts.top())


def _finding(scan: Scan, large: int, flat: int, small: list[Relation]) -> Finding:
    first = max(small, key=lambda relation: (relation.references, relation.child))
    return Finding(
        RULE,
        first.child,
        first.path,
        f"{flat} of {large} collections are flat and joined by references; "
        f"{first.child} could be embedded in {first.parent}.",
        {
            "collections": large,
            "flat ones": f"{flat} ({share(flat, large)})",
            "references between them": len(scan.relations),
            "children that could be embedded": names([f"{each.child} in {each.parent}" for each in small], 4),
            f"{first.child} per parent, median": first.children.median,
            f"{first.child} per parent, max": first.children.maximum,
        },
        _declaration(scan, first),
        (f"Copy each document of {first.child} into its parent's list, then drop the collection.",),
        confidence="medium" if scan.workload is None else "high",
    )


def _declaration(scan: Scan, relation: Relation) -> str:
    source = Source()
    child, parent = scan.ends(relation)
    declarable = Source.names(child)
    fields = [each for each in child.top() if each.path != relation.path and each.name in declarable]
    item = source.card(class_name(child.name), child, fields)
    place = Source.new_name(parent, child.name.rpartition(".")[2] or child.name)
    source.document(parent, added=[f"{place}: list[{item}] = []"])
    return source.text()
