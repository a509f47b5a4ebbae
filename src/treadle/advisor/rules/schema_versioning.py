"""Documents of an older shape that stayed behind when the schema changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.advisor.declare import Source, python_name, quoted
from treadle.advisor.facts import CollectionFacts, Scan, Shape
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import names, share

RULE = Rule(
    "schema-versioning",
    "Schema Versioning",
    "The schema changed and old documents remain",
    "Older documents have fields that newer ones lack and the other way round, or carry an older "
    "version number.",
    "Number the versions, declare how one becomes the next, and let documents move when read or in "
    "the background.",
    "A migration to write and to test; readers pass through it until all have moved.",
    "One shape for the program; no downtime; a count of what is still old.",
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
        if facts.count < DOCUMENTS_MIN or facts.kinds is not None:
            continue
        if facts.versions is not None:
            if len(facts.versions.counts) > 1:
                yield _numbered(facts)
            continue
        change = changed(facts)
        if change is not None:
            yield _unnumbered(facts, change)


def changed(facts: CollectionFacts) -> Change | None:
    """A moment before which documents have one set of fields and after which another."""
    total = sum(shape.count for shape in facts.shapes)
    shapes = [
        shape for shape in facts.shapes if shape.first is not None and shape.count >= SHAPE_SHARE_MIN * total
    ]
    if len(shapes) < 2 or not facts.shapes_complete:
        return None
    shapes.sort(key=lambda shape: (shape.last or shape.first, shape.first))
    best: Change | None = None
    for number in range(1, len(shapes)):
        old, new = shapes[:number], shapes[number:]
        if not _apart(old, new):
            continue
        ended, began = _always(old) - _ever(new), _always(new) - _ever(old)
        common = _always(old) & _always(new)
        if ended and began and len(common) >= COMMON_SHARE_MIN * len(_always(new)):
            change = Change(tuple(sorted(ended)), tuple(sorted(began)), _count(old), _count(new))
            if best is None or min(change.old, change.new) > min(best.old, best.new):
                best = change
    return best


def _apart(old: list[Shape], new: list[Shape]) -> bool:
    """Whether the times hardly overlap, as the ids tell."""
    end = max(shape.last for shape in old if shape.last is not None)
    begin = min(shape.first for shape in new if shape.first is not None)
    if end <= begin:
        return True
    first = min(shape.first for shape in old if shape.first is not None)
    last = max(shape.last for shape in new if shape.last is not None)
    whole = (last - first).total_seconds()
    return whole > 0 and (end - begin).total_seconds() <= OVERLAP_SHARE_MAX * whole


def _count(shapes: list[Shape]) -> int:
    return sum(shape.count for shape in shapes)


def _always(shapes: list[Shape]) -> set[str]:
    counts: dict[str, int] = {}
    for shape in shapes:
        for name in shape.names:
            counts[name] = counts.get(name, 0) + shape.count
    return {name for name, number in counts.items() if number >= FIELD_SHARE_MIN * _count(shapes)}


def _ever(shapes: list[Shape]) -> set[str]:
    return {name for shape in shapes for name in shape.names}


def _numbered(facts: CollectionFacts) -> Finding:
    versions = facts.versions
    assert versions is not None
    old, whole = sum(versions.counts[:-1]), sum(versions.counts)
    newest = versions.newest or len(versions.counts)
    sampled = whole < facts.count
    return Finding(
        RULE,
        "info",
        "high",
        facts.name,
        versions.field,
        (
            f"{share(old, whole)} of a sample are"
            if sampled
            else f"{old:,} documents ({share(old, whole)}) are"
        )
        + " of an older version than the newest.",
        {
            "versions": len(versions.counts),
            "documents of older versions": old,
            "documents looked at" if sampled else "documents": whole,
        },
        _declaration(facts, newest, versions.field, (), ()),
        ("Write the migrations, run setup(), then migrate().",),
    )


def _unnumbered(facts: CollectionFacts, change: Change) -> Finding:
    whole = change.old + change.new
    return Finding(
        RULE,
        "warning",
        "high" if whole >= 1_000 else "medium",
        facts.name,
        "",
        f"{share(change.old, whole)} of the documents are older and have "
        f"{names(list(change.ended), FIELDS_SHOWN_MAX)} "
        f"instead of {names(list(change.began), FIELDS_SHOWN_MAX)}.",
        {
            "documents looked at": whole,
            "of the older shape": change.old,
            "of the newer shape": change.new,
            "only in older ones": names(list(change.ended), FIELDS_SHOWN_MAX),
            "only in newer ones": names(list(change.began), FIELDS_SHOWN_MAX),
        },
        _declaration(facts, 2, None, change.ended, change.began),
        ("Write the migration, run setup(), then migrate().",),
    )


def _declaration(
    facts: CollectionFacts, version: int, field: str | None, ended: tuple[str, ...], began: tuple[str, ...]
) -> str:
    source = Source()
    source.use("typing", "Any")
    source.use("treadle", "migration")
    keywords = [f"version={version}"]
    if field is not None and field != "schema_version":
        keywords.append(f"version_field={quoted(field)}")
    without = frozenset(ended) | ({field} if field else frozenset())
    fields = dict(facts.fields)
    for name in began:
        # Every document of the new version has it.
        filled = fields[name].filled
        fields[name] = replace(fields[name], types=filled, looked_at=sum(filled.values()))
    made = source.document(replace(facts, fields=fields), keywords=keywords, without=without)
    for number in range(1, version):
        name = python_name(f"from_{number}_to_{number + 1}", set())
        lines = [
            f"@migration({made}, from_version={number})",
            f"def {name}(document: dict[str, Any]) -> dict[str, Any]:",
        ]
        if ended and began and is_plain_name(ended[0]):
            lines.append(
                f"    # Make {', '.join(map(quoted, began))} from {', '.join(map(quoted, ended))} here."
            )
            lines += [f"    document.pop({quoted(name)}, None)" for name in ended]
        lines.append("    return document")
        source.blocks.append("\n".join(lines))
    return source.text()
