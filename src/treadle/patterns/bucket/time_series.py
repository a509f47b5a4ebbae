"""Time Series: the server's own kind of collection, behind the same calls as buckets.

The declaration stands on the class: `timeseries=TimeSeries(time="ts",
key="sensor_id")`. The server gathers readings into buckets itself. What it
refuses on such a collection (transactions, changes of single readings, unique
indexes, validators) is refused here with a sentence that names the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from treadle.graph.pattern import Pattern, Place, Rule
from treadle.patterns.bucket.rule import Names, on_a_field

if TYPE_CHECKING:
    from treadle.graph.graph import Graph
    from treadle.graph.pattern import Entry
    from treadle.patterns.bucket.native import NativeLayout


@dataclass(frozen=True, slots=True)
class TimeSeries(Pattern):
    """Readings in a native time-series collection.

    `time` is the field that says when, `key` the one field of the series (the
    server's metaField), `stats` the numbers that `summary` computes.
    `granularity` is the server's hint of how close readings are. `adopt` names
    a collection with one document per reading, which `rebuild` moves here.
    """

    pattern: ClassVar[str] = "time_series"

    time: str
    key: str | None = None
    granularity: Literal["seconds", "minutes", "hours"] = "seconds"
    expire_after: timedelta | None = None
    stats: Names = ()
    adopt: str | None = None

    def bind(self, place: Place, graph: Graph) -> Rule:
        raise on_a_field(place, "timeseries=TimeSeries(…)")

    def lay_out(self, entry: Entry[Any]) -> NativeLayout[Any]:
        """What performs the calls of a model that is declared so; raises `DeclarationError`."""
        from treadle.patterns.bucket.native import NativeLayout

        return NativeLayout(entry, self)
