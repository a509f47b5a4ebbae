"""A few documents whose array is a hundred times longer than the others."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.array_lengths import arrays, common_maximum, verdict
from treadle.advisor.declare import Source, can_wrap, quote, snake_case, styled
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Finding, Rule, length_evidence
from treadle.advisor.model_text import render
from treadle.advisor.proposals import Draft, Line, Wrapped
from treadle.advisor.wording import nice, share, size

RULE = Rule(
    "outlier",
    "Outlier",
    "A few documents are 100 times larger than the rest",
    "An array is short in nearly all documents and enormous in a few.",
    "Embed the array up to a limit; the rest moves to pages in a collection of its own.",
    "Reading the few large documents means reading pages too; the others are unchanged.",
    "Every document stays small; the typical one is still read in one operation.",
    "Not where most arrays are long: then the items need a collection of their own.",
)
LIMIT_MIN = 50
PROBLEM_BYTES = 8_000_000


def find(scan: Scan) -> Iterator[Finding]:
    for facts, array, lengths in arrays(scan):
        if verdict(facts, array, lengths) != "outlier" or not can_wrap(facts, array):
            continue
        limit = nice(max(common_maximum(lengths), LIMIT_MIN))
        beyond = lengths.above(limit)
        draft = _draft(facts, array, limit)
        yield Finding(
            RULE,
            facts.name,
            array.path,
            f"Half of the documents have {lengths.median:,.0f} items or fewer; the longest has "
            f"{lengths.maximum:,.0f}.",
            {
                **length_evidence(lengths),
                "items, mean": round(lengths.mean, 1),
                f"documents beyond {limit:,}": f"{beyond:,} ({share(beyond, lengths.count)})",
                "largest document": size(facts.sizes.maximum) if facts.sizes else "not measured",
            },
            render(scan, draft),
            ("Run setup(), then rebuild(), which moves what is beyond the limit to pages.",),
            severity="problem" if facts.sizes and facts.sizes.maximum > PROBLEM_BYTES else "warning",
            confidence="high" if lengths.sampled_of is None else "medium",
            draft=draft,
        )


def _draft(facts: CollectionFacts, array: FieldFacts, limit: int) -> Draft:
    item = snake_case(array.name, "item")
    pattern = f"Outlier(limit={limit}, overflow={quote(f'{item}_overflow')}, page_size={max(1_000, limit)})"
    taken = set(Source.names(facts).values())
    # The count and the flag stand beside the array; in a nested model Treadle keeps them itself.
    added = []
    for part, name, kind in (("count", f"{item}_count", "int = 0"), ("flag", "has_overflow", "bool = False")):
        field = styled(facts, name)
        if field not in taken and field.isidentifier() and len(array.steps) == 1:
            added.append(Line(facts.name, f"{field}: {kind}"))
            if field != name:
                pattern = f"{pattern[:-1]}, {part}={quote(field)})"
    return Draft(wrapped=(Wrapped(facts.name, array.path, pattern),), lines=tuple(added))
