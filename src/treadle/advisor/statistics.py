"""What the server says about a collection and its indexes, as facts; nothing here talks to a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from treadle.advisor.facts import CollectionFacts, IndexFacts

_DIRECTIONS = {1, -1}
# What drivers call the two collections of a GridFS bucket, and fields that each of them has.
GRIDFS_FIELDS = {"files": ("length", "chunkSize"), "chunks": ("files_id", "n")}


def is_gridfs(name: str, names: Collection[str]) -> bool:
    """Whether a collection is one of the two of a GridFS bucket, by its name."""
    bucket, _, part = name.rpartition(".")
    return (
        bool(bucket) and part in GRIDFS_FIELDS and all(f"{bucket}.{each}" in names for each in GRIDFS_FIELDS)
    )


def counts_pipeline(names: Sequence[str]) -> list[dict[str, Any]]:
    """Run on the first of these collections, gives the number of documents of each."""
    count: dict[str, Any] = {"$collStats": {"count": {}}}
    return [count, *({"$unionWith": {"coll": name, "pipeline": [count]}} for name in names[1:])]


def read_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The numbers by collection, added up over shards."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[str(row["ns"]).partition(".")[2]] += int(row["count"])
    return counts


def add_storage_statistics(facts: CollectionFacts, rows: list[dict[str, Any]]) -> CollectionFacts:
    """The facts with the storage statistics of the collection: one row, or one per shard."""
    notes = list(facts.notes)
    sharded = len(rows) > 1
    if sharded:
        notes.append(f"sharded over {len(rows)} shards")
    capped = any(row.get("capped") for row in rows)
    if capped:
        notes.append("capped: new documents replace the oldest")

    def total(name: str) -> int:
        return sum(int(row.get(name, 0)) for row in rows)

    return replace(
        facts,
        count=total("count"),
        data_bytes=total("size"),
        storage_bytes=total("storageSize"),
        index_bytes=total("totalIndexSize"),
        indexes=tuple(
            IndexFacts(name, (), bytes=sum(int(row.get("indexSizes", {}).get(name, 0)) for row in rows))
            for name in (rows[0].get("indexSizes", {}) if rows else {})
        ),
        capped=capped,
        sharded=sharded,
        notes=tuple(notes),
    )


def index_facts(
    index: Mapping[str, Any], size: int | None, use: tuple[int, datetime] | None, now: datetime
) -> IndexFacts:
    """An index as `listIndexes` shows it, with its size and its use since some time."""
    keys = tuple(dict(index["key"]).items())
    return IndexFacts(
        name=index["name"],
        keys=tuple((path, int(way) if way in _DIRECTIONS else str(way)) for path, way in keys),
        unique=bool(index.get("unique")) or index["name"] == "_id_",
        special=any(way not in _DIRECTIONS for _, way in keys) or "wildcardProjection" in index,
        partial="partialFilterExpression" in index or bool(index.get("sparse")),
        collation_strength=index.get("collation", {}).get("strength"),
        expires="expireAfterSeconds" in index,
        bytes=size,
        uses=None if use is None else use[0],
        counted_seconds=None if use is None else (now - use[1]).total_seconds(),
        hidden=bool(index.get("hidden")),
    )
