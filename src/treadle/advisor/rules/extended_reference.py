"""Reads of a document that need a few fields of another one each time, and copies that nothing maintains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from treadle.advisor.copies import NAMES
from treadle.advisor.decide import READ_TOGETHER_SHARE_MIN, READS_MIN, could_embed, link_ends
from treadle.advisor.declare import (
    Source,
    can_declare,
    has_one_key,
    quote,
    reference_keywords,
    with_reference_type,
)
from treadle.advisor.facts import CollectionFacts, Copy, FieldFacts, Relation, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.model_text import render
from treadle.advisor.naming import last_word, stem, subject, words
from treadle.advisor.proposals import Derived, Draft
from treadle.advisor.structure import is_plain_name, label
from treadle.advisor.wording import share

RULE = Rule(
    "extended-reference",
    "Extended Reference",
    "Every read does a second lookup",
    "Documents hold ids of another collection but none of its fields, and are read together with it; or "
    "they hold copies of its fields that nothing maintains.",
    "Keep the reference, and embed the two or three fields that readers need beside it.",
    "Each change of a copied field updates its copies; the copies take space.",
    "One read instead of two; no $lookup.",
    "Not for a field that changes constantly, and not where the second document is needed whole.",
)
CARD_FIELDS_MAX = 3
READ_FIELDS_MAX = 6
CARD_TYPES = frozenset({"string", "int", "long", "double", "decimal", "bool", "date"})
# Without a workload only several bare references, or a chain of them, are a symptom.
BARE_REFERENCES_MIN = 2
CHILDREN_MIN = 100
CHILDREN_PER_PARENT_MIN = 2
_HOT = ("name", "title", "label", "first_name", "firstName", "FirstName", "Name", "Title", "last_name",
        "LastName", "lastName", "username", "email", "status", "tier", "price", "sku", "slug")  # fmt: skip


def find(scan: Scan) -> Iterator[Finding]:
    yield from _stale_copies(scan)
    bare = [relation for relation in scan.relations if _is_bare(scan, relation)]
    for relation in bare:
        fields = _hot_fields(scan, scan.collections[relation.parent], relation)
        # What can be embedded whole needs no copy of its parent.
        if not fields or not can_declare(scan, relation) or could_embed(scan, relation):
            continue
        if relation.child_reads >= READS_MIN:
            # A parent that joins its children needs no copies in them.
            together = relation.read_together - relation.joined_by_parent
            if together >= READ_TOGETHER_SHARE_MIN * relation.child_reads:
                yield _finding(scan, relation, fields, seen=True)
        elif scan.workload is None and _needs_lookups(scan, bare, relation):
            yield _finding(scan, relation, fields, seen=False)


def _is_bare(scan: Scan, relation: Relation) -> bool:
    """A single reference to another collection, with no copy of it beside it."""
    child, parent = scan.ends(relation)
    field = child.fields[relation.path]
    if relation.many or child is parent or relation.orphan_share > 0.5 or len(field.steps) > 1:
        return False
    if any((each.child, each.by) == (child.name, relation.path) for each in scan.copies):
        return False
    return parent.count >= 2 and has_one_key(parent, relation.key) and not _has_copy(child, field, parent)


def _has_copy(child: CollectionFacts, reference: FieldFacts, parent: CollectionFacts) -> bool:
    """Whether, by its name, something beside the reference already holds something of the parent."""
    about = {stem(reference.name), subject(parent.name)}
    copies = {_normal("".join(name) + each.name) for name in about for each in parent.top()}
    return any(
        ("object" in each.types and stem(each.name) in about) or _normal(each.name) in copies
        for each in child.top()
        if each.path != reference.path
    )


def _normal(name: str) -> str:
    return name.replace("_", "").lower()


def _needs_lookups(scan: Scan, bare: list[Relation], relation: Relation) -> bool:
    """Whether reading the child whole takes several lookups, or a lookup of a lookup."""
    child = scan.collections[relation.child]
    # Links and former states are for the rules of their names.
    if link_ends(scan, child) is not None or any(each.collection == child.name for each in scan.pasts):
        return False
    # A code that people read needs no lookup.
    bare = [each for each in bare if not _is_code(scan, each)]
    if relation not in bare:
        return False
    if relation.references < CHILDREN_MIN or relation.children.mean < CHILDREN_PER_PARENT_MIN:
        return False
    own = sum(each.child == relation.child for each in bare)
    return own >= BARE_REFERENCES_MIN or any(each.child == relation.parent for each in bare)


def _is_code(scan: Scan, relation: Relation) -> bool:
    return relation.key != "_id" and scan.collections[relation.child].fields[relation.path].type == "string"


def _finding(scan: Scan, relation: Relation, fields: list[FieldFacts], seen: bool) -> Finding:
    child, parent = scan.ends(relation)
    draft = Draft((_derived(child, parent, relation, fields),))
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
        render(scan, draft),
        ("Run setup(), then rebuild() to fill the copies.",),
        severity="warning" if seen else "info",
        confidence="high" if seen else "low",
        draft=draft,
    )


def _read_fields(scan: Scan, relation: Relation) -> tuple[set[str], bool]:
    """The parent's fields that requests show beside the child, and whether one shows the parent whole."""
    names: set[str] = set()
    whole = False
    for query in scan.queries:
        if query.collection == relation.parent and query.filter_paths == (relation.key,):
            names.update(query.shown)
            whole = whole or (query.kind == "find" and not query.shown)
        if query.collection == relation.child and any(each[0] == relation.parent for each in query.lookups):
            found = {name for source, name in query.joined if source == relation.parent}
            names.update(found)
            whole = whole or not found
    return names - {"_id", relation.key}, whole


def _hot_fields(scan: Scan, parent: CollectionFacts, relation: Relation) -> list[FieldFacts]:
    """The parent's short, common, steady fields: those that requests read, else the likeliest first."""
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
    read, whole = _read_fields(scan, relation)
    asked = [each for each in fields if each.name in read]
    # What is never read would be copied at each change, for nothing.
    if asked and not whole:
        return asked[:READ_FIELDS_MAX]
    return [*asked, *(each for each in fields if each not in asked)][: max(CARD_FIELDS_MAX, len(asked))]


def _derived(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, fields: list[FieldFacts]
) -> Derived:
    about = "_".join(stem(relation.path)) or "card"
    shown = "_".join("_".join(words(each.name)) for each in fields)
    return Derived(
        child.name,
        Source.new_name(child, about, f"{about}_card", f"{about}_{shown}"),
        parent.name,
        relation.path,
        relation.key,
        of=tuple(each.name for each in fields),
        other_name=Source.new_name(child, f"{about}_by_{'_'.join(words(relation.path))}"),
    )


# -- copies made by hand ---------------------------------------------------------------------


def _stale_copies(scan: Scan) -> Iterator[Finding]:
    for copy in scan.copies:
        if copy.stale and _is_meant(copy):
            beside = [
                each
                for each in scan.copies
                if (each.child, each.by) == (copy.child, copy.by) and _is_meant(each)
            ]
            declaration = _copies_declaration(scan, beside)
            if declaration is not None:
                yield _stale_copy(copy, declaration)


def _is_meant(copy: Copy) -> bool:
    """Whether it is meant to follow its source, and not merely alike most of the time."""
    return copy.named or last_word(copy.source) in NAMES


def _stale_copy(copy: Copy, declaration: str) -> Finding:
    source = f"{copy.parent}.{copy.source}"
    part = share(copy.stale, copy.compared)
    evidence: Evidence = {
        "copy of": source,
        "reference": copy.by,
        "copies compared": copy.compared,
        "stale": copy.stale,
        "stale, share": part,
        "missing beside a reference": copy.absent,
        "maintained by": "nothing",
    }
    stale = f"{copy.stale:,} of {copy.compared:,} copies ({part}) are stale"
    if copy.sampled_of is not None:
        evidence["sample of"] = copy.sampled_of
        stale = f"in a sample, {stale}"
    return Finding(
        RULE,
        copy.child,
        copy.path,
        f"{copy.path} repeats {source} by hand and nothing maintains it: {stale}.",
        evidence,
        declaration,
        ("Run setup(), then repair() to correct the stale copies.",),
        (copy.parent,),
        confidence="high" if copy.named and copy.stale <= copy.compared / 2 else "medium",
    )


def _copies_declaration(scan: Scan, copies: list[Copy]) -> str | None:
    """The copies declared under the names they have; None where a model cannot name them."""
    first = copies[0]
    child, parent = scan.collections[first.child], scan.collections[first.parent]
    reference = child.fields[first.by]
    around = reference.steps[:-1]
    owner = label(around)
    if not has_one_key(parent, first.key) or (not all(map(is_plain_name, around)) and "[]" not in around):
        return None
    child = with_reference_type(child, first.by, parent, first.key)
    source = Source()
    parent_class = source.document(parent)
    sources: dict[str, str] = {}
    for copy in copies:
        attribute = _attribute(parent, parent.fields[copy.source])
        if attribute is None:
            return None
        sources[copy.source] = attribute
    names = Source.names_inside(child, around)
    cards: dict[str, list[Copy]] = {}
    for copy in copies:
        steps = child.fields[copy.path].steps
        if len(steps) == len(around) + 1 and reference.name not in ("_id", "id"):
            if steps[-1] not in names or reference.name not in names:
                return None
            by = reference_keywords(names[reference.name], parent, first.key)
            pattern = f"ExtendedReference({parent_class}, {by}, field={quote(sources[copy.source])})"
            source.wraps[copy.path] = _annotated(pattern)
            child = _optional(child, copy.path)
        else:
            cards.setdefault(label(steps[:-1]), []).append(copy)
    for path, inside in cards.items():
        card = child.fields.get(path)
        if card is None or card.type not in ("object",):
            return None
        holder = Source.names_inside(child, card.steps[:-1])
        within = Source.names_inside(child, card.steps)
        if card.name not in holder or not within:
            return None
        by = names[reference.name] if path != owner else f"{holder[card.name]}.{within[reference.name]}"
        keywords = reference_keywords(by, parent, first.key)
        copied = {each.source for each in inside}
        rest = [
            name for name in within if name not in copied and not (path == owner and name == reference.name)
        ]
        if rest:
            keywords += f", fields=[{', '.join(quote(within[name]) for name in sorted(copied))}]"
        source.wraps[path] = _annotated(f"ExtendedReference({parent_class}, {keywords})")
        child = _optional(child, path)
    source.document(child)
    return source.text()


def _attribute(parent: CollectionFacts, field: FieldFacts) -> str | None:
    """The path of a field by the names that its model gives it; None where it has none."""
    parts = [
        Source.names_inside(parent, field.steps[:depth]).get(step) for depth, step in enumerate(field.steps)
    ]
    return ".".join(part for part in parts if part) if all(parts) else None


def _annotated(pattern: str) -> Callable[[str], str]:
    return lambda annotation: f"Annotated[{annotation}, {pattern}]"


def _optional(facts: CollectionFacts, path: str) -> CollectionFacts:
    """The facts with a field that may be missing, as every maintained field may be."""
    field = facts.fields[path]
    return replace(facts, fields={**facts.fields, path: replace(field, types={**field.types, "null": 1})})
