"""References by a key other than `_id`, told by their values; nothing here talks to a server.

Reference tables are small: of each, the values of the fields that may be keys
are hashed, and those that are unique are kept. A field of another collection
refers to one of them where nearly all of a sample of its values is found
there, and the names do not speak against it. `prove.py` then counts, as for
every other candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.advisor.facts import CollectionFacts, FieldFacts
from treadle.advisor.naming import last_word, stem, subject, words
from treadle.advisor.relations import KEY_CLASSES, Candidate, is_own_key, name_score, thin, values_at
from treadle.advisor.structure import Stage, has_plain_path, is_plain_name, query_path
from treadle.query.keys import freeze

# Larger collections are referred to by indexed keys, which need no reading.
KEYED_DOCUMENTS_MAX = 20_000
KEYED_DOCUMENTS_MIN = 3
KEY_FIELDS_MAX = 8
LARGE_KEY_FIELDS_MAX = 2
# Of a large collection, so many values that others hold are looked for in one pass.
SOUGHT_VALUES_MAX = 10_000
FOUND_ROWS_MAX = 50_000
REFERRING_FIELDS_MAX = 40
KEY_LENGTH_MAX = 100
ITEMS_MAX = 50
# Some 30 MB of hashes at most.
HASHES_MAX = 400_000
SAMPLED_DOCUMENTS = 200
SAMPLED_VALUES_MAX = 300
SAMPLED_BYTES_MAX = 16_000_000
TEXT_KEYS = frozenset({"string"})
WHOLE_KEYS = frozenset({"int", "long", "double"})
KEY_WORDS = frozenset(
    {"id", "code", "key", "no", "nr", "num", "number", "sku", "symbol", "slug", "ref", "reference", "uid"}
    | {"iata", "icao", "faa", "iso", "iban", "isbn", "ean", "vin", "abbr", "abbreviation", "acronym"}
    | {"handle", "username", "login", "email", "serial", "ticker", "identifier", "uuid", "zip"}
)
# No field refers by such a one, whatever its values are.
TEXTS = frozenset({"name", "title", "label", "text", "description", "comment", "note", "notes", "body"})
# Values by chance: how many different ones must be found, and what share of them.
DISTINCT_MIN, DISTINCT_MIN_BY_NAME = 3, 2
CONTAINED_MIN, CONTAINED_MIN_BY_NAME = 0.95, 0.8
# What hardly recurs in the child is a key of its own.
DISTINCT_SHARE_MAX = 0.8
KEYS_TIMES_MIN = 2

# Numbers that leave most of their range free do not coincide.
SPARSE_TIMES_MIN = 50
SPARSE_DISTINCT_MIN = 10


@dataclass(frozen=True, slots=True)
class Key:
    """The values of a unique field, hashed; whether they are numbers far apart from each other."""

    hashes: frozenset[int]
    sparse: bool = False


# By kind: the collection, its unique field and its values.
Known = dict[str | None, list[tuple[CollectionFacts, str, Key]]]


def key_fields(parent: CollectionFacts) -> list[FieldFacts]:
    """The fields of a small collection that may be keys, the likeliest first."""
    return _possible_keys(parent) if parent.count <= KEYED_DOCUMENTS_MAX else []


def large_key_fields(parent: CollectionFacts) -> list[FieldFacts]:
    """The fields of a large collection that are called keys, and have no unique index to tell by."""
    if parent.count <= KEYED_DOCUMENTS_MAX:
        return []
    unique = {index.fields[0] for index in parent.indexes if index.unique and len(index.keys) == 1}
    return [
        each
        for each in _possible_keys(parent)
        if each.path not in {*unique, "_id"} and last_word(each.name) in KEY_WORDS
    ][:LARGE_KEY_FIELDS_MAX]


def _possible_keys(parent: CollectionFacts) -> list[FieldFacts]:
    if parent.count < KEYED_DOCUMENTS_MIN or parent.slow:
        return []
    fields = [each for each in parent.fields.values() if len(each.steps) == 1]
    fields = [
        each
        for each in fields
        if each.share > 0.99 and is_plain_name(each.name) and _kind(each) and not each.is_map
    ]
    indexed = {index.fields[0] for index in parent.indexes if index.unique and len(index.keys) == 1}
    fields.sort(key=lambda each: (each.path not in indexed, last_word(each.name) not in KEY_WORDS))
    return fields[:KEY_FIELDS_MAX]


def referring_fields(child: CollectionFacts) -> list[FieldFacts]:
    """The fields whose values may be keys of other collections."""
    fields = [
        each
        for each in child.fields.values()
        if each.path != "_id"
        and not is_own_key(child, each)
        and _kind(each)
        and not each.is_map
        and each.steps.count("[]") <= 1
        and has_plain_path(each)
    ]
    return fields[:REFERRING_FIELDS_MAX]


def _kind(field: FieldFacts) -> str | None:
    """Whether the values are text or whole numbers, and nothing else."""
    types = set(field.value_types)
    if types and types <= TEXT_KEYS:
        return "text"
    return "number" if types and types <= WHOLE_KEYS else None


def values_pipeline(fields: Sequence[FieldFacts], sample: list[Stage]) -> list[Stage]:
    """The short values of some fields, in rows f0, f1, …; a long text is no key."""
    project: dict[str, Any] = {"_id": 0}
    for number, each in enumerate(fields):
        path = query_path(each.steps)
        if each.in_array:
            # The first items are enough, and all of them may be megabytes.
            items = {"$slice": [f"${path}", ITEMS_MAX]}
            project[f"f{number}"] = {"$cond": [{"$isArray": [f"${path}"]}, items, f"${path}"]}
            continue
        if _kind(each) != "text":
            project[f"f{number}"] = f"${path}"
            continue
        is_short = {"$lte": [{"$strLenBytes": {"$ifNull": [f"${path}", ""]}}, KEY_LENGTH_MAX]}
        is_text = {"$eq": [{"$type": f"${path}"}, "string"]}
        project[f"f{number}"] = {"$cond": [is_text, {"$cond": [is_short, f"${path}", None]}, None]}
    return [*sample, {"$project": project}]


def sampled_documents(child: CollectionFacts) -> int:
    """How many documents to look at: fewer where they are large."""
    return max(5, min(SAMPLED_DOCUMENTS, int(SAMPLED_BYTES_MAX / max(1.0, child.mean_bytes))))


def unique_keys(fields: Sequence[FieldFacts], rows: Iterable[Mapping[str, Any]]) -> dict[str, Key]:
    """The values of those fields in which no value occurs twice."""
    seen: dict[str, set[int]] = {each.path: set() for each in fields}
    ends: dict[str, tuple[float, float]] = {}
    for row in rows:
        for number, each in enumerate(fields):
            hashes, value = seen.get(each.path), row.get(f"f{number}")
            if hashes is None:
                continue
            mark = mark_of(value) if isinstance(value, KEY_CLASSES) else None
            if mark is None or mark in hashes:
                del seen[each.path]
                continue
            hashes.add(mark)
            if isinstance(value, (int, float)):
                low, high = ends.get(each.path, (value, value))
                ends[each.path] = (min(low, value), max(high, value))
    return {
        path: Key(frozenset(hashes), _is_sparse(len(hashes), ends.get(path))) for path, hashes in seen.items()
    }


def mark_of(value: Any) -> int:
    """A hash by which a value is told from others, equal for equal numbers of all types."""
    frozen = freeze(value)
    # In CPython, -1 and -2 have the same hash.
    return hash("-1") if isinstance(value, (int, float)) and frozen == freeze(-1) else hash(frozen)


def _is_sparse(count: int, ends: tuple[float, float] | None) -> bool:
    return ends is not None and count >= SPARSE_DISTINCT_MIN and ends[1] - ends[0] >= SPARSE_TIMES_MIN * count


def sought(values: Mapping[str, Mapping[str, list[Any]]], parent: str) -> list[Any]:
    """Some values of every field that may refer to a large collection, but for its own."""
    found: dict[int, Any] = {}
    for child, fields in values.items():
        for sample in fields.values() if child != parent else ():
            for value in sample:
                if len(found) < SOUGHT_VALUES_MAX:
                    found.setdefault(mark_of(value), value)
    return list(found.values())


def found_pipeline(fields: Sequence[FieldFacts], values: list[Any]) -> list[Stage]:
    """Which of the values a large collection has, in rows f0, f1, …"""
    project = {"_id": 0, **{f"f{number}": f"${each.path}" for number, each in enumerate(fields)}}
    among = [{each.path: {"$in": values}} for each in fields]
    return [{"$match": {"$or": among}}, {"$project": project}, {"$limit": FOUND_ROWS_MAX}]


def sampled_values(fields: Sequence[FieldFacts], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each field in a sample; those of arrays one by one."""
    values: dict[str, list[Any]] = {}
    for number, each in enumerate(fields):
        found = [value for row in rows for value in values_at(row, f"f{number}")]
        usable = [value for value in found if isinstance(value, KEY_CLASSES)]
        values[each.path] = thin(usable, SAMPLED_VALUES_MAX)
    return values


def by_kind(parents: Mapping[str, CollectionFacts], keys: Mapping[str, Mapping[str, Key]]) -> Known:
    """All unique fields, those of text apart from those of numbers."""
    known: Known = {}
    for name, unique in keys.items():
        for path, key in unique.items():
            known.setdefault(_kind(parents[name].fields[path]), []).append((parents[name], path, key))
    return known


def candidates(child: CollectionFacts, values: Mapping[str, list[Any]], keys: Known) -> Iterator[Candidate]:
    """Every reference by a natural key that the values bear out."""
    for field in referring_fields(child):
        sample = values.get(field.path, [])
        hashes = {mark_of(value) for value in sample}
        if not hashes:
            continue
        recurring = len(hashes) <= DISTINCT_SHARE_MAX * len(sample)
        for parent, path, key in keys.get(_kind(field), ()):
            # What refers to its own collection is told by its name; see `relations.py`.
            share = len(hashes & key.hashes) / len(hashes)
            if share < CONTAINED_MIN_BY_NAME or parent.name == child.name:
                continue
            # A few of many values look all different; there must then be fewer keys than documents.
            recurs = recurring or child.count >= KEYS_TIMES_MIN * len(key.hashes)
            score = _score(field, parent, parent.fields[path], recurs, key.sparse)
            if score is None:
                continue
            least = CONTAINED_MIN_BY_NAME if score else CONTAINED_MIN
            distinct = DISTINCT_MIN_BY_NAME if score else DISTINCT_MIN
            if key.sparse and not score:
                distinct = SPARSE_DISTINCT_MIN
            if share >= least and len(hashes) >= distinct:
                yield Candidate(child.name, field, parent.name, path, score, least, "values")


def _score(
    field: FieldFacts, parent: CollectionFacts, key: FieldFacts, recurs: bool, sparse: bool
) -> int | None:
    """How well the names fit, 0 where only the values do; None where it is no reference."""
    if name := name_score(field, parent.name):
        # `category` refers to categories.name, and `accounts` to accounts.number.
        return max(1, name - 1)
    own, target = words(field.own_name), words(key.name)
    # Every `post_type_id` ends like the `id` of any collection, whose numbers it may have by chance.
    is_telling = target != ("id",) or sparse or _kind(field) == "text"
    ends_alike = own[-len(target) :] == target and len(own) > len(target) and is_telling
    if ends_alike or own == (*subject(parent.name), *target):
        return 1 if _looks_like_key(parent, key) else None
    if not own or not recurs:
        return None
    if own == target and len(own) > 1 and _is_first(parent, key):
        # A table of names in other words: `product_category_name` with its translation.
        return 1
    if own[-1] in TEXTS or not _looks_like_key(parent, key):
        return None
    if _kind(field) != "text":
        # Small numbers coincide; of those far apart, it is enough that both are called keys.
        return 0 if sparse and own[-1] in KEY_WORDS else None
    return 1 if own == target else 0


def _looks_like_key(parent: CollectionFacts, key: FieldFacts) -> bool:
    """Whether a field is what its documents are known by: by its name, an index or its place."""
    if key.path == "_id" or last_word(key.name) in KEY_WORDS or stem(key.name) == subject(parent.name):
        return True
    if any(index.unique and index.fields == (key.path,) for index in parent.indexes):
        return key.name.lower() not in TEXTS
    return _is_first(parent, key) and last_word(key.name) not in TEXTS


def _is_first(parent: CollectionFacts, key: FieldFacts) -> bool:
    first = next((each for each in parent.top()), None)
    return first is not None and first.path == key.path
