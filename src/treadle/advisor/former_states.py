"""Which collections and arrays hold former states of documents; nothing here talks to a server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from treadle.advisor.facts import CollectionFacts, FieldFacts
from treadle.advisor.naming import singular, subject, words

SUFFIXES = frozenset(
    {"history", "version", "revision", "audit", "snapshot", "change", "changelog", "state", "archive"}
)
ARRAY_WORDS = frozenset(
    {"history", "version", "revision", "snapshot", "change", "audit", "changelog", "previous"}
)
_NUMBERED = re.compile(r"v\d+")
# A table of former states that is maintained already has these.
KEPT = ({"valid_from", "valid_to"}, {"validfrom", "validto"})
SHARED_SHARE_MIN = 0.5
SHARED_MIN = 2
STATES_MIN = 20


def candidates(
    collections: Mapping[str, CollectionFacts],
) -> Iterator[tuple[CollectionFacts, CollectionFacts]]:
    """Collections that are called the history of another one, each with that one."""
    plain = [each for each in collections.values() if each.plain and each.count]
    subjects = {subject(each.name): each for each in reversed(plain)}
    for each in plain:
        parts = words(each.name.rpartition(".")[2] or each.name)
        last = singular(parts)[-1:] if parts else ()
        if len(parts) < 2 or not (set(last) & SUFFIXES - {"archive"} or _NUMBERED.fullmatch(parts[-1])):
            continue
        of = subjects.get(singular(parts[:-1]))
        if of is not None and of.name != each.name and each.count >= STATES_MIN and not is_kept(each):
            yield each, of


def is_kept(facts: CollectionFacts) -> bool:
    """Whether the rows say from when to when each state held."""
    names = {each.name.lower() for each in facts.top()}
    return any(pair <= names for pair in KEPT)


def shared_fields(past: CollectionFacts, of: CollectionFacts) -> tuple[str, ...]:
    """The fields of a document that its states have too, beside each other or in one object."""
    own = {each.name for each in of.top()}
    holders: dict[tuple[str, ...], set[str]] = {}
    for each in past.fields.values():
        if len(each.steps) in (1, 2) and "[]" not in each.steps and each.path != "_id":
            holders.setdefault(each.steps[:-1], set()).add(each.name)
    best = max((names & own for names in holders.values()), key=len, default=set())
    is_enough = len(best) >= SHARED_MIN and len(best) >= SHARED_SHARE_MIN * len(own)
    return tuple(sorted(best)) if is_enough else ()


def states_in(facts: CollectionFacts, array: FieldFacts) -> tuple[str, ...]:
    """The fields of the document that the items of an array repeat; none where they are no states.

    A list of changes, each with a field, its old and its new value, is one too.
    """
    if len(array.steps) != 1 or not ARRAY_WORDS & set(singular(words(array.name))) | ARRAY_WORDS & set(
        words(array.name)
    ):
        return ()
    items = (array.name, "[]")
    inside = {
        each.name: each
        for each in facts.fields.values()
        if each.steps[:2] == items and len(each.steps) in (3, 4) and "[]" not in each.steps[2:]
    }
    has_moment = any(
        "date" in each.types or {"version", "revision", "v"} & set(words(each.name))
        for each in inside.values()
    )
    own = {each.name for each in facts.top()} - {array.name}
    shared = tuple(sorted(own & set(inside)))
    names = {name.lower().replace("_", "") for name in inside}
    is_change = bool(names & {"field", "path", "attribute"}) and any(
        {f"old{end}", f"new{end}"} <= names or {"before", "after"} <= names or {"from", "to"} <= names
        for end in ("", "value")
    )
    if not has_moment or (len(shared) < SHARED_MIN and not is_change):
        return ()
    return shared or ("field", "old and new value")
