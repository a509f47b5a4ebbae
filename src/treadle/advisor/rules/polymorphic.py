"""Several kinds of things in one collection, told apart by a field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, class_name, quoted
from treadle.advisor.facts import CollectionFacts, Kind, Kinds, Scan
from treadle.advisor.inner import FOREIGN_SHARE_MAX
from treadle.advisor.relations import words
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import share

RULE = Rule(
    "polymorphic",
    "Polymorphic",
    "Several kinds in one collection",
    "Which fields a document has depends on the value of another field, and nothing says so.",
    "Declare the field as discriminator, with one class per kind: each with its own fields, checks "
    "and indexes.",
    "A class per kind; an unknown kind is refused.",
    "Each document is read as its own class; indexes and validators per kind.",
    "Not where kinds share no fields and are never queried together: give them collections of their own.",
)
COMMON_FIELDS_MIN = 1
# One index or validator per kind shows that somebody has thought of it.


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        if facts.kinds is not None and facts.validated is False and is_plain_name(facts.kinds.field):
            yield _finding(facts, facts.kinds)


def own_fields(facts: CollectionFacts, kinds: Kinds, kind: Kind) -> list[str]:
    """The optional fields that documents of this kind have."""
    return [name for name, part in kind.shares.items() if part > FOREIGN_SHARE_MAX]


def _finding(facts: CollectionFacts, kinds: Kinds) -> Finding:
    common = [each.name for each in facts.top() if each.share > 0.98 and each.name != kinds.field]
    own = {kind.label: own_fields(facts, kinds, kind) for kind in kinds.kinds}
    evidence: dict[str, str | int | float] = {
        "documents looked at": kinds.looked_at,
        "discriminating field": kinds.field,
        "kinds": len(kinds.kinds),
        "fields that all have": len(common),
    }
    for kind in kinds.kinds[:6]:
        part = share(kind.count, kinds.looked_at)
        evidence[f"{kind.label}"] = f"{part} of the documents, {len(own[kind.label])} fields of its own"
    return Finding(
        RULE,
        "info",
        "high" if len(common) >= COMMON_FIELDS_MIN else "medium",
        facts.name,
        kinds.field,
        f"{facts.name} holds {len(kinds.kinds)} kinds of documents, told apart by {kinds.field}.",
        evidence,
        _declaration(facts, kinds, own),
        ()
        if all(not kind.label.startswith("kind-") for kind in kinds.kinds)
        else (
            f"The kinds are numbered here; put in the values of {kinds.field} (--show-values prints them).",
        ),
    )


def _declaration(facts: CollectionFacts, kinds: Kinds, own: dict[str, list[str]]) -> str:
    source = Source()
    optional = frozenset(name for fields in own.values() for name in fields)
    every = frozenset(each.name for each in facts.top() if each.share > 0.98)
    base = source.document(
        facts,
        keywords=[f"discriminator={quoted(kinds.field)}"],
        without=frozenset({kinds.field, *(optional - every)}),
    )
    for number, kind in enumerate(kinds.kinds, 1):
        parts = [part.capitalize() for part in words(kind.label) if part.isalnum() and part.isascii()]
        name = "".join(parts) if parts and not parts[0][0].isdigit() else f"{base}Kind{number}"
        name = f"{base}{name}" if name in (base, class_name(facts.name)) else name
        of_kind = frozenset(own[kind.label]) - every
        source.document(
            _of_kind(facts, kind, of_kind),
            keywords=[f"kind={quoted(kind.label)}"],
            name=name.replace("-", ""),
            base=base,
            only=of_kind,
        )
    return source.text()


def _of_kind(facts: CollectionFacts, kind: Kind, names: frozenset[str]) -> CollectionFacts:
    """The fields as this kind has them: what all of them have is not optional."""
    fields = {
        path: replace(
            each, looked_at=each.present if kind.shares.get(each.name, 0) > 0.999 else each.looked_at
        )
        if each.name in names and len(each.steps) == 1
        else each
        for path, each in facts.fields.items()
    }
    return replace(facts, fields=fields)
