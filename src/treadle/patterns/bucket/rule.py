"""Bucket: many readings of one series in one document per window of time.

The declaration stands on the class: `bucket=Bucket(key="sensor_id", time="ts",
span=timedelta(hours=1), limit=60, stats=("temp",))`. It keeps right: each
reading lies in the bucket of its own time, `count` and `stats` are those of
the readings, a window that is full goes on in a bucket with the next number.
How is in the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from treadle.graph.layout import Layout
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Rule
from treadle.patterns.bucket.layout import BucketLayout
from treadle.patterns.bucket.spec import FieldNames, Spec, refuse_others


@dataclass(frozen=True)
class Bucket(Pattern):
    """How the readings of a model are gathered into buckets.

    `key` names the field or fields of a series, `time` the field that says
    when. A window is `span` long, aligned in UTC, or ends with `limit`
    readings; at least one of the two is needed. `stats` are the numbers whose
    min, max and sum each bucket holds. `metadata` are fields that are stored
    once per bucket. `unique` names a field by which a reading that comes
    twice is known; it needs `span`. `adopt` names another collection with one
    document per reading, which `rebuild` moves into buckets.
    """

    pattern: ClassVar[str] = "bucket"
    keyword: ClassVar[str | None] = "bucket"

    key: FieldNames
    time: str
    span: timedelta | None = None
    limit: int | None = None
    stats: FieldNames = ()
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    metadata: FieldNames = ()
    unique: str | None = None
    expire_after: timedelta | None = None
    adopt: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        refuse_others(place)
        return BucketRule(place, self)


class BucketRule(Rule):
    """A model whose readings are kept in buckets."""

    pattern = "bucket"
    across_shards = False

    def __init__(self, place: Place, declared: Bucket) -> None:
        super().__init__(place)
        self._layout = BucketLayout[Any](Spec(declared, self.target))

    def owns(self) -> Sequence[Owned]:
        return []

    def layout(self, default: Layout[Any] | None) -> BucketLayout[Any]:
        return self._layout
