"""Reads of a document that need a few fields of another one each time."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import READ_TOGETHER_SHARE_MIN, READS_MIN, could_embed
from treadle.advisor.declare import (
    Source,
    can_declare,
    class_name,
    has_one_identity,
    quote,
    with_reference_type,
)
from treadle.advisor.facts import CollectionFacts, FieldFacts, Relation, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.relations import stem, subject, words
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import share

RULE = Rule(
    "extended-reference",
    "Extended Reference",
    "Every read does a second lookup",
    "Documents hold ids of another collection but none of its fields, and are read together with it.",
    "Keep the reference, and embed the two or three fields that readers need beside it.",
    "Each change of a copied field updates its copies; the copies take space.",
    "One read instead of two; no $lookup.",
    "Not for a field that changes constantly, and not where the second document is needed whole.",
)
CARD_FIELDS_MAX = 3
CARD_TYPES = frozenset({"string", "int", "long", "double", "decimal", "bool", "date"})
# Without a workload only several bare references, or a chain of them, are a symptom.
BARE_REFERENCES_MIN = 2
CHILDREN_MIN = 100
CHILDREN_PER_PARENT_MIN = 2
_HOT = ("name", "title", "label", "first_name", "firstName", "FirstName", "Name", "Title", "last_name",
        "LastName", "lastName", "username", "email", "status", "tier", "price", "sku", "slug")  # fmt: skip


def find(scan: Scan) -> Iterator[Finding]:
    bare = [relation for relation in scan.relations if _is_bare(scan, relation)]
    for relation in bare:
        fields = _hot_fields(scan, scan.collections[relation.parent])
        if not fields or not can_declare(scan, relation):
            continue
        if relation.child_reads >= READS_MIN:
            if relation.read_together >= READ_TOGETHER_SHARE_MIN * relation.child_reads:
                yield _finding(scan, relation, fields, seen=True)
        # What can be embedded whole needs no copy of its parent.
        elif scan.workload is None and _needs_lookups(bare, relation) and not could_embed(scan, relation):
            yield _finding(scan, relation, fields, seen=False)


def _is_bare(scan: Scan, relation: Relation) -> bool:
    """A single reference to another collection, with no copy of it beside it."""
    child, parent = scan.ends(relation)
    field = child.fields[relation.path]
    if relation.many or child is parent or relation.orphan_share > 0.5 or len(field.steps) > 1:
        return False
    return parent.count >= 2 and has_one_identity(parent) and not _has_copy(child, field, parent)


def _has_copy(child: CollectionFacts, reference: FieldFacts, parent: CollectionFacts) -> bool:
    """Whether an object or a flat field beside the reference already holds something of the parent."""
    about = {stem(reference.name), subject(parent.name)}
    copies = {_normal("".join(name) + each.name) for name in about for each in parent.top()}
    return any(
        ("object" in each.types and stem(each.name) in about) or _normal(each.name) in copies
        for each in child.top()
        if each.path != reference.path
    )


def _normal(name: str) -> str:
    return name.replace("_", "").lower()


def _needs_lookups(bare: list[Relation], relation: Relation) -> bool:
    """Whether reading the child whole takes several lookups, or a lookup of a lookup."""
    if relation.references < CHILDREN_MIN or relation.children.mean < CHILDREN_PER_PARENT_MIN:
        return False
    own = sum(each.child == relation.child for each in bare)
    return own >= BARE_REFERENCES_MIN or any(each.child == relation.parent for each in bare)


def _finding(scan: Scan, relation: Relation, fields: list[FieldFacts], seen: bool) -> Finding:
    child, parent = scan.ends(relation)
    evidence: Evidence = {
        "references": relation.references,
        "parents": relation.parents,
        "orphans": f"{relation.orphans:,} of {relation.checked:,} checked",
        "children per parent, median": relation.children.median,
        "children per parent, p99": relation.children.p99,
        "children per parent, max": relation.children.maximum,
    }
    if seen:
        evidence["reads in the workload"] = relation.child_reads
        evidence["of these, together with the parent"] = relation.read_together
        part = share(relation.read_together, relation.child_reads)
        summary = f"{part} of the reads of {child.name} also read {parent.name}."
    else:
        evidence["workload"] = "not seen"
        summary = f"{child.name} holds ids of {parent.name} but none of its fields, in a chain of references."
    return Finding(
        RULE,
        child.name,
        relation.path,
        summary,
        evidence,
        _declaration(child, parent, relation, fields),
        ("Run setup(), then rebuild() to fill the copies.",),
        severity="warning" if seen else "info",
        confidence="high" if seen else "low",
    )


def _hot_fields(scan: Scan, parent: CollectionFacts) -> list[FieldFacts]:
    """The parent's short, common, steady fields, the likeliest first."""
    counters = {name for each in scan.queries if each.collection == parent.name for name in each.increments}
    references = {each.path for each in scan.relations if each.child == parent.name}
    fields = [
        each
        for each in parent.top()
        if each.share > 0.9
        and len(each.value_types) == 1
        and each.type in CARD_TYPES
        and is_plain_name(each.name)
        and each.name not in counters | references
        and not each.name.lower().endswith("id")
    ]
    order = {name: number for number, name in enumerate(_HOT)}
    fields.sort(key=lambda each: (order.get(each.name, len(order)), each.type != "string"))
    return fields[:CARD_FIELDS_MAX]


def _declaration(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, fields: list[FieldFacts]
) -> str:
    source = Source()
    parent_class = source.document(parent)
    card = source.card(f"{class_name(parent.name)}Card", parent, fields)
    child = with_reference_type(child, relation.path, parent)
    about = "_".join(stem(relation.path)) or "card"
    shown = "_".join("_".join(words(each.name)) for each in fields)
    place = Source.new_name(child, about, f"{about}_card", f"{about}_{shown}")
    pattern = f"ExtendedReference({parent_class}, by={quote(Source.names(child)[relation.path])})"
    source.document(child, added=[f"{place}: Annotated[{card} | None, {pattern}] = None"])
    return source.text()
