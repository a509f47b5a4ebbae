"""Several kinds of things in one collection, told apart by a field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, class_name, quote
from treadle.advisor.facts import CollectionFacts, Kind, Kinds, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.naming import words
from treadle.advisor.probes import FOREIGN_SHARE_MAX
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
COMMON_SHARE_MIN = 0.98
KINDS_SHOWN_MAX = 6


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        if facts.kinds is not None and facts.validated is False and is_plain_name(facts.kinds.field):
            yield _finding(facts, facts.kinds)


def _finding(facts: CollectionFacts, kinds: Kinds) -> Finding:
    common = frozenset(each.name for each in facts.top() if each.share > COMMON_SHARE_MIN)
    shared = len(common - {kinds.field})
    evidence: Evidence = {
        "documents looked at": kinds.looked_at,
        "discriminating field": kinds.field,
        "kinds": len(kinds.kinds),
        "fields common to all": shared,
    }
    for kind in kinds.kinds[:KINDS_SHOWN_MAX]:
        part = share(kind.count, kinds.looked_at)
        evidence[kind.label] = f"{part} of the documents, {len(_own_fields(kind))} fields of its own"
    step = f"The kinds are numbered here; put in the values of {kinds.field} (--show-values prints them)."
    return Finding(
        RULE,
        facts.name,
        kinds.field,
        f"{facts.name} holds {len(kinds.kinds)} kinds of documents, told apart by {kinds.field}"
        + (f": each has fields of its own in {kinds.inside}." if kinds.inside else "."),
        evidence,
        _declaration(facts, kinds, common),
        (step,) if any(kind.label.startswith("kind-") for kind in kinds.kinds) else (),
        severity="info",
        confidence="high" if shared else "medium",
    )


def _own_fields(kind: Kind) -> frozenset[str]:
    """The optional fields that documents of this kind have."""
    return frozenset(name for name, part in kind.shares.items() if part > FOREIGN_SHARE_MAX)


def _declaration(facts: CollectionFacts, kinds: Kinds, common: frozenset[str]) -> str:
    source = Source()
    optional = frozenset(name for kind in kinds.kinds for name in _own_fields(kind))
    if kinds.inside:
        optional, common = frozenset({kinds.inside}), common - {kinds.inside}
    base = source.document(
        facts,
        keywords=[f"discriminator={quote(kinds.field)}"],
        without=frozenset({kinds.field, *(optional - common)}),
    )
    for number, kind in enumerate(kinds.kinds, 1):
        parts = [part.capitalize() for part in words(kind.label) if part.isalnum() and part.isascii()]
        name = "".join(parts) if parts and not parts[0][0].isdigit() else f"{base}Kind{number}"
        own = frozenset({kinds.inside}) if kinds.inside else _own_fields(kind) - common
        source.document(
            _with_payload(facts, kind, kinds.inside) if kinds.inside else _with_own_fields(facts, kind, own),
            keywords=[f"kind={quote(kind.label)}"],
            name=f"{base}{name}" if name in (base, class_name(facts.name)) else name,
            base=base,
            only=own,
        )
    return source.text()


def _with_own_fields(facts: CollectionFacts, kind: Kind, own: frozenset[str]) -> CollectionFacts:
    """The fields as this kind has them: those that all of its documents have are required."""
    required = {
        name: replace(facts.fields[name], looked_at=facts.fields[name].present)
        for name in own
        if kind.shares[name] > 0.999
    }
    return replace(facts, fields={**facts.fields, **required})


def _with_payload(facts: CollectionFacts, kind: Kind, inside: str) -> CollectionFacts:
    """The object as this kind has it: its own fields, those of all of its documents required."""
    number = facts.fields[inside].present
    fields = dict(facts.fields)
    for path, part in kind.shares.items():
        each = fields[path]
        if part <= FOREIGN_SHARE_MAX:
            fields = {name: field for name, field in fields.items() if field.steps[:2] != each.steps}
        elif part > 0.999 and len(each.types) == 1:
            fields[path] = replace(each, types={each.type: number})
    return replace(facts, fields=fields)
