"""Reads of a document that need a few fields of another one each time."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import READ_TOGETHER_SHARE_MIN, READS_MIN, could_embed
from treadle.advisor.declare import (
    Source,
    class_name,
    has_one_identity,
    python_name,
    quoted,
    referring,
)
from treadle.advisor.facts import CollectionFacts, FieldFacts, Relation, Scan
from treadle.advisor.relations import stem, subject
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import share

RULE = Rule(
    "extended-reference",
    "Extended Reference",
    "Every read does a second lookup",
    "Documents hold another collection's ids and nothing else of it, and are read together with it.",
    "Keep the reference, and embed the two or three fields that readers want beside it.",
    "Each change of a copied field updates its copies; the copies take space.",
    "One read instead of two; no $lookup.",
    "Not for a field that changes constantly, and not where the second document is needed whole.",
)
CARD_FIELDS_MAX = 3
CARD_TYPES = frozenset({"string", "int", "long", "double", "decimal", "bool", "date"})
# Without a workload only a chain or a knot of bare references is a symptom.
BARE_REFERENCES_MIN = 2
CHILDREN_MIN = 100
CHILDREN_PER_PARENT_MIN = 2
_HOT = ("name", "title", "label", "first_name", "firstName", "FirstName", "Name", "Title", "last_name",
        "LastName", "lastName", "username", "email", "status", "tier", "price", "sku", "slug")  # fmt: skip


def find(scan: Scan) -> Iterator[Finding]:
    bare = [relation for relation in scan.relations if _is_bare(scan, relation)]
    for relation in bare:
        seen = relation.child_reads >= READS_MIN
        if seen and relation.read_together < READ_TOGETHER_SHARE_MIN * relation.child_reads:
            continue
        if not seen and (scan.workload is not None or not _knotted(bare, relation)):
            continue
        # What can be embedded whole needs no copy of its parent.
        if not seen and could_embed(scan, relation):
            continue
        made = _finding(scan, relation, seen)
        if made is not None:
            yield made


def _is_bare(scan: Scan, relation: Relation) -> bool:
    """A single reference to another collection, with no copy of it beside it."""
    if relation.many or relation.child == relation.parent or relation.orphan_share > 0.5:
        return False
    child = scan.collections[relation.child]
    field = child.fields[relation.path]
    if len(field.steps) > 1 or scan.collections[relation.parent].count < 2:
        return False
    # Ids of several types are to be mended first; `mixed-types` says so.
    if not has_one_identity(scan.collections[relation.parent]):
        return False
    return not _has_copy(child, field, scan.collections[relation.parent])


def _has_copy(child: CollectionFacts, reference: FieldFacts, parent: CollectionFacts) -> bool:
    """Whether an object or a flat field beside the reference already holds something of the parent."""
    about = {stem(reference.name), subject(parent.name)}
    known = {each.name for each in parent.top()}
    for each in child.fields.values():
        if each.path == reference.path or len(each.steps) > 2:
            continue
        if "object" in each.types and len(each.steps) == 1 and stem(each.name) in about:
            return True
        for words_ in about:
            for name in known:
                if (
                    len(each.steps) == 1
                    and each.name.replace("_", "").lower()
                    == ("".join(words_) + name).replace("_", "").lower()
                ):
                    return True
    return False


def _knotted(bare: list[Relation], relation: Relation) -> bool:
    """Whether reading the child whole takes several lookups, or a lookup of a lookup."""
    if relation.references < CHILDREN_MIN or relation.children.mean < CHILDREN_PER_PARENT_MIN:
        return False
    own = sum(each.child == relation.child for each in bare)
    chained = any(each.child == relation.parent for each in bare)
    return own >= BARE_REFERENCES_MIN or chained


def _finding(scan: Scan, relation: Relation, seen: bool) -> Finding | None:
    child, parent = scan.collections[relation.child], scan.collections[relation.parent]
    fields = _hot_fields(scan, parent, relation)
    if relation.key != "_id" or not fields or not is_plain_name(relation.path):
        return None
    evidence: dict[str, str | int | float] = {
        "references": relation.references,
        "parents": relation.parents,
        "orphans": f"{relation.orphans:,} of {relation.checked:,} checked",
        "children per parent, median": relation.children.median,
        "children per parent, p99": relation.children.p99,
        "children per parent, max": relation.children.maximum,
    }
    if seen:
        evidence["reads in the workload"] = relation.child_reads
        evidence["of them with the parent"] = relation.read_together
        text = (
            f"{share(relation.read_together, relation.child_reads)} of the reads of {child.name} "
            f"also read {parent.name}."
        )
    else:
        evidence["workload"] = "not seen"
        text = (
            f"{child.name} holds nothing of {parent.name} but its ids, and is part of a chain of references."
        )
    return Finding(
        RULE,
        "warning" if seen else "info",
        "high" if seen else "low",
        child.name,
        relation.path,
        text,
        evidence,
        _declaration(child, parent, relation, fields),
        ("Run setup(), then rebuild() to fill the copies.",),
    )


def _hot_fields(scan: Scan, parent: CollectionFacts, relation: Relation) -> list[FieldFacts]:
    """The parent's short, usual, steady fields, the likeliest first."""
    counted: set[str] = set()
    if scan.workload is not None:
        for query in scan.workload.queries:
            if query.collection == parent.name:
                counted.update(query.increments)
    referring = {each.path for each in scan.relations if each.child == parent.name}
    found = [
        each
        for each in parent.top()
        if each.share > 0.9
        and len(each.filled) == 1
        and each.type in CARD_TYPES
        and is_plain_name(each.name)
        and each.path not in referring
        and each.name not in counted
        and not each.name.lower().endswith("id")
    ]
    order = {name: number for number, name in enumerate(_HOT)}
    found.sort(key=lambda each: (order.get(each.name, len(order)), each.type != "string"))
    return found[:CARD_FIELDS_MAX]


def _declaration(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, fields: list[FieldFacts]
) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("treadle", "ExtendedReference")
    parent_class = source.document(parent)
    card = source.card(f"{class_name(parent.name)}Card", parent, fields)
    child = referring(child, relation.path, parent)
    names = source.names(child)
    about = "_".join(stem(relation.path)) or "card"
    place = python_name(about, set(names.values()))
    by = names[relation.path]
    source.document(
        child,
        added=(
            f"{place}: Annotated[{card} | None, ExtendedReference({parent_class}, by={quoted(by)})] = None",
        ),
    )
    return source.text()
