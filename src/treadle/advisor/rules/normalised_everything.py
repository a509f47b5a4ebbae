"""A database laid out like tables: many small flat collections, joined at every read."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import READS_MIN, could_embed
from treadle.advisor.declare import Source, class_name
from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.wording import names, share, size

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
FINDINGS_MAX = 8


def find(scan: Scan) -> Iterator[Finding]:
    large = [facts for facts in scan.plain() if facts.count >= DOCUMENTS_MIN]
    related = {
        name for each in scan.relations for name in (each.child, each.parent) if each.child != each.parent
    }
    flat = [facts for facts in large if _is_flat(facts)]
    related_count = sum(facts.name in related for facts in flat)
    is_tables = (
        len(large) >= COLLECTIONS_MIN
        and related_count >= RELATED_SHARE_MIN * len(large)
        and len(flat) >= FLAT_SHARE_MIN * len(large)
    )
    small = [
        relation
        for relation in scan.relations
        if scan.collections[relation.child].count >= DOCUMENTS_MIN
        # Elsewhere a single collection of parts is a choice, unless the workload fetches them each time.
        and (is_tables or relation.read_by_parent >= READS_MIN)
        and could_embed(scan, relation)
    ]
    small.sort(key=lambda relation: (-relation.references, relation.child))
    for relation in small[:FINDINGS_MAX]:
        yield _finding(scan, len(large), len(flat), small, relation)


def _is_flat(facts: CollectionFacts) -> bool:
    return not any({"array", "object"} & set(each.types) for each in facts.top())


def _finding(scan: Scan, large: int, flat: int, small: list[Relation], first: Relation) -> Finding:
    reads: Evidence = {}
    if scan.workload is not None:
        reads = {
            f"reads of {first.child}": first.child_reads,
            "of these, with the parent": first.read_together,
        }
    child = scan.collections[first.child]
    size_max = first.children.maximum * child.mean_bytes
    return Finding(
        RULE,
        first.child,
        first.path,
        f"{flat} of {large} collections are flat and joined by references; the documents of "
        f"{first.child} belong into {first.parent}, {first.children.maximum:,.0f} at most into one.",
        {
            "collections": large,
            "flat ones": f"{flat} ({share(flat, large)})",
            "references between them": len(scan.relations),
            "children that could be embedded": names([f"{each.child} in {each.parent}" for each in small], 4),
            f"{first.child} per parent, median": first.children.median,
            f"{first.child} per parent, max": first.children.maximum,
            "bytes per parent, max": size(size_max),
            **reads,
        },
        _declaration(scan, first),
        (
            f"Copy each document of {first.child} into its parent's list; drop the collection when nothing "
            "reads it any more.",
        ),
        (first.parent,),
        confidence="high" if first.read_by_parent else "medium",
    )


def _declaration(scan: Scan, relation: Relation) -> str:
    source = Source()
    child, parent = scan.ends(relation)
    declarable = Source.names(child)
    fields = [each for each in child.top() if each.path != relation.path and each.name in declarable]
    place = Source.new_name(parent, child.name.rpartition(".")[2] or child.name)
    # A field of the same name would hide the class.
    name = class_name(child.name)
    item = source.card(f"{name}Item" if name == place else name, child, fields)
    source.document(parent, added=[f"{place}: list[{item}] = []"])
    return source.text()
