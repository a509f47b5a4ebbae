"""The declarations of readings: `bucket=Bucket(…)` and `timeseries=TimeSeries(…)`.

A Bucket stores many readings of one series in one document per window of
time. A TimeSeries leaves that to the server's own kind of collection, which
refuses transactions, changes of single readings, unique indexes and
validators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from treadle.errors import DeclarationError
from treadle.graph.layout import Layout
from treadle.graph.owned import Owned
from treadle.graph.rule import TRANSACTIONS, Models, Pattern, Place, Rule, Storage
from treadle.patterns.bucket.layout import BucketLayout
from treadle.patterns.bucket.native import TimeSeriesLayout
from treadle.patterns.bucket.setup import window_index
from treadle.patterns.bucket.spec import FieldNames, Spec


@dataclass(frozen=True)
class Bucket(Pattern):
    """How the readings of a model are gathered into buckets.

    `key` names the field or fields of a series, `time` the time of a reading.
    With `span`, a bucket holds the readings of one window, aligned in UTC, and
    at most `limit` of them; without it, `limit` readings in order of arrival.
    `stats` are the numbers whose min, max and sum each bucket holds.
    `metadata` are fields that are stored once per bucket. `unique` names a
    field by which a repeated reading is recognised; it needs `span`. `adopt`
    names another collection with one document per reading, which `rebuild`
    moves into buckets.
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
        _refuse_others(place)
        return BucketRule(place, self)


class BucketRule(Rule):
    """A model whose readings are stored in buckets."""

    pattern = "bucket"
    across_shards = False
    needs = TRANSACTIONS

    def __init__(self, place: Place, declared: Bucket) -> None:
        super().__init__(place)
        self._layout = BucketLayout[Any](Spec(declared, self.target))

    def owns(self) -> Sequence[Owned]:
        return []

    def storage(self) -> Storage:
        # The collection's own is made by the layout; an archive needs it for appends to archived windows.
        return Storage(indexes=[(self.target, window_index(self._layout.spec))])

    def layout(self, default: Layout[Any] | None) -> Layout[Any]:
        return self._layout


@dataclass(frozen=True)
class TimeSeries(Pattern):
    """Readings in a native time-series collection.

    `time` is the time of a reading, `key` the one field of the series (the
    server's metaField), `stats` the numbers that `summary` computes: all of
    them unless some are named. `granularity` is the server's hint of how close
    readings are. `adopt` names a collection with one document per reading,
    which `rebuild` moves here.
    """

    pattern: ClassVar[str] = "time_series"
    keyword: ClassVar[str | None] = "timeseries"

    time: str
    key: str | None = None
    granularity: Literal["seconds", "minutes", "hours"] = "seconds"
    expire_after: timedelta | None = None
    stats: FieldNames = ()
    adopt: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        _refuse_others(place)
        return TimeSeriesRule(place, self)


class TimeSeriesRule(Rule):
    """A model whose readings are stored by the server's own kind of collection."""

    pattern = "time_series"
    across_shards = False
    needs: Mapping[str, str] = MappingProxyType(
        {"time_series": "declare bucket= instead, which works on every replica set"}
    )

    def __init__(self, place: Place, declared: TimeSeries) -> None:
        super().__init__(place)
        self._layout = TimeSeriesLayout[Any](self.target, declared)

    def owns(self) -> Sequence[Owned]:
        return []

    def layout(self, default: Layout[Any] | None) -> Layout[Any]:
        return self._layout


def _refuse_others(place: Place) -> None:
    """Refuse a tree, kinds, versions or groups beside readings."""
    settings, name = place.entry.model.__treadle__, place.entry.model.__name__
    layouts = {"bucket", "timeseries"}
    others = [
        keyword
        for keyword, patterns in settings.patterns.items()
        if keyword not in layouts and not all(getattr(each, "beside", False) for each in patterns)
    ]
    others += [keyword for keyword in ("discriminator", "version") if getattr(settings, keyword) is not None]
    if others:
        reason = f"{others[0]}= beside bucket= or timeseries=; readings have none"
    elif layouts <= set(settings.patterns):
        reason = "both bucket= and timeseries=; keep one"
    else:
        return
    raise DeclarationError(f"{name} has {reason}", code="bucket-declaration")
