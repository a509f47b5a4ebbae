"""Which field may hold which collection's keys; nothing here talks to a server.

A field is a candidate by its name (`customer_id`, `authorId`, `Album`) or by
its type alone, where a type is telling (ObjectIds and UUIDs do not coincide
by chance; small integers do). What a candidate is worth is decided by looking
its values up: see `profile.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bson import ObjectId

from treadle.advisor.facts import NUMBERS, CollectionFacts, Distribution, FieldFacts
from treadle.advisor.structure import Stage, is_plain_name, queried

KEY_TYPES = frozenset({"objectId", "string", "int", "long", "double", "binData"})
KEY_CLASSES = (ObjectId, str, int, float, bytes)
# Values of these types are found in another collection by reference, not by chance.
TELLING_TYPES = frozenset({"objectId", "binData"})
TARGETS_BY_TYPE_MAX = 100
FIELDS_MAX = 400
PROBED_VALUES = 64
SAMPLED_VALUES_MAX = 2_000
DRAWN_VALUES = 300
HEAVY_VALUES = 50
PROBED_DOCUMENTS = 200
# Below this many distinct values, containment proves little.
DISTINCT_MIN_UNNAMED = 3
CONTAINED_MIN = 0.5
SELF_NAMES = frozenset({"parent", "reports_to", "manager", "reply_to", "in_reply_to", "boss", "supervisor"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A field that may hold the values of `key` in `parent`."""

    child: str
    field: FieldFacts
    parent: str
    key: str
    named: bool
    # How well the name fits; among equals the better name wins.
    score: int

    @property
    def path(self) -> str:
        """The path as a query writes it."""
        return queried(self.field.steps)

    @property
    def type(self) -> str:
        """The type of the references as a query writes it; all numbers are one."""
        return "number" if self.field.type in NUMBERS else self.field.type


def words(name: str) -> tuple[str, ...]:
    """The words of a name in lower case: `authorIds`, `author_ids` and `Author-IDs` are the same."""
    split = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", name)
    return tuple(part for part in re.split(r"[\W_]+", split.lower()) if part)


def singular(word: str) -> str:
    """English plurals, as far as collection names go."""
    irregular = {"people": "person", "children": "child", "men": "man", "women": "woman", "data": "data"}
    if word in irregular:
        return irregular[word]
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("shes", "sh")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word[: -len(ending)] + instead
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 2:
        return word[:-1]
    return word


def stem(name: str) -> tuple[str, ...]:
    """What a reference's name is about: `customer_ids` -> customer."""
    parts = list(words(name))
    while len(parts) > 1 and parts[-1] in ("id", "ids", "ref", "refs", "key", "oid", "uuid", "no", "number"):
        parts.pop()
    if parts:
        parts[-1] = singular(parts[-1])
    return tuple(parts)


def subject(collection: str) -> tuple[str, ...]:
    """What a collection is about: `shop.order_items` -> order item."""
    parts = list(words(collection.rpartition(".")[2] or collection))
    if parts:
        parts[-1] = singular(parts[-1])
    return tuple(parts)


def name_score(field: FieldFacts, collection: str) -> int:
    """How well a field's name fits a collection; 0 is not at all."""
    about, wanted = stem(field.called), subject(collection)
    if not about or not wanted:
        return 0
    if about == wanted:
        return 4
    # `user` in `app_users`, or `home_address` in `addresses`.
    if about == wanted[-len(about) :]:
        return 3
    if wanted == about[-len(wanted) :]:
        return 2
    # The reference is named by its surroundings: `customer.id`, `customer._id`.
    if field.called in ("id", "_id") and len(field.steps) > 1:
        owner = [step for step in field.steps[:-1] if step != "[]"][-1]
        return 3 if stem(owner) == wanted else 0
    return 0


def keys_of(parent: CollectionFacts) -> list[str]:
    """The fields by which documents of a collection can be named."""
    found = ["_id"]
    for index in parent.indexes:
        if index.unique and len(index.keys) == 1 and not index.special and index.fields[0] not in found:
            found.append(index.fields[0])
    for field in parent.top():
        about = words(field.name)
        usual = field.share > 0.99 and field.type in KEY_TYPES and len(about) > 1 and about[-1] == "id"
        # Such as AlbumId in albums, beside an _id that nobody uses.
        if usual and stem(field.name) == subject(parent.name) and field.path not in found:
            found.append(field.path)
    return found


def candidates(collections: Mapping[str, CollectionFacts]) -> dict[tuple[str, str], list[Candidate]]:
    """Every field that could refer to something, with what it could refer to, best names first.

    Fields whose name fits something come first, in case there are too many.
    """
    parents = [each for each in collections.values() if each.plain and each.count]
    keys = {parent.name: keys_of(parent) for parent in parents}
    found: list[Candidate] = []
    for child in parents:
        for field in child.fields.values():
            if field.path == "_id" or field.type not in KEY_TYPES or field.is_map:
                continue
            names = [step for step in field.steps if step != "[]"]
            if "*" in names or not all(map(is_plain_name, names)) or field.steps.count("[]") > 1:
                continue
            found += _targets(child, field, parents, keys)
    found.sort(key=lambda each: (-each.score, each.parent, each.key))
    by_field: dict[tuple[str, str], list[Candidate]] = {}
    for each in found:
        by_field.setdefault((each.child, each.field.path), []).append(each)
    return dict(sorted(by_field.items(), key=lambda pair: (not pair[1][0].named, pair[0])))


def _targets(
    child: CollectionFacts,
    field: FieldFacts,
    parents: Iterable[CollectionFacts],
    keys: Mapping[str, list[str]],
) -> list[Candidate]:
    found: list[Candidate] = []
    unnamed = 0
    for parent in parents:
        score = name_score(field, parent.name)
        if parent.name == child.name:
            score = max(score if stem(field.called) != subject(child.name) else 0, _self_score(field))
        for key in keys[parent.name]:
            if parent.name == child.name and (key == field.path or (key != "_id" and not _self_score(field))):
                continue
            if not _same_type(field, parent.fields.get(key)):
                continue
            natural = score
            if key != "_id":
                natural = max(_natural_score(field, parent, key), score if _is_id(key) else 0)
                if not natural:
                    continue
            elif not score:
                if field.type not in TELLING_TYPES or unnamed >= TARGETS_BY_TYPE_MAX:
                    continue
                unnamed += 1
            found.append(Candidate(child.name, field, parent.name, key, natural > 0, natural))
    return found


def _self_score(field: FieldFacts) -> int:
    return (
        3
        if {"_".join(stem(field.called)), words(field.called)[0] if words(field.called) else ""} & SELF_NAMES
        else 0
    )


def _is_id(key: str) -> bool:
    return words(key)[-1:] == ("id",)


def _natural_score(field: FieldFacts, parent: CollectionFacts, key: str) -> int:
    """`sku` names `products.sku`, and `customer_email` names `customers.email`."""
    names, wanted = words(field.called), words(key)
    if names == wanted:
        # Two collections may both have a unique field `name` without referring to each other.
        return 2 if key not in ("name", "title", "slug", "code") else 0
    return 3 if names == (*subject(parent.name), *wanted) else 0


def _same_type(field: FieldFacts, key: FieldFacts | None) -> bool:
    if key is None:
        return False
    # Older shells write every number as a double.
    numbers = {"int", "long", "double"}
    return field.type in key.filled or (field.type in numbers and bool(numbers & set(key.filled)))


def probe(candidate: Candidate, anywhere: bool) -> list[Stage]:
    """A few values of the field, to tell where to look closer; they need not be a fair choice.

    First from `anywhere` in the collection: the first documents may all have
    the same parent. Where the field is too rare for that, from the first.
    """
    path = candidate.path
    typed: Stage = {"$match": {path: {"$type": candidate.type}}}
    few: Stage = {"$sample": {"size": PROBED_DOCUMENTS}} if anywhere else {"$limit": PROBED_DOCUMENTS}
    return [
        *([few, typed] if anywhere else [typed, few]),
        *_unwound(candidate.field),
        {"$group": {"_id": f"${path}"}},
        {"$match": {"_id": {"$type": candidate.type}}},
        {"$limit": PROBED_VALUES},
    ]


def grouped(field: FieldFacts, path: str, checked_max: int) -> list[Stage]:
    """How many documents hold each value: the counts of counts, the missing, and values to look up."""
    return [
        *_unwound(field),
        {"$group": {"_id": f"${path}", "n": {"$sum": 1}}},
        {
            "$facet": {
                "counts": [
                    {"$match": {"_id": {"$ne": None}}},
                    {"$group": {"_id": "$n", "values": {"$sum": 1}}},
                ],
                # After a $group this is a random order of all rows, and so uniform.
                "values": [{"$match": {"_id": {"$ne": None}}}, {"$sample": {"size": checked_max}}],
            }
        },
    ]


def sampled_values(candidate: Candidate, chosen: list[Stage]) -> list[Stage]:
    """The references in a sample of documents, one row each."""
    path = candidate.path
    return [
        *chosen,
        *_unwound(candidate.field),
        {"$match": {path: {"$type": candidate.type}}},
        {"$project": {"_id": 0, "v": f"${path}"}},
    ]


def counted(candidate: Candidate, values: list[Any]) -> list[Stage]:
    """How many references there are to each of some values; an index is used where there is one."""
    path = candidate.path
    among = {"$match": {path: {"$in": values}}}
    unwound = _unwound(candidate.field)
    again = [*unwound, among] if unwound else []
    return [among, *again, {"$group": {"_id": f"${path}", "n": {"$sum": 1}}}]


def thinned(values: list[Any], number: int) -> list[Any]:
    """So many of the values at most, evenly from all: the first may be of one day or one parent."""
    if len(values) <= number:
        return values
    return [values[place * len(values) // number] for place in range(number)]


def heaviest(values: list[Any]) -> list[Any]:
    """The values that occur most often in a sample; the parent with the most children is among them."""
    counts: dict[Any, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return sorted(counts, key=lambda value: -counts[value])[:HEAVY_VALUES]


def per_parent(drawn: list[int], heaviest: int, references: int) -> Distribution:
    """Children per parent, from the numbers of children of parents that references were drawn of.

    A parent with many children is drawn more often, in just that proportion;
    so each counts for one over its number.
    """
    weights: dict[int, float] = {}
    for number in drawn:
        weights[number] = weights.get(number, 0.0) + 1 / number
    parents = references * sum(weights.values()) / len(drawn)
    scale = parents / sum(weights.values())
    rows = [(number, number, max(1, round(weight * scale)), 0.0) for number, weight in weights.items()]
    if heaviest > max(weights):
        rows.append((heaviest, heaviest, 1, 0.0))
    rows = [(low, high, count, low * count) for low, high, count, _ in rows]
    return Distribution.of(rows, references)


def _unwound(field: FieldFacts) -> list[Stage]:
    stages: list[Stage] = []
    for number, step in enumerate(field.steps):
        if step == "[]":
            before = ".".join(each for each in field.steps[:number] if each != "[]")
            stages.append({"$unwind": f"${before}"})
    return stages


def contained_enough(candidate: Candidate, share: float, distinct: int) -> bool:
    """Whether so many of the values were found that this is a reference."""
    # Only telling types come here without a name, and half of them would not be found by chance.
    return share >= CONTAINED_MIN and (candidate.named or distinct >= DISTINCT_MIN_UNNAMED)


def usable(values: Iterable[Any]) -> list[Any]:
    """The values that can be looked up; a regular expression, say, would match others."""
    return [value for value in values if isinstance(value, KEY_CLASSES)]


def hashable(value: Any) -> Any:
    """Equal for what the server takes as equal: 5, 5.0 and a long 5 are one key."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, bytes)) and not isinstance(value, bool) else repr(value)


def at(row: Mapping[str, Any], path: str) -> list[Any]:
    """The values at a dotted path of a document; several where arrays lie on the way."""
    found: list[Any] = [row]
    for step in path.split("."):
        inside = [each[step] for each in found if isinstance(each, Mapping) and step in each]
        found = [item for each in inside for item in (each if isinstance(each, list) else [each])]
    return found
