"""What a scan measured: plain values, without any document's content.

`profile.py` makes them, the rules read them. They hold numbers, and the names
of collections, fields and indexes; values of documents only where the caller
asked for them (`Scan.values_shown`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

NUMBERS = frozenset({"int", "long", "double", "decimal"})
WHOLE = frozenset({"int", "long"})


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a scan may ask of the server and of this process."""

    full_pass_documents: int = 20_000_000
    structure_documents: int = 100_000
    sample_documents: int = 4_000
    operation_seconds: float = 60.0
    collections: int = 200
    shapes: int = 1_000
    paths: int = 2_000
    references_checked: int = 5_000
    workload_operations: int = 200_000
    index_age_seconds_min: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Bin:
    """How many of something lie from `low` to `high`, both included."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts by size, in ascending order; of a sample, `sampled_of` is the size of the population."""

    bins: tuple[Bin, ...]
    mean: float
    sampled_of: int | None = None

    @classmethod
    def of(
        cls, rows: Iterable[tuple[float, float, int, float]], sampled_of: int | None = None
    ) -> Distribution:
        """From (low, high, count, total) rows in any order."""
        rows = sorted(rows)
        count = sum(row[2] for row in rows)
        mean = sum(row[3] for row in rows) / count if count else 0.0
        return cls(tuple(Bin(low, high, number) for low, high, number, _ in rows), mean, sampled_of)

    @classmethod
    def of_counts(cls, counts: Iterable[tuple[float, int]], sampled_of: int | None = None) -> Distribution:
        """From pairs of a value and how often it occurs."""
        return cls.of(((value, value, n, value * n) for value, n in counts), sampled_of)

    @property
    def count(self) -> int:
        return sum(each.count for each in self.bins)

    @property
    def minimum(self) -> float:
        return self.bins[0].low if self.bins else 0

    @property
    def maximum(self) -> float:
        return self.bins[-1].high if self.bins else 0

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """The value that at least this share does not exceed."""
        rank, passed = share * self.count, 0
        for each in self.bins:
            passed += each.count
            if passed >= rank:
                return each.high
        return self.maximum

    def above(self, bound: float) -> int:
        """How many lie wholly above the bound."""
        return sum(each.count for each in self.bins if each.low > bound)


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """One field of a collection. `path` joins names with dots and marks array elements with []."""

    path: str
    # How many of the documents looked at have it, by BSON type.
    types: Mapping[str, int]
    looked_at: int
    steps: tuple[str, ...] = ()
    lengths: Distribution | None = None
    bytes_max: int | None = None
    bytes_mean: float | None = None
    # The object has so many different keys that they are data, not names.
    is_map: bool = False
    # Its binary values are UUIDs.
    is_uuid: bool = False

    @property
    def present(self) -> int:
        return sum(self.types.values())

    @property
    def share(self) -> float:
        return self.present / self.looked_at if self.looked_at else 0.0

    @property
    def value_types(self) -> dict[str, int]:
        """The types without null."""
        return {name: n for name, n in self.types.items() if name not in ("null", "undefined")}

    @property
    def type(self) -> str:
        """The most frequent type other than null."""
        types = self.value_types
        return max(types, key=lambda name: (types[name], name)) if types else "null"

    @property
    def kind(self) -> str:
        """The type to declare it as: `uuid` where the binary values are such."""
        return "uuid" if self.is_uuid and self.type == "binData" else self.type

    @property
    def name(self) -> str:
        return self.steps[-1] if self.steps else self.path

    @property
    def own_name(self) -> str:
        """The name of the field; for the elements of an array, that of the array."""
        return next((step for step in reversed(self.steps) if step != "[]"), self.path)

    @property
    def in_array(self) -> bool:
        return "[]" in self.steps

    @property
    def depth(self) -> int:
        return sum(step != "[]" for step in self.steps)


@dataclass(frozen=True, slots=True)
class Shape:
    """Documents with the same top-level fields of the same types."""

    fields: tuple[tuple[str, str], ...]
    count: int
    first: datetime | None = None
    last: datetime | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.fields)


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """An index and how much it was used since the server began to count."""

    name: str
    keys: tuple[tuple[str, Any], ...]
    unique: bool = False
    special: bool = False
    partial: bool = False
    collation_strength: int | None = None
    expires: bool = False
    bytes: int | None = None
    uses: int | None = None
    counted_seconds: float | None = None
    # The server maintains it and uses it for no query.
    hidden: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.keys)


@dataclass(frozen=True, slots=True)
class Growth:
    """How fast a collection grows, by the creation times in its ObjectIds."""

    first: datetime
    last: datetime
    per_day: float


@dataclass(frozen=True, slots=True)
class Kind:
    """Documents of one value of a discriminating field; `label` is the value only if values are shown."""

    label: str
    count: int
    # The share of these documents that have a field.
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Kinds:
    """A field with few values, on which the presence of other fields depends."""

    field: str
    kinds: tuple[Kind, ...]
    looked_at: int
    # The object whose fields depend on it; empty where those of the document do.
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Documents that are readings: a key, a time, and numbers."""

    key: str
    time: str
    measures: tuple[str, ...]
    metadata: tuple[str, ...]
    varying: tuple[str, ...]
    lengths: Distribution
    # The median over all series of the mean time between two readings.
    gap_seconds: float
    # All times are multiples of this, one reading each, perhaps with gaps; 0 where they are not.
    grid_seconds: int = 0


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """How deep a collection's references to itself lead."""

    parent: str
    roots: int
    looked_at: int
    depth_mean: float
    depth_max: int
    cyclic: int = 0


@dataclass(frozen=True, slots=True)
class Versions:
    """The field that numbers versions, and the documents per version, oldest first."""

    field: str
    counts: tuple[int, ...]
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class CollectionFacts:
    """One collection. Where `skipped` is set, it says why the rest is empty."""

    name: str
    kind: str = "collection"
    count: int = 0
    looked_at: int = 0
    data_bytes: int = 0
    storage_bytes: int = 0
    index_bytes: int = 0
    capped: bool = False
    sharded: bool = False
    # None where the login may not see it.
    validated: bool | None = False
    # A full pass took too long.
    slow: bool = False
    sizes: Distribution | None = None
    fields: Mapping[str, FieldFacts] = field(default_factory=dict)
    nested_looked_at: int = 0
    shapes: tuple[Shape, ...] = ()
    shapes_complete: bool = True
    indexes: tuple[IndexFacts, ...] = ()
    growth: Growth | None = None
    kinds: Kinds | None = None
    series: Series | None = None
    tree: TreeFacts | None = None
    versions: Versions | None = None
    notes: tuple[str, ...] = ()
    skipped: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is an ordinary collection that was read, no view and no time series."""
        return self.kind == "collection" and self.skipped is None

    @property
    def depth(self) -> int:
        """How many levels deep its fields nest."""
        return max((each.depth for each in self.fields.values()), default=0)

    @property
    def mean_bytes(self) -> float:
        return self.data_bytes / self.count if self.count else 0.0

    def top(self) -> list[FieldFacts]:
        """The top-level fields without `_id`."""
        return [each for each in self.fields.values() if len(each.steps) == 1 and each.path != "_id"]


@dataclass(frozen=True, slots=True)
class Relation:
    """The field `path` of `child` holds values of `key` in `parent`."""

    child: str
    path: str
    parent: str
    key: str
    many: bool
    references: int
    # Children per parent that has any.
    children: Distribution
    parents: int
    childless: int
    orphans: int
    checked: int
    # How the target was found: "name" or "type".
    found_by: str = "name"
    read_together: int = 0
    child_reads: int = 0
    # Reads that begin at the parent: joins of its children, and those that are fetched right after it.
    joined_by_parent: int = 0
    fetched_by_parent: int = 0
    # The children of each parent are numbered from the first to the last, as the lines of a list are.
    numbered: bool = False

    @property
    def read_by_parent(self) -> int:
        return self.joined_by_parent + self.fetched_by_parent

    @property
    def orphan_share(self) -> float:
        return self.orphans / self.checked if self.checked else 0.0


@dataclass(frozen=True, slots=True)
class Copy:
    """The field `path` of `child` repeats `source` of the document that `by` refers to."""

    child: str
    path: str
    parent: str
    source: str
    by: str
    key: str
    # Copies beside a reference to a document that exists, those that differ, and those that are missing.
    compared: int
    stale: int
    absent: int
    sampled_of: int | None = None
    # Its name says what it is a copy of; otherwise only its values do.
    named: bool = True


@dataclass(frozen=True, slots=True)
class Tally:
    """The field `path` of `parent` is the number of children, or the sum or the average of their `field`."""

    parent: str
    path: str
    child: str
    by: str
    key: str
    field: str | None
    compared: int
    drifted: int
    sampled_of: int | None = None
    is_average: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """A collection whose documents are former states of those of another one."""

    collection: str
    of: str
    # The fields that both have, and how the states name their document.
    shared: tuple[str, ...]
    by: str
    states: int


@dataclass(frozen=True, slots=True)
class Query:
    """Operations of one shape in the workload, without any value."""

    collection: str
    kind: str
    filter_paths: tuple[str, ...] = ()
    sort: tuple[tuple[str, int], ...] = ()
    limit: int = 0
    lookups: tuple[tuple[str, str, str], ...] = ()
    grouped: bool = False
    sums: tuple[str, ...] = ()
    increments: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    # Searched by a regular expression that ignores case.
    case_insensitive: tuple[str, ...] = ()
    collection_scan: bool = False
    # The fields that a find asks for, none where it asks for all; (collection, field) of what is joined.
    shown: tuple[str, ...] = ()
    joined: tuple[tuple[str, str], ...] = ()
    # Reads of children that a pipeline on their parent contains.
    children: tuple[Query, ...] = ()
    count: int = 0
    milliseconds: float = 0.0
    examined: int = 0
    returned: int = 0


READS = frozenset({"find", "aggregate", "count", "distinct"})
WRITES = frozenset({"insert", "update", "delete"})


@dataclass(frozen=True, slots=True)
class Workload:
    """What the profiler recorded."""

    source: str
    queries: tuple[Query, ...]
    seconds: float
    complete: bool = True
    # (child, parent, key) -> how often the parent was read by that key right after the child.
    follow_ups: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        return sum(each.count for each in self.queries)

    def count(self, collection: str, kinds: Iterable[str]) -> int:
        """How many operations of these kinds there were on a collection."""
        kinds = set(kinds)
        return sum(
            each.count for each in self.queries if each.collection == collection and each.kind in kinds
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything that was measured of one database."""

    database: str
    version: tuple[int, ...]
    collections: Mapping[str, CollectionFacts]
    relations: tuple[Relation, ...] = ()
    workload: Workload | None = None
    limits: Limits = Limits()
    notes: tuple[str, ...] = ()
    complete: bool = True
    # It is incomplete because the connection was lost.
    lost: bool = False
    values_shown: bool = False
    # All collections, including those that were not read.
    names: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    tallies: tuple[Tally, ...] = ()
    pasts: tuple[Past, ...] = ()

    def plain(self) -> list[CollectionFacts]:
        """The ordinary collections that hold documents."""
        return [each for each in self.collections.values() if each.plain and each.count]

    @property
    def queries(self) -> tuple[Query, ...]:
        """The operations of the workload; none where there is none."""
        return () if self.workload is None else self.workload.queries

    def ends(self, relation: Relation) -> tuple[CollectionFacts, CollectionFacts]:
        """The child and the parent of a relation."""
        return self.collections[relation.child], self.collections[relation.parent]

    def pushes(self, collection: str, path: str) -> int:
        """How often the workload pushes to an array without a bound."""
        return sum(
            each.count for each in self.queries if each.collection == collection and path in each.pushes
        )
