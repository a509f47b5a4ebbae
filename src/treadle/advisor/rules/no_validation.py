"""Collections that accept anything."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declaration
from treadle.advisor.facts import Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import names

RULE = Rule(
    "no-validation",
    "anti-pattern",
    "No validation",
    "Collections have no validator, so any program may write any shape.",
    "Declare the model; setup() gives the collection a validator made from it.",
    "Writes that break the declaration are refused.",
    "A wrong type is an error at once instead of a surprise a year later.",
    "Not for a collection that stores third-party documents as they are.",
)
DOCUMENTS_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    large = [facts for facts in scan.plain() if facts.count >= DOCUMENTS_MIN]
    bare = [facts for facts in large if facts.validated is False]
    if not bare:
        return
    bare.sort(key=lambda facts: (-facts.count, facts.name))
    first, *others = bare
    yield Finding(
        RULE,
        first.name,
        "",
        f"{len(bare)} of {len(large)} collections accept any document.",
        {
            "collections without a validator": len(bare),
            "collections with at least 100 documents": len(large),
            "documents in them": sum(facts.count for facts in bare),
            "collections": names([facts.name for facts in bare]),
        },
        declaration(first),
        ("setup() makes validators moderate: documents that do not fit today are left alone.",),
        tuple(facts.name for facts in others),
        severity="info",
    )
