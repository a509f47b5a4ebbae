"""What the names of fields and collections are about; nothing here talks to a server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from treadle.advisor.facts import FieldFacts

# Each name is compared with every other one.
NAMES_CACHED = 20_000
# The role of a person in another document, and where people are stored: `support_rep_id` refers to employees.
ROLES = frozenset(
    {"rep", "representative", "agent", "manager", "supervisor", "owner", "author", "creator", "editor"}
    | {"assignee", "approver", "reviewer", "reporter", "teacher", "instructor", "coach", "clerk", "cashier"}
    | {"sender", "recipient", "receiver", "host", "organizer", "contact", "operator", "technician", "nurse"}
    | {"advisor", "adviser", "mentor", "tutor", "physician", "lead", "leader", "captain", "inspector"}
    | {"salesperson", "buyer", "seller", "borrower", "follower", "assigned", "uploader", "moderator"}
    | {"driver", "actor", "person", "salesman"}
)
PEOPLE = frozenset(
    {"user", "employee", "staff", "person", "member", "people", "account", "worker", "personnel", "profile"}
)
# Where there are none of these, people may be kept by what they mostly are.
PEOPLE_BY_TRADE = frozenset(
    {"instructor", "teacher", "lecturer", "doctor", "physician", "player", "customer", "client", "guest"}
)
# Words after a verb that say who or what: `ShipVia`, `sold_by`.
CONNECTING = frozenset({"via", "by", "with", "through", "to", "from"})
VERB_LENGTH_MIN = 4


@lru_cache(NAMES_CACHED)
def words(name: str) -> tuple[str, ...]:
    """The words of a name in lower case: `authorIds`, `author_ids` and `Author-IDs` are the same."""
    split = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", name)
    return tuple(part for part in re.split(r"[\W_]+", split.lower()) if part)


def last_word(name: str) -> str:
    return "".join(words(name)[-1:])


def singular(parts: Sequence[str]) -> tuple[str, ...]:
    """The words of a name with the last one in the singular."""
    return (*parts[:-1], *map(_singular, parts[-1:]))


def _singular(word: str) -> str:
    """The singular of an English plural, good enough for collection names."""
    irregular = {"people": "person", "children": "child", "men": "man", "women": "woman", "data": "data"}
    if word in irregular:
        return irregular[word]
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("shes", "sh")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word[: -len(ending)] + instead
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 2:
        return word[:-1]
    return word


@lru_cache(NAMES_CACHED)
def stem(name: str) -> tuple[str, ...]:
    """What a reference's name is about: `customer_ids` -> customer."""
    parts = list(words(name))
    while len(parts) > 1 and parts[-1] in ("id", "ids", "ref", "refs", "key", "oid", "uuid", "no", "number"):
        parts.pop()
    return singular(parts)


@lru_cache(NAMES_CACHED)
def subject(collection: str) -> tuple[str, ...]:
    """What a collection is about: `shop.order_items` -> order item."""
    return singular(words(collection.rpartition(".")[2] or collection))


def in_role(field: FieldFacts, collections: Iterable[str]) -> str | None:
    """The only collection whose documents may do what the field's name says; None if several.

    A support representative is one of the employees, and what is shipped via
    a person ships with a shipper.
    """
    names = list(collections)
    for people in (PEOPLE, PEOPLE_BY_TRADE):
        found = [each for each in names if _is_role(field, each, people)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _is_role(field: FieldFacts, collection: str, people: frozenset[str]) -> bool:
    name = field.own_name
    if name in ("id", "_id") and len(field.steps) > 1:
        name = [step for step in field.steps[:-1] if step != "[]"][-1]
    about, target, parts = stem(name), subject(collection), words(name)
    if not about or not target:
        return False
    by_somebody = len(parts) > 1 and parts[-1] == "by"
    if target[-1] in people and (by_somebody or {about[-1], parts[0]} & ROLES):
        return True
    if len(target) > 1 or len(parts) != 2 or parts[-1] not in CONNECTING or len(parts[0]) < VERB_LENGTH_MIN:
        return False
    verb = re.escape(parts[0])
    return re.fullmatch(f"{verb}{verb[-1]}?(er|or|r)", target[0]) is not None
