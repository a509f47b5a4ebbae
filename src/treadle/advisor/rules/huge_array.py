"""Arrays that are, or may become, too long to carry around."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.array_lengths import arrays, verdict
from treadle.advisor.declare import Source, camel_case, can_wrap, python_name, quote, snake_case
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Evidence, Finding, Rule, length_evidence
from treadle.advisor.naming import subject
from treadle.advisor.wording import size

RULE = Rule(
    "huge-array",
    "anti-pattern",
    "Unbounded or huge arrays",
    "An array has a thousand items or more, or is pushed to without a bound.",
    "Give the items a collection of their own, each with its parent's id.",
    "A second query where the items are needed.",
    "Documents that stay small; items that can be indexed, paged and changed individually.",
    "Not where the array is naturally bounded and always read whole.",
)
PUSHES_MIN = 100
PUSHED_LENGTH_MIN = 100
PROBLEM_BYTES = 8_000_000


def find(scan: Scan) -> Iterator[Finding]:
    for facts, array, lengths in arrays(scan):
        result = verdict(facts, array, lengths)
        pushes = scan.pushes(facts.name, array.path)
        grows = pushes >= PUSHES_MIN and lengths.maximum >= PUSHED_LENGTH_MIN
        # An outlier that no pattern can be declared on is just a huge array.
        if result == "outlier" and not can_wrap(facts, array):
            result = "huge"
        if result != "huge" and (result is not None or not grows):
            continue
        evidence: Evidence = {
            **length_evidence(lengths),
            "largest document": size(facts.sizes.maximum) if facts.sizes else "not measured",
        }
        if pushes:
            evidence["pushes without a bound in the workload"] = pushes
        yield Finding(
            RULE,
            facts.name,
            array.path,
            f"The longest array has {lengths.maximum:,.0f} items"
            + (f", and items were pushed {pushes:,} times without a bound." if pushes else "."),
            evidence,
            _declaration(facts, array),
            (f"Copy the items of {array.path} into the new collection, then remove the array.",),
            severity="problem" if facts.sizes and facts.sizes.maximum >= PROBLEM_BYTES else "warning",
        )


def _declaration(facts: CollectionFacts, array: FieldFacts) -> str:
    source = Source()
    without = frozenset({array.steps[0]}) if len(array.steps) == 1 else frozenset()
    parent = source.document(facts, without=without)
    inside = facts.fields.get(array.path + "[]")
    item = "Any"
    if inside is not None and len(inside.value_types) == 1:
        item = Source.scalar(inside.kind)
    owner = snake_case(facts.name, "parent")
    by = python_name(f"{owner}_id", set())
    place = python_name(snake_case(array.name, "item"), {by})
    name = source.name(f"{parent}{camel_case(subject(array.name)) or 'Item'}")
    source.blocks.append(
        f"class {name}(Document, collection={quote(f'{owner}_{array.name}')}):\n"
        f"    {by}: Annotated[{Source.identity(facts)}, Indexed()]\n"
        f"    {place}: {item}"
    )
    return source.text()
