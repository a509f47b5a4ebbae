"""What the server tells about a collection and its indexes, as facts; nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from treadle.advisor.facts import CollectionFacts, IndexFacts


def counts(names: Sequence[str]) -> list[dict[str, Any]]:
    """A pipeline on the first of these collections that gives the number of documents of each."""
    count: dict[str, Any] = {"$collStats": {"count": {}}}
    return [count, *({"$unionWith": {"coll": name, "pipeline": [count]}} for name in names[1:])]


def read_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The numbers by collection; of several shards together."""
    found: dict[str, int] = {}
    for row in rows:
        name = str(row["ns"]).partition(".")[2]
        found[name] = found.get(name, 0) + int(row["count"])
    return found


def counted(facts: CollectionFacts, rows: list[dict[str, Any]]) -> CollectionFacts:
    """The storage statistics of a collection: one row, or one per shard."""
    notes = list(facts.notes)
    sharded = len(rows) > 1
    if sharded:
        notes.append(f"sharded; it lies on {len(rows)} shards")
    capped = any(row.get("capped") for row in rows)
    if capped:
        notes.append("capped: the oldest documents make room for the newest")
    return replace(
        facts,
        count=sum(int(row.get("count", 0)) for row in rows),
        data_bytes=sum(int(row.get("size", 0)) for row in rows),
        storage_bytes=sum(int(row.get("storageSize", 0)) for row in rows),
        index_bytes=sum(int(row.get("totalIndexSize", 0)) for row in rows),
        indexes=tuple(
            IndexFacts(name, (), bytes=sum(int(row.get("indexSizes", {}).get(name, 0)) for row in rows))
            for name in (rows[0].get("indexSizes", {}) if rows else {})
        ),
        capped=capped,
        sharded=sharded,
        notes=tuple(notes),
    )


def index(
    told: Mapping[str, Any], size: int | None, used: tuple[int, datetime] | None, now: datetime
) -> IndexFacts:
    keys = tuple(dict(told["key"]).items())
    directions = {1, -1, -1.0}
    return IndexFacts(
        name=told["name"],
        keys=tuple((path, int(way) if way in directions else str(way)) for path, way in keys),
        unique=bool(told.get("unique")) or told["name"] == "_id_",
        special=any(way not in directions for _, way in keys) or "wildcardProjection" in told,
        partial="partialFilterExpression" in told or bool(told.get("sparse")),
        collation_strength=told.get("collation", {}).get("strength"),
        expires="expireAfterSeconds" in told,
        bytes=size,
        uses=None if used is None else used[0],
        counted_seconds=None if used is None else (now - used[1]).total_seconds(),
    )
