"""Time Series: the server's own kind of collection, behind the same calls as buckets.

The declaration stands on the class: `timeseries=TimeSeries(time="ts",
key="sensor_id")`. The server gathers readings into buckets itself. What it
refuses on such a collection (transactions, changes of single readings, unique
indexes, validators) is refused here with a sentence that names the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from treadle.graph.layout import Layout
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Rule
from treadle.patterns.bucket.native import NativeLayout
from treadle.patterns.bucket.spec import FieldNames, refuse_others


@dataclass(frozen=True)
class TimeSeries(Pattern):
    """Readings in a native time-series collection.

    `time` is the field that says when, `key` the one field of the series (the
    server's metaField), `stats` the numbers that `summary` computes: all of
    them unless some are named.
    `granularity` is the server's hint of how close readings are. `adopt` names
    a collection with one document per reading, which `rebuild` moves here.
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
        refuse_others(place)
        return TimeSeriesRule(place, self)


class TimeSeriesRule(Rule):
    """A model whose readings are kept by the server's own kind of collection."""

    pattern = "time_series"
    across_shards = False
    needs: Mapping[str, str] = MappingProxyType(
        {"time_series": "declare bucket= instead, which works everywhere"}
    )

    def __init__(self, place: Place, declared: TimeSeries) -> None:
        super().__init__(place)
        self._layout: NativeLayout[Any] = NativeLayout(self.target, declared)

    def owns(self) -> Sequence[Owned]:
        return []

    def layout(self, default: Layout[Any] | None) -> NativeLayout[Any]:
        return self._layout
