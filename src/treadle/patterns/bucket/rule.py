"""Bucket: many readings of one series in one document per window of time.

The declaration stands on the class: `bucket=Bucket(key="sensor_id", time="ts",
span=timedelta(hours=1), limit=60, stats=("temp",))`. It keeps right: each
reading lies in the bucket of its own time, `count` and `stats` are those of
the readings, a window that is full goes on in a bucket with the next number.
How is in `treadle/buckets/`; this file holds what is declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from treadle.errors import DeclarationError
from treadle.graph.pattern import Pattern, Place, Rule

if TYPE_CHECKING:
    from treadle.graph.graph import Graph
    from treadle.graph.pattern import Entry
    from treadle.patterns.bucket.layout import BucketLayout

Names = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bucket(Pattern):
    """How the readings of a model are gathered into buckets.

    `key` names the field or fields of a series, `time` the field that says
    when. A window is `span` long, aligned in UTC, or ends with `limit`
    readings; at least one of the two is needed. `stats` are the numbers whose
    min, max and sum each bucket holds. `metadata` are fields that are stored
    once per bucket. `unique` names a field by which a reading that comes
    twice is known. `adopt` names a collection with one document per reading,
    which `rebuild` moves into buckets.
    """

    pattern: ClassVar[str] = "bucket"

    key: Names
    time: str
    span: timedelta | None = None
    limit: int | None = None
    stats: Names = ()
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    metadata: Names = ()
    unique: str | None = None
    expire_after: timedelta | None = None
    layout: Literal["rows", "columns", "packed"] = "rows"
    compression: Literal["zstd"] | None = None
    ids: Literal["derived", "stored"] | None = None
    adopt: str | None = None

    def bind(self, place: Place, graph: Graph) -> Rule:
        raise on_a_field(place, "bucket=Bucket(…)")

    def lay_out(self, entry: Entry[Any]) -> BucketLayout[Any]:
        """What performs the calls of a model that is declared so; raises `DeclarationError`."""
        from treadle.patterns.bucket.layout import BucketLayout
        from treadle.patterns.bucket.spec import bind

        return BucketLayout(entry, bind(self, entry.model, entry.codec))


def on_a_field(place: Place, written: str) -> DeclarationError:
    return DeclarationError(
        f"{place.label} is annotated with a pattern of the whole model; write the class keyword {written}",
        code="pattern-keyword",
    )


def as_tuple(names: Names) -> tuple[str, ...]:
    """One name or several, as several."""
    return (names,) if isinstance(names, str) else tuple(names)
