"""A collection per day, per customer or per anything."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.advisor.declare import Source, class_name
from treadle.advisor.facts import CollectionFacts, Scan
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import names

RULE = Rule(
    "too-many-collections",
    "anti-pattern",
    "Too many collections",
    "Names differ only in a number or a date, or there are thousands of collections.",
    "One collection, with what the names told as an indexed field.",
    "The index; expiry by TTL instead of dropping collections.",
    "Fewer open files and less memory; queries across all of them.",
    "Not where each must be dropped, secured or moved on its own.",
)
SERIES_MIN = 20
COLLECTIONS_MAX = 1_000
# What a program puts into names: UUIDs, ObjectIds and other hexadecimal ids, and numbers.
_NUMBERS = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[a-f]*\d)[0-9a-f]{12,}|\d+", re.IGNORECASE
)


def find(scan: Scan) -> Iterator[Finding]:
    families: dict[str, list[str]] = {}
    for name in scan.names:
        pattern = _NUMBERS.sub("#", name)
        if pattern != name:
            families.setdefault(pattern, []).append(name)
    large = {pattern: found for pattern, found in families.items() if len(found) >= SERIES_MIN}
    for pattern, found in sorted(large.items()):
        yield _finding(scan, pattern, found)
    if not large and len(scan.names) > COLLECTIONS_MAX:
        yield _finding(scan, "", list(scan.names))


def _finding(scan: Scan, pattern: str, found: list[str]) -> Finding:
    known = [
        scan.collections[name] for name in found if name in scan.collections and scan.collections[name].plain
    ]
    what = (
        f"{len(found):,} collections are named like {pattern}."
        if pattern
        else f"There are {len(found):,} collections."
    )
    return Finding(
        RULE,
        "problem" if len(found) > 5_000 else "warning",
        "high" if pattern else "medium",
        pattern or scan.database,
        "",
        what,
        {
            "such collections": len(found),
            "collections": len(scan.names),
            "looked into": len(known),
            "documents in those": sum(facts.count for facts in known),
            "for example": names(found, 3),
        },
        _declaration(pattern, known),
        (
            "Copy the documents with what their collection's name told in a field of its own, then "
            "drop the old ones.",
        ),
    )


def _declaration(pattern: str, known: list[CollectionFacts]) -> str:
    source = Source()
    source.use("typing", "Annotated")
    source.use("treadle", "Indexed")
    name = re.sub(r"[\W_#]+$", "", pattern.replace("#", "")) or "together"
    facts = max(known, key=lambda each: each.count, default=CollectionFacts(name))
    names_ = source.names(facts)
    place = "part" if "part" not in names_.values() else "part_of_name"
    source.document(
        facts, collection=name, name=class_name(name), added=(f"{place}: Annotated[str, Indexed()]",)
    )
    return source.text()
