"""Documents of an older shape that stayed behind when the schema changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from treadle.advisor.declare import Source, quote
from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts, Scan, Shape, Versions
from treadle.advisor.field_types import families, has_versions, retyped
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import names, share

RULE = Rule(
    "schema-versioning",
    "Schema Versioning",
    "The schema changed and old documents remain",
    "Older documents have fields that newer ones lack and the other way round, hold text where newer "
    "ones hold an object, or carry an older version number.",
    "Number the versions, declare how one becomes the next, and migrate documents when they are read "
    "or in the background.",
    "A migration to write and to test; reads go through it until all documents are migrated.",
    "One shape for the program; no downtime; a count of old documents.",
    "Not where a field is simply optional: then both shapes are the same version.",
)
DOCUMENTS_MIN = 100
SHAPE_SHARE_MIN = 0.01
FIELD_SHARE_MIN = 0.95
OVERLAP_SHARE_MAX = 0.05
COMMON_SHARE_MIN = 0.3
FIELDS_SHOWN_MAX = 6


@dataclass(frozen=True, slots=True)
class Change:
    """Fields that ended and fields that began, and how many documents are older."""

    ended: tuple[str, ...]
    began: tuple[str, ...]
    old: int
    new: int


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        # Of former states each has the number of its own version.
        if facts.kinds is not None or any(past.collection == facts.name for past in scan.pasts):
            continue
        if facts.versions is not None and has_versions(facts):
            if facts.count >= DOCUMENTS_MIN:
                yield _numbered(facts, facts.versions)
            continue
        change = _find_change(facts) if facts.versions is None and facts.count >= DOCUMENTS_MIN else None
        if change is not None:
            yield _unnumbered(facts, change)
        for each in facts.fields.values():
            types = retyped(facts, each)
            if types is not None and (change is None or each.steps[0] not in change.ended + change.began):
                yield _retyped(facts, each, *types)


def _find_change(facts: CollectionFacts) -> Change | None:
    """A moment before which documents have one set of fields and after which another."""
    total = _count(facts.shapes)
    shapes = [
        shape for shape in facts.shapes if shape.first is not None and shape.count >= SHAPE_SHARE_MIN * total
    ]
    if len(shapes) < 2 or not facts.shapes_complete:
        return None
    shapes.sort(key=lambda shape: (shape.last or shape.first, shape.first))
    best: Change | None = None
    for number in range(1, len(shapes)):
        old, new = shapes[:number], shapes[number:]
        ended, began = _always(old) - _ever(new), _always(new) - _ever(old)
        common = _always(old) & _always(new)
        if not ended or not began or len(common) < COMMON_SHARE_MIN * len(_always(new)):
            continue
        change = Change(tuple(sorted(ended)), tuple(sorted(began)), _count(old), _count(new))
        is_better = best is None or min(change.old, change.new) > min(best.old, best.new)
        if is_better and _are_apart(old, new):
            best = change
    return best


def _are_apart(old: list[Shape], new: list[Shape]) -> bool:
    """Whether the times hardly overlap, judging by the ids."""
    end = max(shape.last for shape in old if shape.last is not None)
    begin = min(shape.first for shape in new if shape.first is not None)
    if end <= begin:
        return True
    first = min(shape.first for shape in old if shape.first is not None)
    last = max(shape.last for shape in new if shape.last is not None)
    return end - begin <= OVERLAP_SHARE_MAX * (last - first)


def _count(shapes: Iterable[Shape]) -> int:
    return sum(shape.count for shape in shapes)


def _always(shapes: list[Shape]) -> set[str]:
    counts: Counter[str] = Counter()
    for shape in shapes:
        counts.update(dict.fromkeys(shape.names, shape.count))
    return {name for name, number in counts.items() if number >= FIELD_SHARE_MIN * _count(shapes)}


def _ever(shapes: list[Shape]) -> set[str]:
    return {name for shape in shapes for name in shape.names}


def _numbered(facts: CollectionFacts, versions: Versions) -> Finding:
    old, whole = sum(versions.counts[:-1]), sum(versions.counts)
    is_sample = whole < facts.count
    part = share(old, whole)
    who = f"{part} of a sample are" if is_sample else f"{old:,} documents ({part}) are"
    return Finding(
        RULE,
        facts.name,
        versions.field,
        f"{who} of an older version than the newest.",
        {
            "versions": len(versions.counts),
            "documents of older versions": old,
            "documents looked at" if is_sample else "documents": whole,
        },
        _declaration(facts, versions.newest or len(versions.counts), versions.field),
        ("Write the migrations, run setup(), then migrate().",),
        severity="info",
    )


def _unnumbered(facts: CollectionFacts, change: Change) -> Finding:
    whole = change.old + change.new
    ended, began = (names(list(each), FIELDS_SHOWN_MAX) for each in (change.ended, change.began))
    return Finding(
        RULE,
        facts.name,
        "",
        f"{share(change.old, whole)} of the documents are older and have {ended} instead of {began}.",
        {
            "documents looked at": whole,
            "of the older shape": change.old,
            "of the newer shape": change.new,
            "only in older ones": ended,
            "only in newer ones": began,
        },
        _declaration(facts, 2, ended=change.ended, began=change.began),
        ("Write the migration, run setup(), then migrate().",),
        confidence="high" if whole >= 1_000 else "medium",
    )


def _declaration(
    facts: CollectionFacts,
    version: int,
    version_field: str = "schema_version",
    ended: tuple[str, ...] = (),
    began: tuple[str, ...] = (),
) -> str:
    source = Source()
    keywords = [f"version={version}"]
    if version_field != "schema_version":
        keywords.append(f"version_field={quote(version_field)}")
    fields = dict(facts.fields)
    for name in began:
        # Every document of the new version has it.
        types = fields[name].value_types
        fields[name] = replace(fields[name], types=types, looked_at=sum(types.values()))
    without = frozenset((version_field, *ended))
    model = source.document(replace(facts, fields=fields), keywords=keywords, without=without)
    body = []
    if ended and began and is_plain_name(ended[0]):
        body = [
            f"    # Make {', '.join(map(quote, began))} from {', '.join(map(quote, ended))} here.",
            *(f"    document.pop({quote(name)}, None)" for name in ended),
        ]
    for number in range(1, version):
        lines = [
            f"@migration({model}, from_version={number})",
            f"def from_{number}_to_{number + 1}(document: dict[str, Any]) -> dict[str, Any]:",
            *body,
            "    return document",
        ]
        source.blocks.append("\n".join(lines))
    return source.text()


# -- fields that became something else -----------------------------------------------------


_PYTHON = {"object": "dict", "array": "list"}


def _retyped(facts: CollectionFacts, each: FieldFacts, old: str, new: str) -> Finding:
    numbers = families(each)
    parts = {kind: share(numbers[kind], each.present) for kind in (old, new)}
    return Finding(
        RULE,
        facts.name,
        each.path,
        f"{each.path} is {_named(old)} in {parts[old]} and {_named(new)} in {parts[new]} of the documents: "
        "two versions of a schema.",
        {
            "documents looked at": each.looked_at,
            "of the older shape": numbers[old],
            "of the newer shape": numbers[new],
            "older type": old,
            "newer type": new,
        },
        _retyped_declaration(facts, each, new),
        ("Write the migration, run setup(), then migrate().",),
        confidence="high" if each.present >= DOCUMENTS_MIN else "medium",
    )


def _named(kind: str) -> str:
    return {"string": "text", "object": "an object", "array": "a list", "bool": "true or false"}.get(
        kind, f"a {kind}"
    )


def _retyped_declaration(facts: CollectionFacts, each: FieldFacts, new: str) -> str:
    types = {kind: n for kind, n in each.types.items() if kind in (new, "null")}
    if not types or new == "number":
        types = {**{kind: n for kind, n in each.value_types.items() if kind in NUMBERS}, **types}
    fields = {**facts.fields, each.path: replace(each, types=types)}
    first = ""
    for inside in facts.fields.values():
        if inside.steps[:-1] == each.steps and inside.name != "[]":
            # What is made from text has one of the parts at first.
            fields[inside.path] = replace(inside, types={**inside.types, "null": 1})
            if not first and "string" in inside.types and is_plain_name(inside.name):
                first = inside.name
    source = Source()
    model = source.document(replace(facts, fields=fields), keywords=["version=2"])
    holder = "document" + "".join(f".get({quote(step)}, {{}})" for step in each.steps[:-1])
    name = quote(each.name)
    made = {
        "object": f"{{{quote(first or 'value')}: value}}",
        "array": "[value]",
        "string": "str(value)",
    }.get(new, "None")
    check = _PYTHON.get(new, "str" if new == "string" else "(int, float)")
    lines = [
        f"@migration({model}, from_version=1)",
        "def from_1_to_2(document: dict[str, Any]) -> dict[str, Any]:",
        f"    value = {holder}.get({name})",
        f"    if value is not None and not isinstance(value, {check}):",
        "        # Take the older value apart here as it should be.",
        f"        {holder}[{name}] = {made}",
        "    return document",
    ]
    source.blocks.append("\n".join(lines))
    return source.text()
