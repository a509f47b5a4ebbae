"""What it means for each pattern that a server lacks a capability; `treadle doctor` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.plan.capabilities import NAMES

STREAM = 'maintain="stream"'
SCHEDULE = 'maintain="schedule"'
EVERY = "every pattern"
REFUSED = "refused"
# Per capability, by pattern or way to maintain, what happens without it.
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "transactions": {
        "derived data, counters, trees, Outlier, History, Archive, Links, migrations": REFUSED,
    },
    "transaction_seconds": {EVERY: "works in chunks that fit into 30 s"},
    "retryable_writes": {EVERY: REFUSED},
    "streams": {
        STREAM: REFUSED,
        SCHEDULE: "each run computes every window",
    },
    "pre_images": {
        STREAM: "aggregates and histories are refused",
        SCHEDULE: "computes every window after documents were deleted or moved",
    },
    "split_events": {STREAM: "an event of more than 16 MB is read without its documents"},
    "pipeline_updates": {EVERY: REFUSED},
    "merges": {SCHEDULE: REFUSED},
    "unions": {"Rollup": REFUSED, SCHEDULE: REFUSED},
    "graph_lookups": {"trees": "refused, but for MaterializedPath alone"},
    "snapshots": {
        "Outlier": "a long iteration may have to begin again",
        "Archive": "find(archived=True) may see a document that moves at the same time twice, or not at all",
    },
    "time_series": {"Time Series": "refused; Bucket works"},
    "validators": {
        "Schema Versioning, Polymorphic": "no validator; Treadle's own writes are checked by Pydantic"
    },
}


def capability_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Per capability its name, what was found, and what that means."""
    for name, label in NAMES.items():
        value = found[name]
        meaning = {} if value else MEANINGS.get(name, {})
        text = ("yes" if value else "no") if isinstance(value, bool) or value is None else f"{value}"
        yield label, text, "; ".join(f"{what}: {then}" for what, then in meaning.items())
