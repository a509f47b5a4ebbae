"""Questions that only some collections call for, and how to read the answers; nothing here talks to a server.

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
from treadle.advisor.naming import last_word, words
from treadle.advisor.structure import Stage, has_plain_path, is_plain_name

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
SERIES_KEY_TYPES = frozenset({"string", "int", "long", "objectId"})
SERIES_KEY_WORDS = frozenset(
    {"id", "sensor", "device", "meter", "host", "station", "symbol", "machine", "source", "series"}
)
# Objects of these names say what is measured, and where.
METADATA = SERIES_KEY_WORDS | {"meta", "metadata", "tags", "labels"}
SERIES_DOCUMENTS_MIN = 2_000
SERIES_BYTES_MAX = 640
SERIES_FIELDS_MAX = 24
# Parts of the time that stand beside it; they are neither keys nor measures.
CALENDAR = frozenset({"year", "month", "day", "hour", "minute", "second", "week", "weekday", "quarter"})
# When a document was written is not when something was measured.
WRITTEN = frozenset(
    {"created", "inserted", "received", "updated", "modified", "imported", "ingested", "loaded"}
)
TIME_WORDS = frozenset({"time", "timestamp", "ts", "date", "datetime", "hour", "at", "when", "moment"})
ISO_MOMENT = r"^\d{4}-\d\d-\d\d[T ]\d\d(:\d\d){0,2}"
# Readings come at whole steps; what happens does not.
GRIDS_SECONDS = (86_400, 3_600, 900, 600, 300, 60)
READINGS_PER_SERIES_MIN = 50

VERSION_NAMES = frozenset(
    {"schema_version", "schemaversion", "_v", "doc_version", "docversion", "schema", "version"}
)
VERSIONS_MAX = 50
DEPTH_MAX = 1_000


# -- kinds ---------------------------------------------------------------------------


def optional_fields(facts: CollectionFacts, inside: str = "") -> list[FieldFacts]:
    """Fields that many documents have and many lack; those of the document, or of an object inside it."""
    low, high = OPTIONAL_SHARES
    fields = facts.top() if not inside else _fields_of(facts, (inside,))
    return [each for each in fields if low <= each.share <= high and has_plain_path(each)][
        :OPTIONAL_FIELDS_MAX
    ]


def _fields_of(facts: CollectionFacts, steps: tuple[str, ...]) -> list[FieldFacts]:
    return [each for each in facts.fields.values() if each.steps[:-1] == steps and each.name != "[]"]


def kind_questions(facts: CollectionFacts) -> list[tuple[str, str]]:
    """Which field may tell kinds apart, and by the fields of which object; empty for the document's own.

    A payload that differs from kind to kind is asked for only where a field
    is called a type: there are too many objects to try all.
    """
    names = _kind_names(facts)
    questions = [(name, "") for name in names] if len(optional_fields(facts)) >= 2 else []
    payloads = [
        each.name
        for each in facts.top()
        if set(each.types) == {"object"}
        and each.share > 0.99
        and not each.is_map
        and is_plain_name(each.name)
    ]
    return (
        questions
        + [
            (name, payload)
            for payload in payloads
            if len(optional_fields(facts, payload)) >= 2
            for name in names
            if last_word(name) in KIND_NAMES
        ][:KIND_CANDIDATES_MAX]
    )


def _kind_names(facts: CollectionFacts) -> list[str]:
    """Text or small numbers that every document has, the likeliest names first."""
    names = [
        each.name
        for each in facts.top()
        if each.share > 0.99 and set(each.types) <= {"string", "int"} and is_plain_name(each.name)
    ]
    names.sort(key=lambda name: (last_word(name) not in KIND_NAMES, name))
    return names[:KIND_CANDIDATES_MAX]


def kinds_pipeline(name: str, inside: str, facts: CollectionFacts, sample: list[Stage]) -> list[Stage]:
    """One row per value of the field: how many documents, and how many of them have each optional field."""
    present = {
        f"f{number}": {"$sum": {"$cond": [{"$eq": [{"$type": f"${each.path}"}, "missing"]}, 0, 1]}}
        for number, each in enumerate(optional_fields(facts, inside))
    }
    return [
        *sample,
        {"$group": {"_id": f"${name}", "n": {"$sum": 1}, **present}},
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": KINDS_MAX + 1},
    ]


def read_kinds(
    name: str, inside: str, facts: CollectionFacts, rows: list[dict[str, Any]], values_shown: bool
) -> Kinds | None:
    """The kinds; None where no fields depend on the value."""
    if not 2 <= len(rows) <= KINDS_MAX:
        return None
    optional = optional_fields(facts, inside)
    kinds = [
        Kind(
            str(row["_id"]) if values_shown else f"kind-{place}",
            row["n"],
            {each.path: row[f"f{number}"] / row["n"] for number, each in enumerate(optional)},
        )
        for place, row in enumerate(rows, 1)
    ]
    dependent = [
        each
        for each in optional
        if max(kind.shares[each.path] for kind in kinds) >= OWN_SHARE_MIN
        and min(kind.shares[each.path] for kind in kinds) <= FOREIGN_SHARE_MAX
    ]
    owners = {kind.label for kind in kinds for each in dependent if kind.shares[each.path] >= OWN_SHARE_MIN}
    if len(dependent) < 2 or len(owners) < 2 or len(dependent) < len(optional) / 2:
        return None
    return Kinds(name, tuple(kinds), sum(row["n"] for row in rows), inside)


# -- series --------------------------------------------------------------------------


def series_fields(facts: CollectionFacts) -> tuple[str, list[str], list[str]] | None:
    """The time, the possible keys and the measures, if the documents look like readings."""
    if facts.count < SERIES_DOCUMENTS_MIN or facts.mean_bytes > SERIES_BYTES_MAX or facts.capped:
        return None
    fields = reading_fields(facts)
    if not 0 < len(fields) <= SERIES_FIELDS_MAX or not all(has_plain_path(each) for each in fields):
        return None
    fields = [each for each in fields if not is_aside(each)]
    common = [each for each in fields if each.share > 0.99 and each.value_types]
    times = [each.path for each in common if set(each.value_types) == {"date"}]
    # Text that a name calls a time may be one; `text_time_pipeline` asks for its form.
    times = times or [each.path for each in common if is_text_time(each)]
    measures = [each.path for each in fields if each.value_types and set(each.value_types) <= NUMBERS]
    keys = [
        each.path for each in common if set(each.value_types) <= SERIES_KEY_TYPES and each.path not in times
    ]
    # A number may be the key or a measure; text and ids are likelier keys.
    keys.sort(key=lambda name: (name in measures, not SERIES_KEY_WORDS & set(words(name))))
    keys = keys[:SERIES_KEYS_MAX]
    if len(times) != 1 or not keys or not set(measures) - {keys[0]}:
        return None
    return times[0], keys, measures


def reading_fields(facts: CollectionFacts) -> list[FieldFacts]:
    """The fields of what may be a reading, those in objects one by one; none where it is more than that.

    Objects hold what describes the series (`metadata.sensorId`), or a value
    with its unit; any other is more than a reading has.
    """
    fields: list[FieldFacts] = []
    for each in facts.top():
        if not {"array", "object"} & set(each.types):
            fields.append(each)
            continue
        inside = _fields_of(facts, each.steps)
        is_value = any(part.name.lower() == "value" and set(part.value_types) <= NUMBERS for part in inside)
        is_described = is_value or METADATA & set(words(each.name))
        is_flat = not any({"array", "object"} & set(part.types) for part in inside)
        if set(each.types) != {"object"} or each.is_map or not (inside and is_described and is_flat):
            return []
        fields += inside
    return fields


def is_aside(each: FieldFacts) -> bool:
    """Whether a field belongs to a reading without being its key, its time or a measure of it."""
    is_part = last_word(each.name) in CALENDAR and each.value_types and set(each.value_types) <= NUMBERS
    return bool(is_part) or (set(each.value_types) == {"date"} and bool(WRITTEN & set(words(each.name))))


def is_text_time(each: FieldFacts) -> bool:
    return set(each.value_types) == {"string"} and bool(TIME_WORDS & set(words(each.name)))


def text_time_pipeline(name: str, sample: list[Stage]) -> list[Stage]:
    """How many texts there are, and how many of them are written as ISO 8601 writes a moment."""
    is_time = {"$regexMatch": {"input": f"${name}", "regex": ISO_MOMENT}}
    is_text = {"$eq": [{"$type": f"${name}"}, "string"]}
    matched = {"$sum": {"$cond": [{"$cond": [is_text, is_time, False]}, 1, 0]}}
    return [*sample, {"$group": {"_id": None, "n": {"$sum": {"$cond": [is_text, 1, 0]}}, "times": matched}}]


def distinct_pipeline(keys: Iterable[str], sample: list[Stage]) -> list[Stage]:
    """How many distinct values each possible key has, in a sample."""
    parts = {
        f"k{number}": [{"$group": {"_id": f"${name}"}}, {"$count": "n"}] for number, name in enumerate(keys)
    }
    return [*sample, {"$facet": {"n": [{"$count": "n"}], **parts}}]


def is_unlike_series(keys: Iterable[str], sample: Mapping[str, list[Any]]) -> bool:
    """Whether sampled values already show an id that hardly recurs, so that no query is needed."""
    return any(len(set(map(str, sample[name]))) > len(sample[name]) / 2 for name in keys if sample.get(name))


def choose_key(keys: list[str], row: Mapping[str, Any], facts: CollectionFacts) -> str | None:
    """The key with the most distinct values that still has many documents per value; no number if possible.

    A reading belongs to one series, and its other fields are numbers. Where
    an id or a text differs from document to document, these are no readings.
    """
    looked_at = min(facts.count, row["n"][0]["n"] if row["n"] else 0)
    most = min(facts.count / READINGS_PER_SERIES_MIN, looked_at / 2)
    counts = {name: row[f"k{number}"][0]["n"] for number, name in enumerate(keys) if row[f"k{number}"]}
    if any(n > most and _is_identity(facts.fields[name]) for name, n in counts.items()):
        return None
    fit = [name for name, n in counts.items() if 2 <= n <= most]
    texts = [name for name in fit if not set(facts.fields[name].value_types) <= NUMBERS]
    return max(texts or fit, key=counts.__getitem__, default=None)


def _is_identity(each: FieldFacts) -> bool:
    return not set(each.value_types) <= NUMBERS or last_word(each.name) == "id"


def series_pipeline(
    key: str, time: str, others: list[str], sample: list[Stage], is_text: bool = False
) -> list[Stage]:
    """Per series its length and the time between readings, and which other fields are constant."""
    moment: Any = f"${time}"
    if is_text:
        moment = {"$dateFromString": {"dateString": moment, "onError": None, "onNull": None}}
    accumulators: dict[str, Any] = {
        "n": {"$sum": 1},
        "first": {"$min": moment},
        "last": {"$max": moment},
        # How many lie on each grid; all of a coarse one lie on the finer ones too.
        **{
            f"g{seconds}": {
                "$sum": {"$cond": [{"$eq": [{"$mod": [{"$toLong": moment}, seconds * 1000]}, 0]}, 1, 0]}
            }
            for seconds in GRIDS_SECONDS
        },
    }
    varies: dict[str, Any] = {}
    for number, name in enumerate(others):
        accumulators[f"a{number}"] = {"$min": f"${name}"}
        accumulators[f"z{number}"] = {"$max": f"${name}"}
        varies[f"v{number}"] = {"$sum": {"$cond": [{"$eq": [f"$a{number}", f"$z{number}"]}, 0, 1]}}
    gap = {"$divide": [{"$subtract": ["$last", "$first"]}, {"$max": [{"$subtract": ["$n", 1]}, 1]}]}
    # Gaps are binned like sizes, so that few rows are enough for their median.
    binned = {"$floor": {"$multiply": [8, {"$log": [{"$max": [gap, 1]}, 2]}]}}
    return [
        *sample,
        {"$group": {"_id": f"${key}", **accumulators}},
        {
            "$group": {
                "_id": {"n": "$n", "gap": binned},
                "series": {"$sum": 1},
                "gap": {"$avg": gap},
                **{f"g{seconds}": {"$sum": f"$g{seconds}"} for seconds in GRIDS_SECONDS},
                # The places on the grid from first to last; of one reading each at most, so many fit.
                "span": {"$sum": {"$subtract": ["$last", "$first"]}},
                **varies,
            }
        },
    ]


def read_series(
    key: str, time: str, measures: list[str], others: list[str], rows: list[dict[str, Any]], share: float
) -> Series:
    varying = {others[number] for row in rows for number in range(len(others)) if row[f"v{number}"]}
    gaps = Distribution.of_counts((row["gap"] or 0.0, row["series"]) for row in rows)
    readings = sum(row["_id"]["n"] * row["series"] for row in rows)
    span_seconds = sum(float(row["span"] or 0) for row in rows) / 1000
    grid = next((each for each in GRIDS_SECONDS if sum(row[f"g{each}"] for row in rows) == readings), 0)
    # More readings than places: these are events that were rounded.
    if grid and readings > (span_seconds / grid + sum(row["series"] for row in rows)) * 1.01:
        grid = 0
    return Series(
        key,
        time,
        tuple(name for name in measures if name != key),
        tuple(name for name in others if name not in varying),
        tuple(name for name in others if name in varying),
        Distribution.of_counts((round(row["_id"]["n"] / share), row["series"]) for row in rows),
        gaps.median * share / 1000,
        grid,
    )


# -- versions ------------------------------------------------------------------------


def version_field(facts: CollectionFacts) -> str | None:
    """A number whose name says that it counts versions of the schema."""
    for each in facts.top():
        if each.name.lower() in VERSION_NAMES and each.value_types and set(each.value_types) <= NUMBERS:
            return each.name
    return None


def versions_pipeline(name: str, sample: list[Stage]) -> list[Stage]:
    return [*sample, {"$group": {"_id": f"${name}", "n": {"$sum": 1}}}, {"$limit": VERSIONS_MAX + 1}]


def read_versions(name: str, rows: list[dict[str, Any]], values_shown: bool) -> Versions | None:
    """How many documents have which version, oldest first; None where the field counts something else."""
    if not rows or len(rows) > VERSIONS_MAX:
        return None
    # Documents without the field are the oldest.
    rows = sorted(rows, key=lambda row: (row["_id"] is not None, row["_id"] or 0))
    numbers = [row["_id"] for row in rows if row["_id"] is not None]
    if len(numbers) > 1 and name.lower() == "version" and numbers[-1] > VERSIONS_MAX:
        return None
    newest = int(numbers[-1]) if numbers and values_shown else None
    return Versions(name, tuple(row["n"] for row in rows), newest)


# -- trees ---------------------------------------------------------------------------


def tree(rows: Iterable[Mapping[str, Any]], key: str, path: str) -> TreeFacts:
    """The depths of all nodes; a root's is 0. Nodes on or below a cycle are counted apart."""
    parents = {row[key]: row.get(path) for row in rows if isinstance(row.get(key), Hashable)}
    depths: dict[Any, int] = {}
    cyclic: set[Any] = set()
    for node in parents:
        chain: dict[Any, None] = {}
        while node not in depths and node not in chain and node not in cyclic:
            parent = parents[node]
            if parent is None or not isinstance(parent, Hashable) or parent not in parents:
                depths[node] = 0
                break
            chain[node] = None
            node = parent
        if node in depths:
            for number, each in enumerate(reversed(chain), 1):
                depths[each] = min(depths[node] + number, DEPTH_MAX)
        else:
            cyclic.update(chain)
    return TreeFacts(
        path,
        sum(depth == 0 for depth in depths.values()),
        len(parents),
        sum(depths.values()) / len(depths) if depths else 0.0,
        max(depths.values(), default=0),
        len(cyclic),
    )
