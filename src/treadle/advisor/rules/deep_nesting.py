"""Objects in objects in objects: hard to query, harder to index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import names, share

RULE = Rule(
    "deep-nesting",
    "anti-pattern",
    "Nesting deeper than three levels",
    "Fields lie more than three levels deep.",
    "Lift what is queried to the first levels, or give the inner part a collection of its own.",
    "A change of shape that programs must follow.",
    "Shorter paths, simpler updates, indexes that stay readable.",
    "Not for a foreign document that is only kept and never queried.",
)
DEPTH_MAX = 3
SHARE_MIN = 0.01


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        deep = [each for each in facts.fields.values() if each.depth > DEPTH_MAX and each.share >= SHARE_MIN]
        if deep:
            yield _finding(facts, deep)


def _finding(facts: CollectionFacts, deep: list[FieldFacts]) -> Finding:
    deepest = max(deep, key=lambda each: (each.depth, each.path))
    usual = max(deep, key=lambda each: each.share)
    return Finding(
        RULE,
        "info" if deepest.depth == DEPTH_MAX + 1 else "warning",
        "high",
        facts.name,
        deepest.path,
        f"{facts.name} nests {deepest.depth} levels deep in {share(usual.present, usual.looked_at)} "
        "of its documents.",
        {
            "levels": deepest.depth,
            "fields deeper than three levels": len(deep),
            "documents with one": share(usual.present, usual.looked_at),
            "such fields": names([each.path for each in deep], 4),
        },
        _declaration(facts, deep),
        ("Move the deep fields up with an update pipeline, then rename them in the programs.",),
    )


def _declaration(facts: CollectionFacts, deep: list[FieldFacts]) -> str:
    """The model with the deepest part lifted to the top."""
    source = Source()
    lifted: dict[str, FieldFacts] = {}
    roots: dict[str, FieldFacts] = {}
    for each in deep:
        above = tuple(step for step in each.steps[:DEPTH_MAX] if step != "[]")
        if all(map(is_plain_name, above)) and "*" not in each.steps:
            roots.setdefault("_".join(above), each)
    for name, each in roots.items():
        depth = _prefix(each)
        owner = next((field for field in facts.fields.values() if field.steps == each.steps[:depth]), each)
        if name not in facts.fields:
            lifted[name] = replace(owner, path=name, steps=(name,))
            for field in list(facts.fields.values()):
                if field.steps[:depth] == each.steps[:depth] and len(field.steps) > depth:
                    steps = (name, *field.steps[depth:])
                    path = name + "".join(step if step == "[]" else f".{step}" for step in steps[1:])
                    lifted[path] = replace(field, path=path, steps=steps)
    kept = {path: each for path, each in facts.fields.items() if each.depth <= DEPTH_MAX - 1}
    source.document(replace(facts, fields={**kept, **lifted}))
    return source.text()


def _prefix(each: FieldFacts) -> int:
    """How many steps lead to the third level."""
    seen = 0
    for number, step in enumerate(each.steps, 1):
        seen += step != "[]"
        if seen == DEPTH_MAX:
            return number
    return len(each.steps)
