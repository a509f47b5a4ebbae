"""Questions that only some collections call for, and what the answers mean; nothing here talks to a server.

*Kinds*: does the presence of fields depend on a field with few values?
*Series*: are the documents readings, with a key, a time and numbers?
*Versions*: does a field number the documents' versions, and do old ones remain?
*Tree*: how deep do a collection's references to itself lead?
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from treadle.advisor.facts import (
    NUMBERS,
    CollectionFacts,
    Distribution,
    FieldFacts,
    Kind,
    Kinds,
    Series,
    TreeFacts,
    Versions,
)
from treadle.advisor.relations import words
from treadle.advisor.structure import Stage, is_plain_name

KINDS_MAX = 30
KIND_CANDIDATES_MAX = 5
OPTIONAL_SHARES = (0.005, 0.98)
OPTIONAL_FIELDS_MAX = 60
# A field belongs to a kind when nearly all of that kind have it, and nearly none of another.
OWN_SHARE_MIN, FOREIGN_SHARE_MAX = 0.8, 0.02
KIND_NAMES = frozenset(
    {"type", "kind", "class", "cls", "discriminator", "t", "category", "variant", "subtype"}
)

SERIES_KEYS_MAX = 4
SERIES_DOCUMENTS_MIN = 5_000
SERIES_BYTES_MAX = 512
SERIES_FIELDS_MAX = 16
READINGS_PER_SERIES_MIN = 50

VERSION_NAMES = frozenset(
    {"schema_version", "schemaversion", "_v", "doc_version", "docversion", "schema", "version"}
)
VERSIONS_MAX = 50
DEPTH_MAX = 1_000


# -- kinds ---------------------------------------------------------------------------


def optional_fields(facts: CollectionFacts) -> list[FieldFacts]:
    """Fields that many documents have and many have not."""
    low, high = OPTIONAL_SHARES
    found = [each for each in facts.top() if low <= each.share <= high and is_plain_name(each.name)]
    return [each for each in found if each.name != "*"][:OPTIONAL_FIELDS_MAX]


def kind_candidates(facts: CollectionFacts) -> list[str]:
    """Text or small numbers that every document has, the likeliest names first."""
    if len(optional_fields(facts)) < 2:
        return []
    found = [
        each
        for each in facts.top()
        if each.share > 0.99 and set(each.types) <= {"string", "int"} and is_plain_name(each.name)
    ]

    def rank(each: FieldFacts) -> tuple[int, str]:
        named = words(each.name)[-1:] and words(each.name)[-1] in KIND_NAMES
        return (0 if named else 1, each.name)

    return [each.name for each in sorted(found, key=rank)[:KIND_CANDIDATES_MAX]]


def kinds_pipeline(name: str, facts: CollectionFacts, chosen: list[Stage]) -> list[Stage]:
    """One row per value of the field: how many documents, and how many of them have each optional field."""
    present = {
        f"f{number}": {"$sum": {"$cond": [{"$eq": [{"$type": f"${each.name}"}, "missing"]}, 0, 1]}}
        for number, each in enumerate(optional_fields(facts))
    }
    return [
        *chosen,
        {"$group": {"_id": f"${name}", "n": {"$sum": 1}, **present}},
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": KINDS_MAX + 1},
    ]


def read_kinds(
    name: str, facts: CollectionFacts, rows: list[dict[str, Any]], values_shown: bool
) -> Kinds | None:
    """The kinds, if fields really depend on the value; else None."""
    if not 2 <= len(rows) <= KINDS_MAX:
        return None
    optional = optional_fields(facts)
    kinds = [
        Kind(
            str(row["_id"]) if values_shown else f"kind-{place}",
            row["n"],
            {each.name: row[f"f{number}"] / row["n"] for number, each in enumerate(optional)},
        )
        for place, row in enumerate(rows, 1)
    ]
    dependent = [
        each
        for each in optional
        if max(kind.shares[each.name] for kind in kinds) >= OWN_SHARE_MIN
        and min(kind.shares[each.name] for kind in kinds) <= FOREIGN_SHARE_MAX
    ]
    owners = {kind.label for kind in kinds for each in dependent if kind.shares[each.name] >= OWN_SHARE_MIN}
    if len(dependent) < 2 or len(owners) < 2 or len(dependent) < len(optional) / 2:
        return None
    return Kinds(name, tuple(kinds), sum(row["n"] for row in rows))


# -- series --------------------------------------------------------------------------


def series_fields(facts: CollectionFacts) -> tuple[str, list[str], list[str]] | None:
    """The time, the possible keys and the measures, if the documents look like readings."""
    fields = facts.top()
    usual = [each for each in fields if each.share > 0.5]
    if facts.count < SERIES_DOCUMENTS_MIN or facts.mean_bytes > SERIES_BYTES_MAX or facts.capped:
        return None
    if len(fields) > SERIES_FIELDS_MAX or not all(is_plain_name(each.name) for each in fields):
        return None
    if any({"array", "object"} & set(each.types) for each in fields):
        return None
    times = [each.name for each in usual if set(each.filled) == {"date"} and each.share > 0.99]
    measures = [each.name for each in fields if each.filled and set(each.filled) <= NUMBERS]
    keys = [
        each.name
        for each in usual
        if each.share > 0.99 and set(each.filled) <= {"string", "int", "long", "objectId"} and each.filled
    ]
    # A number may be the key or a measure; text and ids are likelier keys.
    keys.sort(key=lambda name: (name in measures, not _is_key_name(name)))
    keys = keys[:SERIES_KEYS_MAX]
    if len(times) != 1 or not keys or not set(measures) - {keys[0]}:
        return None
    return times[0], keys, measures


def _is_key_name(name: str) -> bool:
    hints = {"id", "sensor", "device", "meter", "host", "station", "symbol", "machine", "source", "series"}
    return bool(hints & set(words(name)))


def distinct_pipeline(keys: Iterable[str], chosen: list[Stage]) -> list[Stage]:
    """How many different values each possible key has, in a sample."""
    parts = {
        f"k{number}": [{"$group": {"_id": f"${name}"}}, {"$count": "n"}] for number, name in enumerate(keys)
    }
    return [*chosen, {"$facet": {"n": [{"$count": "n"}], **parts}}]


def is_unlike_series(keys: Iterable[str], sample: Mapping[str, list[Any]]) -> bool:
    """Whether values at hand already show an id that hardly recurs, so that nobody need ask."""
    return any(len(set(map(str, sample[name]))) > len(sample[name]) / 2 for name in keys if sample.get(name))


def choose_key(keys: list[str], row: Mapping[str, Any], facts: CollectionFacts) -> str | None:
    """The key with the most values that still leaves many documents to each.

    A reading belongs to one series and says the rest in numbers. Where an id
    or a text differs from document to document, these are no readings.
    """
    looked_at = min(facts.count, row["n"][0]["n"] if row["n"] else 0)
    most = min(facts.count / READINGS_PER_SERIES_MIN, looked_at / 2)
    counted = [(row[f"k{number}"][0]["n"], -number) for number in range(len(keys)) if row[f"k{number}"]]
    for distinct, number in counted:
        if distinct > most and not set(facts.fields[keys[-number]].filled) <= NUMBERS:
            return None
    fitting = [pair for pair in counted if 2 <= pair[0] <= most]
    return keys[-max(fitting)[1]] if fitting else None


def series_pipeline(key: str, time: str, others: list[str], chosen: list[Stage]) -> list[Stage]:
    """Per series its length and span, and which other fields are the same throughout."""
    accumulators: dict[str, Any] = {
        "n": {"$sum": 1},
        "first": {"$min": f"${time}"},
        "last": {"$max": f"${time}"},
    }
    varies: dict[str, Any] = {}
    for number, name in enumerate(others):
        accumulators[f"a{number}"] = {"$min": f"${name}"}
        accumulators[f"z{number}"] = {"$max": f"${name}"}
        varies[f"v{number}"] = {"$sum": {"$cond": [{"$eq": [f"$a{number}", f"$z{number}"]}, 0, 1]}}
    gap = {"$divide": [{"$subtract": ["$last", "$first"]}, {"$max": [{"$subtract": ["$n", 1]}, 1]}]}
    # The gap is binned like sizes are, so that its middle can be told.
    binned = {"$floor": {"$multiply": [8, {"$log": [{"$max": [gap, 1]}, 2]}]}}
    return [
        *chosen,
        {"$group": {"_id": f"${key}", **accumulators}},
        {
            "$group": {
                "_id": {"n": "$n", "gap": binned},
                "series": {"$sum": 1},
                "gap": {"$avg": gap},
                # As numbers: dates may lie beyond those of Python.
                "first": {"$min": {"$toLong": "$first"}},
                "last": {"$max": {"$toLong": "$last"}},
                **varies,
            }
        },
    ]


def read_series(
    key: str, time: str, measures: list[str], others: list[str], rows: list[dict[str, Any]], share: float
) -> Series:
    lengths = Distribution.of(
        (
            round(row["_id"]["n"] / share),
            round(row["_id"]["n"] / share),
            row["series"],
            row["_id"]["n"] * row["series"] / share,
        )
        for row in rows
    )
    varying = {others[number] for row in rows for number in range(len(others)) if row[f"v{number}"]}
    gaps = sorted((row["gap"] or 0.0, row["series"]) for row in rows)
    half, middle = sum(number for _, number in gaps) / 2, 0.0
    for gap, number in gaps:
        half -= number
        if half <= 0:
            middle = gap
            break
    first, last = min(row["first"] for row in rows), max(row["last"] for row in rows)
    return Series(
        key,
        time,
        tuple(name for name in measures if name != key),
        tuple(name for name in others if name not in varying),
        tuple(name for name in others if name in varying),
        lengths,
        (last - first) / 1000,
        middle * share / 1000,
    )


# -- versions ------------------------------------------------------------------------


def version_field(facts: CollectionFacts) -> str | None:
    """A whole number whose name says that it counts versions of the schema."""
    for each in facts.top():
        if each.name.lower() in VERSION_NAMES and each.filled and set(each.filled) <= NUMBERS:
            return each.name
    return None


def versions_pipeline(name: str, chosen: list[Stage]) -> list[Stage]:
    return [*chosen, {"$group": {"_id": f"${name}", "n": {"$sum": 1}}}, {"$limit": VERSIONS_MAX + 1}]


def read_versions(name: str, rows: list[dict[str, Any]], values_shown: bool) -> Versions | None:
    """How many documents of each version, oldest first; None where the field numbers something else."""
    if not rows or len(rows) > VERSIONS_MAX:
        return None
    # Documents without the field are the oldest.
    ordered = sorted(rows, key=lambda row: (row["_id"] is not None, row["_id"] or 0))
    known = [row["_id"] for row in ordered if row["_id"] is not None]
    if len(known) > 1 and name.lower() == "version" and known[-1] > VERSIONS_MAX:
        return None
    newest = int(known[-1]) if known and values_shown else None
    return Versions(name, tuple(row["n"] for row in ordered), newest)


# -- trees ---------------------------------------------------------------------------


def tree(rows: Iterable[Mapping[str, Any]], key: str, path: str) -> TreeFacts:
    """Depths of all nodes; a root's is 0. Nodes on a cycle are counted apart."""
    parents = {row[key]: row.get(path) for row in rows if _is_hashable(row.get(key))}
    depths: dict[Any, int] = {}
    cyclic: set[Any] = set()
    for node in parents:
        chain: list[Any] = []
        seen: set[Any] = set()
        while node not in depths and node not in seen and node not in cyclic:
            seen.add(node)
            chain.append(node)
            above = parents.get(node)
            if above is None or not _is_hashable(above) or above not in parents:
                depths[node] = 0
                chain.pop()
                break
            node = above
        if node in depths:
            for number, each in enumerate(reversed(chain), 1):
                depths[each] = min(depths[node] + number, DEPTH_MAX)
        else:
            cyclic.update(chain)
    known = list(depths.values())
    return TreeFacts(
        path,
        sum(depth == 0 for depth in known),
        len(parents),
        sum(known) / len(known) if known else 0.0,
        max(known, default=0),
        len(cyclic),
    )


def _is_hashable(value: Any) -> bool:
    return isinstance(value, Hashable)
