"""Collections that accept anything."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declaration
from treadle.advisor.facts import WRITES, CollectionFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.naming import words
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
# A log of one shape that only one program appends to needs no validator until it is large.
LOG_DOCUMENTS_MAX = 10_000
LOGS = frozenset({"audit", "audits", "log", "logs", "journal", "journals", "trail", "trails"})


def find(scan: Scan) -> Iterator[Finding]:
    large = [facts for facts in scan.plain() if facts.count >= DOCUMENTS_MIN]
    bare = [facts for facts in large if facts.validated is False and not _is_small_log(scan, facts)]
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


def _is_small_log(scan: Scan, facts: CollectionFacts) -> bool:
    """Whether a collection is small, has one shape, and is only appended to, as far as can be seen."""
    if facts.count > LOG_DOCUMENTS_MAX or len(facts.shapes) != 1:
        return False
    written = scan.workload.count(facts.name, WRITES) if scan.workload is not None else 0
    if scan.workload is not None and written:
        return written == scan.workload.count(facts.name, ("insert",))
    return bool(LOGS & set(words(facts.name)))
