"""One field, several types."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source
from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts, Scan
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import share

RULE = Rule(
    "mixed-types",
    "anti-pattern",
    "Mixed types in one field",
    "A field holds text in some documents and a number or a date in others.",
    "Convert the minority, and declare the type so that it stays.",
    "A one-time conversion.",
    'Queries and sorts that see every document; 5 and "5" are the same again.',
    "Not where both types are meant, and programs tell them apart.",
)
DOCUMENTS_MIN = 20


def families(each: FieldFacts) -> dict[str, int]:
    """The types with whole and broken numbers taken as one; exact decimals stay apart from floats."""
    found: dict[str, int] = {}
    for kind, number in each.filled.items():
        family = "number" if kind in NUMBERS and kind != "decimal" else kind
        found[family] = found.get(family, 0) + number
    # Whole numbers beside decimals lose nothing.
    if "decimal" in found and "number" in found and "double" not in each.filled:
        found["decimal"] += found.pop("number")
    return found


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        for each in facts.fields.values():
            found = families(each)
            if len(found) < 2 or each.present < DOCUMENTS_MIN or "*" in each.steps or each.name == "[]":
                continue
            # Kinds of a polymorphic collection may use a name for different things.
            if facts.kinds is not None and set(found) & {"object", "array"}:
                continue
            yield _finding(facts, each, found)


def _finding(facts: CollectionFacts, each: FieldFacts, found: dict[str, int]) -> Finding:
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    minority = sum(number for _, number in ordered[1:])
    evidence: dict[str, str | int | float] = {"documents looked at": each.looked_at}
    for kind, number in ordered:
        evidence[kind] = f"{number:,} ({share(number, each.present)})"
    source = Source()
    source.document(facts)
    return Finding(
        RULE,
        "warning",
        "high",
        facts.name,
        each.path,
        f"{each.path} is {ordered[0][0]} in most documents and "
        f"{', '.join(kind for kind, _ in ordered[1:])} in {minority:,}.",
        evidence,
        source.text(),
        ("Convert the minority with an update pipeline ($convert), then run setup().",),
    )
