"""Objects in objects in objects: hard to query, harder to index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import declaration
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.structure import is_plain_name, label
from treadle.advisor.wording import names, share

RULE = Rule(
    "deep-nesting",
    "anti-pattern",
    "Nesting deeper than three levels",
    "Fields lie more than three levels deep.",
    "Lift what is queried to the first levels, or give the inner part a collection of its own.",
    "Programs must follow the change of shape.",
    "Shorter paths, simpler updates, indexes that stay readable.",
    "Not for a third-party document that is only stored and never queried.",
)
DEPTH_MAX = 3
SHARE_MIN = 0.01


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        deep = [each for each in facts.fields.values() if each.depth > DEPTH_MAX and each.share >= SHARE_MIN]
        if not deep:
            continue
        deepest = max(deep, key=lambda each: (each.depth, each.path))
        commonest = max(deep, key=lambda each: each.share)
        documents = share(commonest.present, commonest.looked_at)
        yield Finding(
            RULE,
            facts.name,
            deepest.path,
            f"{facts.name} nests {deepest.depth} levels deep in {documents} of its documents.",
            {
                "levels": deepest.depth,
                "fields deeper than three levels": len(deep),
                "documents with one": documents,
                "such fields": names([each.path for each in deep], 4),
            },
            _declaration(facts, deep),
            ("Move the deep fields up with an update pipeline, then rename them in the programs.",),
            severity="info" if deepest.depth == DEPTH_MAX + 1 else "warning",
        )


def _declaration(facts: CollectionFacts, deep: list[FieldFacts]) -> str:
    """The model with everything at the third level lifted to the top."""
    fields = {path: each for path, each in facts.fields.items() if each.depth < DEPTH_MAX}
    for each in deep:
        third = [number for number, step in enumerate(each.steps, 1) if step != "[]"][DEPTH_MAX - 1]
        prefix = each.steps[:third]
        parts = [step for step in each.steps[:DEPTH_MAX] if step != "[]"]
        name = "_".join(parts)
        if not all(map(is_plain_name, parts)) or "*" in each.steps or name in {*fields, *facts.fields}:
            continue
        for field in facts.fields.values():
            if field.steps[:third] == prefix:
                steps = (name, *field.steps[third:])
                fields[label(steps)] = replace(field, path=label(steps), steps=steps)
    return declaration(replace(facts, fields=fields))
