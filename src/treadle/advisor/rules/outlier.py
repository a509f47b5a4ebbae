"""A few documents whose array is a hundred times longer than everybody else's."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.arrays import arrays, usual_most, verdict
from treadle.advisor.declare import Source, can_wrap, quoted
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.relations import subject
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import nice, share, size

RULE = Rule(
    "outlier",
    "Outlier",
    "A few documents are 100 times larger than the rest",
    "An array is short in nearly all documents and enormous in a few.",
    "Embed the array up to a limit; what goes beyond moves to pages in a collection of its own.",
    "Readers of a few documents read pages too; the rest is unchanged.",
    "Every document stays small; the usual one is still read in one go.",
    "Not where most arrays are long: then the items want a collection of their own.",
)
LIMIT_MIN = 50


def find(scan: Scan) -> Iterator[Finding]:
    for facts, array in arrays(scan):
        # One that no pattern can be put on is a huge array.
        if verdict(facts, array) == "outlier" and can_wrap(facts, array):
            yield _finding(scan, facts, array)


def _finding(scan: Scan, facts: CollectionFacts, array: FieldFacts) -> Finding:
    lengths = array.lengths
    assert lengths is not None
    limit = nice(max(usual_most(lengths), LIMIT_MIN))
    beyond = lengths.above(limit)
    return Finding(
        RULE,
        "problem" if facts.sizes is not None and facts.sizes.maximum > 8_000_000 else "warning",
        "high" if lengths.sampled_of is None else "medium",
        facts.name,
        array.path,
        f"Half of the documents have {lengths.median:,.0f} items or fewer; the longest has "
        f"{lengths.maximum:,.0f}.",
        {
            "documents": lengths.count,
            "items, median": lengths.median,
            "items, mean": round(lengths.mean, 1),
            "items, p99": lengths.p99,
            "items, max": lengths.maximum,
            f"documents beyond {limit:,}": f"{beyond:,} ({share(beyond, lengths.count)})",
            "largest document": size(facts.sizes.maximum) if facts.sizes else "not measured",
        },
        _declaration(facts, array, limit),
        ("Run setup(), then rebuild(), which moves what is beyond the limit to pages.",),
    )


def _declaration(facts: CollectionFacts, array: FieldFacts, limit: int) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("treadle", "Outlier")
    about = "_".join(subject(array.name)) or "item"
    overflow = quoted(f"{about}_overflow")
    page = max(1_000, limit)

    def wrap(annotation: str) -> str:
        pattern = f"Outlier(limit={limit}, overflow={overflow}, page_size={page})"
        return f"Annotated[\n        {annotation}, {pattern}\n    ]"

    source.wraps[array.path] = wrap
    taken = set(source.names(facts).values())
    # The count and the flag stand beside the array; in a nested model Treadle keeps them itself.
    added = [
        f"{field}: {kind}"
        for field, kind in ((f"{about}_count", "int = 0"), ("has_overflow", "bool = False"))
        if field not in taken and field.isidentifier() and len(array.steps) == 1
    ]
    source.document(facts, added=tuple(added))
    return source.text()
