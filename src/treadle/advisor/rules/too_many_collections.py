"""A collection per day, per customer or per anything."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.advisor.declare import Source, class_name
from treadle.advisor.facts import CollectionFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import names

RULE = Rule(
    "too-many-collections",
    "anti-pattern",
    "Too many collections",
    "Names differ only in a number or a date, or there are thousands of collections.",
    "Use one collection, with the varying part of the names as an indexed field.",
    "An index; expiry by TTL instead of dropping collections.",
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
    large = {pattern: family for pattern, family in families.items() if len(family) >= SERIES_MIN}
    for pattern, family in sorted(large.items()):
        yield _finding(scan, pattern, family)
    if not large and len(scan.names) > COLLECTIONS_MAX:
        yield _finding(scan, "", list(scan.names))


def _finding(scan: Scan, pattern: str, family: list[str]) -> Finding:
    collections = [
        facts for name in family if (facts := scan.collections.get(name)) is not None and facts.plain
    ]
    number = f"{len(family):,} collections"
    return Finding(
        RULE,
        pattern or scan.database,
        "",
        f"{number} are named like {pattern}." if pattern else f"There are {number}.",
        {
            "such collections": len(family),
            "collections": len(scan.names),
            "looked into": len(collections),
            "documents in those": sum(facts.count for facts in collections),
            "for example": names(family, 3),
        },
        _declaration(pattern, collections),
        (
            "Copy the documents, with the varying part of the collection's name in a field, then drop "
            "the old collections.",
        ),
        severity="problem" if len(family) > 5_000 else "warning",
        confidence="high" if pattern else "medium",
    )


def _declaration(pattern: str, collections: list[CollectionFacts]) -> str:
    source = Source()
    name = re.sub(r"[\W_#]+$", "", pattern.replace("#", "")) or "together"
    facts = max(collections, key=lambda each: each.count, default=CollectionFacts(name))
    place = "part" if "part" not in Source.names(facts).values() else "part_of_name"
    added = [f"{place}: Annotated[str, Indexed()]"]
    source.document(facts, collection=name, name=class_name(name), added=added)
    return source.text()
