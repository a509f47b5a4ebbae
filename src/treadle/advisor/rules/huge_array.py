"""Arrays that are, or may become, too long to carry around."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.arrays import arrays, verdict
from treadle.advisor.declare import Source, can_wrap, python_name, quoted
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.relations import subject
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import size

RULE = Rule(
    "huge-array",
    "anti-pattern",
    "Unbounded or huge arrays",
    "An array has a thousand items or more, or is pushed to without a bound.",
    "Give the items a collection of their own, each with its parent's id.",
    "A second query where the items are wanted.",
    "Documents that stay small; items that can be indexed, paged and changed by themselves.",
    "Not where the array is bounded by its nature and always read whole.",
)
PUSHES_MIN = 100
PUSHED_LENGTH_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    for facts, array in arrays(scan):
        found = verdict(facts, array)
        pushes = _pushes(scan, facts, array)
        lengths = array.lengths
        assert lengths is not None
        growing = pushes >= PUSHES_MIN and lengths.maximum >= PUSHED_LENGTH_MIN
        undeclarable = found == "outlier" and not can_wrap(facts, array)
        if found == "huge" or undeclarable or (found is None and growing):
            yield _finding(facts, array, pushes)


def _pushes(scan: Scan, facts: CollectionFacts, array: FieldFacts) -> int:
    if scan.workload is None:
        return 0
    return sum(
        query.count
        for query in scan.workload.queries
        if query.collection == facts.name and array.path in query.pushes
    )


def _finding(facts: CollectionFacts, array: FieldFacts, pushes: int) -> Finding:
    lengths = array.lengths
    assert lengths is not None
    evidence: dict[str, str | int | float] = {
        "documents": lengths.count,
        "items, median": lengths.median,
        "items, p99": lengths.p99,
        "items, max": lengths.maximum,
        "largest document": size(facts.sizes.maximum) if facts.sizes else "not measured",
    }
    if pushes:
        evidence["pushes without a bound in the workload"] = pushes
    largest = facts.sizes.maximum if facts.sizes else 0
    return Finding(
        RULE,
        "problem" if largest >= 8_000_000 else "warning",
        "high",
        facts.name,
        array.path,
        f"The longest array has {lengths.maximum:,.0f} items"
        + (f", and items were pushed {pushes:,} times without a bound." if pushes else "."),
        evidence,
        _declaration(facts, array),
        (f"Copy the items of {array.path} into the new collection, then remove the array.",),
    )


def _declaration(facts: CollectionFacts, array: FieldFacts) -> str:
    source = Source()
    source.use("typing", "Annotated", "Any")
    source.use("treadle", "Document", "Indexed")
    without = frozenset({array.steps[0]}) if len(array.steps) == 1 else frozenset()
    parent = source.document(facts, without=without)
    inside = facts.fields.get(array.path + "[]")
    item = (
        source.scalar(inside.kind)
        if inside is not None and len(inside.filled) == 1 and inside.type not in ("object", "array")
        else "Any"
    )
    about = "_".join(subject(array.name)) or "item"
    by = python_name(f"{'_'.join(subject(facts.name)) or 'parent'}_id", set())
    kind = source.identity(facts)
    place = python_name(about, {by})
    made = source.name(f"{parent}{''.join(part.capitalize() for part in subject(array.name)) or 'Item'}")
    collection = quoted(f"{'_'.join(subject(facts.name)) or 'parent'}_{array.name}")
    source.blocks.append(
        f"class {made}(Document, collection={collection}):\n    {by}: Annotated[{kind}, Indexed()]\n  "
        f"  {place}: {item}"
    )
    return source.text()
