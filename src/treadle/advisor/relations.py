"""Which field may hold which collection's keys; nothing here talks to a server.

A field is a candidate by its name (`customer_id`, `authorId`, `Album`), or by
its type alone where the type is distinctive: ObjectIds and UUIDs do not
coincide by chance, small integers do. `prove.py` confirms or rejects a
candidate by looking its values up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import ObjectId

from treadle.advisor.facts import NUMBERS, CollectionFacts, Copy, Distribution, FieldFacts, Query, Relation
from treadle.advisor.naming import in_role, last_word, stem, subject, words
from treadle.advisor.structure import Stage, has_plain_path, label, query_path

KEY_TYPES = frozenset({"objectId", "string", "int", "long", "double", "binData"})
KEY_CLASSES = (ObjectId, str, int, float, bytes)
# Values of these types occur in another collection by reference, not by chance.
DISTINCTIVE_TYPES = frozenset({"objectId", "binData"})
TARGETS_BY_TYPE_MAX = 100
FIELDS_MAX = 400
PROBED_VALUES = 64
SAMPLED_VALUES_MAX = 2_000
DRAWN_VALUES = 300
HEAVY_VALUES = 50
PROBED_DOCUMENTS = 200
# With fewer distinct values, their presence in another collection proves little.
DISTINCT_MIN_UNNAMED = 3
CONTAINED_MIN = 0.5
SELF_NAMES = frozenset({"parent", "reports_to", "manager", "reply_to", "in_reply_to", "boss", "supervisor"})
# Names of a number that says which one of its siblings a child is.
ORDINALS = frozenset(
    {"sequence", "seq", "position", "pos", "line", "ordinal", "index", "idx", "sequential", "order", "no"}
    | {"nr", "number", "step", "place", "item"}
)
ORDINALS_MAX = 3
NUMBERED_SHARE_MIN = 0.95
# No name fits better than what the workload joins.
JOINED_SCORE = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A field that may hold the values of `key` in `parent`."""

    child: str
    field: FieldFacts
    parent: str
    key: str
    # How well the name fits; 0 where only the type does. The best name wins.
    score: int
    # The share of the distinct values that must exist in the parent.
    contained_min: float = CONTAINED_MIN
    # What speaks for it where the name does not: "type" or "values".
    otherwise: str = "type"

    @property
    def path(self) -> str:
        """The path as a query writes it."""
        return query_path(self.field.steps)

    @property
    def type(self) -> str:
        """The type of the references as a query writes it; all numbers are one."""
        return "number" if self.field.type in NUMBERS else self.field.type


def name_score(field: FieldFacts, collection: str) -> int:
    """How well a field's name fits a collection; 0 is not at all."""
    about, target = stem(field.own_name), subject(collection)
    if not about or not target:
        return 0
    if about == target:
        return 4
    # `user` in `app_users`, or `home_address` in `addresses`.
    if about == target[-len(about) :]:
        return 3
    if target == about[-len(target) :]:
        return 2
    # The enclosing object names the reference: `customer.id`, `customer._id`.
    if field.own_name in ("id", "_id") and len(field.steps) > 1:
        owner = [step for step in field.steps[:-1] if step != "[]"][-1]
        return 3 if stem(owner) == target else 0
    return 0


def is_own_key(facts: CollectionFacts, field: FieldFacts) -> bool:
    """Whether a field is called the id of its own collection: what others refer to refers to nothing."""
    parts = words(field.name)
    is_id = parts == ("id",) or (parts[-1:] == ("id",) and stem(field.name) == subject(facts.name))
    return len(field.steps) == 1 and is_id


def keys_of(parent: CollectionFacts) -> list[str]:
    """The fields by which other documents can refer to a collection."""
    keys = ["_id"]
    for index in parent.indexes:
        if index.unique and len(index.keys) == 1 and not index.special:
            keys.append(index.fields[0])
    for place, field in enumerate(parent.top()):
        is_common_key = field.share > 0.99 and field.type in KEY_TYPES
        # Such as AlbumId in albums, or just Id, or the id that comes first, beside an _id that is not used.
        is_id = is_own_key(parent, field) or (not place and last_word(field.name) == "id")
        if is_common_key and is_id:
            keys.append(field.path)
    return list(dict.fromkeys(keys))


def candidates(collections: Mapping[str, CollectionFacts]) -> dict[tuple[str, str], list[Candidate]]:
    """Every field that may be a reference by its name or type, with its possible targets."""
    parents = [each for each in collections.values() if each.plain and each.count]
    keys = {parent.name: keys_of(parent) for parent in parents}
    by_field: dict[tuple[str, str], list[Candidate]] = {}
    for child in parents:
        for field in child.fields.values():
            if field.path == "_id" or field.type not in KEY_TYPES or field.is_map:
                continue
            if is_own_key(child, field):
                continue
            if not has_plain_path(field) or field.steps.count("[]") > 1:
                continue
            targets = _targets(child, field, parents, keys)
            if targets:
                by_field[child.name, field.path] = targets
    return by_field


def merged(
    named: Mapping[tuple[str, str], list[Candidate]], natural: Iterable[Candidate]
) -> list[tuple[tuple[str, str], list[Candidate]]]:
    """The candidates by name or type with those by their values, best names first.

    Fields whose name fits a target come first too, in case there are too many.
    """
    by_field = {place: list(targets) for place, targets in named.items()}
    for each in natural:
        targets = by_field.setdefault((each.child, each.field.path), [])
        if each.score == JOINED_SCORE:
            targets[:] = [other for other in targets if (each.parent, each.key) != (other.parent, other.key)]
        if all((each.parent, each.key) != (other.parent, other.key) for other in targets):
            targets.append(each)
    for targets in by_field.values():
        targets.sort(key=lambda each: (-each.score, each.parent, each.key))
    return sorted(by_field.items(), key=lambda pair: (not pair[1][0].score, pair[0]))


def _targets(
    child: CollectionFacts,
    field: FieldFacts,
    parents: Iterable[CollectionFacts],
    keys: Mapping[str, list[str]],
) -> list[Candidate]:
    targets: list[Candidate] = []
    unnamed = 0
    self_score = 3 if {"_".join(stem(field.own_name)), *words(field.own_name)[:1]} & SELF_NAMES else 0
    others = [each for each in parents if each.name != child.name]
    if self_score and any(name_score(field, each.name) for each in others):
        # The manager of a store is named as one of the staff.
        self_score = 1
    alike = [
        each.name for each in others if any(_same_type(field, each.fields.get(k)) for k in keys[each.name])
    ]
    role = in_role(field, alike)
    for parent in parents:
        name = name_score(field, parent.name)
        if parent.name == child.name:
            name = max(name if stem(field.own_name) != subject(child.name) else 0, self_score)
        for key in keys[parent.name]:
            if parent.name == child.name and (key == field.path or (key != "_id" and not self_score)):
                continue
            if not _same_type(field, parent.fields.get(key)):
                continue
            score, least = name, CONTAINED_MIN
            if key != "_id":
                score = max(_natural_score(field, parent, key), name if last_word(key) == "id" else 0)
            is_id = key == "_id" or last_word(key) == "id"
            if not score and role == parent.name and is_id and field.type not in DISTINCTIVE_TYPES:
                # Small numbers coincide: all must be found, and in the only collection that it can mean.
                score, least = 1, 1.0
            if key != "_id":
                if not score:
                    continue
            elif not score:
                if field.type not in DISTINCTIVE_TYPES or unnamed >= TARGETS_BY_TYPE_MAX:
                    continue
                unnamed += 1
            targets.append(Candidate(child.name, field, parent.name, key, score, least))
    return targets


def joined(collections: Mapping[str, CollectionFacts], queries: Iterable[Query]) -> Iterator[Candidate]:
    """The references that the workload follows: where a `$lookup` goes, whatever the names are."""
    for child, (parent, local, foreign) in sorted(
        {(query.collection, lookup) for query in queries for lookup in query.lookups}
    ):
        # A parent may join its children as well as a child its parent.
        for one, path, other, key in ((child, local, parent, foreign), (parent, foreign, child, local)):
            facts, target = collections.get(one), collections.get(other)
            if facts is None or target is None or not (facts.plain and target.plain):
                continue
            if one == parent and key not in keys_of(target):
                continue
            field = next((each for each in facts.fields.values() if query_path(each.steps) == path), None)
            if field is None or field.path == "_id" or is_own_key(facts, field) or not has_plain_path(field):
                continue
            if field.steps.count("[]") <= 1 and _same_type(field, target.fields.get(key)):
                yield Candidate(one, field, other, key, JOINED_SCORE)


def _natural_score(field: FieldFacts, parent: CollectionFacts, key: str) -> int:
    """`sku` refers to `products.sku`, and `customer_email` to `customers.email`."""
    name, target = words(field.own_name), words(key)
    if name == target:
        # Two collections may both have a unique field `name` without referring to each other.
        return 2 if key not in ("name", "title", "slug", "code") else 0
    return 3 if name == (*subject(parent.name), *target) else 0


def _same_type(field: FieldFacts, key: FieldFacts | None) -> bool:
    if key is None:
        return False
    # Older shells write every number as a double.
    numbers = NUMBERS - {"decimal"}
    return field.type in key.value_types or (field.type in numbers and bool(numbers & set(key.value_types)))


def probe_pipeline(candidate: Candidate, anywhere: bool) -> list[Stage]:
    """A few values of the field, to tell where to look closer; the sample need not be uniform.

    First from `anywhere` in the collection: the first documents may all have
    the same parent. Where the field is too rare for that, from the first.
    """
    typed: Stage = {"$match": {candidate.path: {"$type": candidate.type}}}
    few: Stage = {"$sample": {"size": PROBED_DOCUMENTS}} if anywhere else {"$limit": PROBED_DOCUMENTS}
    return [
        *([few, typed] if anywhere else [typed, few]),
        *_unwind_stages(candidate.field),
        {"$group": {"_id": f"${candidate.path}"}},
        {"$match": {"_id": {"$type": candidate.type}}},
        {"$limit": PROBED_VALUES},
    ]


def all_references_pipeline(candidate: Candidate, checked_max: int) -> list[Stage]:
    """How many values occur how often, and some of the values to look up."""
    present: Stage = {"$match": {"_id": {"$ne": None}}}
    return [
        *_unwind_stages(candidate.field),
        {"$group": {"_id": f"${candidate.path}", "n": {"$sum": 1}}},
        {
            "$facet": {
                "counts": [present, {"$group": {"_id": "$n", "values": {"$sum": 1}}}],
                # After a $group this picks from all rows at random, and so uniformly.
                "values": [present, {"$sample": {"size": checked_max}}],
            }
        },
    ]


def sampled_references_pipeline(candidate: Candidate, sample: list[Stage]) -> list[Stage]:
    """The references in a sample of documents, one row each."""
    return [
        *sample,
        *_unwind_stages(candidate.field),
        {"$match": {candidate.path: {"$type": candidate.type}}},
        {"$project": {"_id": 0, "v": f"${candidate.path}"}},
    ]


def count_pipeline(candidate: Candidate, values: list[Any]) -> list[Stage]:
    """How many references there are to each of some values; uses an index where there is one."""
    among = {"$match": {candidate.path: {"$in": values}}}
    unwind = _unwind_stages(candidate.field)
    again = [*unwind, among] if unwind else []
    return [among, *again, {"$group": {"_id": f"${candidate.path}", "n": {"$sum": 1}}}]


def ordinals(child: CollectionFacts) -> list[FieldFacts]:
    """The whole numbers that may number the children of one parent."""
    return [
        each
        for each in child.top()
        if each.share > 0.99
        and set(each.types) <= {"int", "long", "double"}
        and ORDINALS & set(words(each.name))
        and has_plain_path(each)
    ][:ORDINALS_MAX]


def numbered_pipeline(candidate: Candidate, fields: Sequence[FieldFacts]) -> list[Stage]:
    """How many parents there are, and of how many each field numbers the children, from 0 or 1 on."""
    names = {f"o{number}": f"${each.path}" for number, each in enumerate(fields)}
    return [
        {
            "$group": {
                "_id": f"${candidate.path}",
                "n": {"$sum": 1},
                **{k: {"$addToSet": v} for k, v in names.items()},
            }
        },
        {"$match": {"n": {"$gt": 1}}},
        {
            "$group": {
                "_id": None,
                "n": {"$sum": 1},
                **{
                    name: {
                        "$sum": {
                            "$cond": [
                                {
                                    "$and": [
                                        {"$eq": [{"$size": f"${name}"}, "$n"]},
                                        {"$in": [{"$min": f"${name}"}, [0, 1]]},
                                    ]
                                },
                                1,
                                0,
                            ]
                        }
                    }
                    for name in names
                },
            }
        },
    ]


def _unwind_stages(field: FieldFacts) -> list[Stage]:
    places = [number for number, step in enumerate(field.steps) if step == "[]"]
    return [{"$unwind": f"${query_path(field.steps[:place])}"} for place in places]


def thin(values: list[Any], number: int) -> list[Any]:
    """At most so many of the values, spread evenly: the first may be of one day or one parent."""
    if len(values) <= number:
        return values
    return [values[place * len(values) // number] for place in range(number)]


def heaviest(values: list[Any]) -> list[Any]:
    """The values that occur most often in a sample; the parent with the most children is among them."""
    return [value for value, _ in Counter(values).most_common(HEAVY_VALUES)]


def count_references(candidate: Candidate, child: CollectionFacts) -> int:
    """About how many references a large collection holds."""
    field = candidate.field
    if not field.in_array:
        alike = NUMBERS if field.type in NUMBERS else {field.type}
        number = sum(count for kind, count in field.value_types.items() if kind in alike)
        return round(child.count * number / max(1, field.looked_at))
    array = child.fields.get(label(field.steps[: field.steps.index("[]")]))
    if array is None:
        return child.count
    # Lengths are of the documents that have the array.
    return round(child.count * array.share * (array.lengths.mean if array.lengths else 1.0))


def children_per_parent(drawn: list[int], heaviest: int, references: int) -> Distribution:
    """The distribution, from the numbers of children of parents drawn by their references.

    A parent with many children is drawn more often, in just that proportion;
    so each counts for one over its number.
    """
    weights: defaultdict[int, float] = defaultdict(float)
    for number in drawn:
        weights[number] += 1 / number
    scale = references / len(drawn)
    counts = [(number, max(1, round(weight * scale))) for number, weight in weights.items()]
    if heaviest > max(weights):
        counts.append((heaviest, 1))
    return Distribution.of_counts(counts, references)


def is_reference(candidate: Candidate, share: float, distinct: int) -> bool:
    """Whether enough of the distinct values exist in the parent."""
    # Only distinctive types come here without a name, and half of their values are no coincidence.
    return share >= candidate.contained_min and (candidate.score > 0 or distinct >= DISTINCT_MIN_UNNAMED)


def without_copies(relations: Iterable[Relation], copies: Iterable[Copy]) -> list[Relation]:
    """The relations that are not merely part of another one.

    A copy of a unique field refers to its source by chance of being unique.
    Items that a parent embeds with their ids are its own children, who refer
    back to it.
    """
    relations = list(relations)
    copied = {(each.child, each.path, each.parent) for each in copies}
    back = {(each.parent, each.child) for each in relations if not each.many}
    return [
        each
        for each in relations
        if (each.child, each.path, each.parent) not in copied
        and not (each.path.endswith("[]._id") and (each.child, each.parent) in back)
    ]


def usable_keys(values: Iterable[Any]) -> list[Any]:
    """The values that can be looked up; a regular expression, say, would match others."""
    return [value for value in values if isinstance(value, KEY_CLASSES)]


def values_at(row: Mapping[str, Any], path: str) -> list[Any]:
    """The values at a dotted path of a document; several where the path leads through arrays."""
    if "." not in path:
        value = row.get(path, [])
        return value if isinstance(value, list) else [value]
    values: list[Any] = [row]
    for step in path.split("."):
        inside = [each[step] for each in values if isinstance(each, Mapping) and step in each]
        values = [item for each in inside for item in (each if isinstance(each, list) else [each])]
    return values
