"""One field, several types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from treadle.advisor.declare import declaration
from treadle.advisor.facts import NUMBERS, FieldFacts, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.wording import share

RULE = Rule(
    "mixed-types",
    "anti-pattern",
    "Mixed types in one field",
    "A field holds text in some documents and a number or a date in others.",
    "Convert the minority, and declare the type so that it stays consistent.",
    "A one-time conversion.",
    'Queries and sorts see every document: 5 and "5" no longer differ.',
    "Not where both types are intended and programs handle both.",
)
DOCUMENTS_MIN = 20


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        for each in facts.fields.values():
            families = _families(each)
            if len(families) < 2 or each.present < DOCUMENTS_MIN or "*" in each.steps or each.name == "[]":
                continue
            # Kinds of a polymorphic collection may use a name for different things.
            if facts.kinds is not None and {"object", "array"} & set(families):
                continue
            ordered = sorted(families.items(), key=lambda pair: (-pair[1], pair[0]))
            (main, _), *others = ordered
            evidence: Evidence = {"documents looked at": each.looked_at}
            evidence.update((kind, f"{number:,} ({share(number, each.present)})") for kind, number in ordered)
            yield Finding(
                RULE,
                facts.name,
                each.path,
                f"{each.path} is {main} in most documents and {', '.join(kind for kind, _ in others)} in "
                f"{sum(number for _, number in others):,}.",
                evidence,
                declaration(facts),
                ("Convert the minority with an update pipeline ($convert), then run setup().",),
            )


def _families(each: FieldFacts) -> dict[str, int]:
    """The types with all numbers taken as one; exact decimals stay apart from floats."""
    families: Counter[str] = Counter()
    for kind, number in each.value_types.items():
        families["number" if kind in NUMBERS and kind != "decimal" else kind] += number
    # Whole numbers beside decimals lose nothing.
    if {"decimal", "number"} <= set(families) and "double" not in each.value_types:
        families["decimal"] += families.pop("number")
    return families
