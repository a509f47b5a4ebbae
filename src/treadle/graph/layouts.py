"""Which layout a model has, and what does not go together with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import DeclarationError
from treadle.patterns.bucket.rule import Bucket
from treadle.patterns.bucket.time_series import TimeSeries

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph
    from treadle.graph.layout import Layout


def layout_of(entry: Entry[Any]) -> Layout[Any] | None:
    """What performs the calls of a model; None where its documents are stored one by one."""
    bucket, series = entry.settings.bucket, entry.settings.timeseries
    if bucket is not None and series is not None:
        raise DeclarationError(
            f"{entry.model.__name__} has both bucket= and timeseries=; keep one", code="bucket-declaration"
        )
    for keyword, given, kind in (("bucket", bucket, Bucket), ("timeseries", series, TimeSeries)):
        if given is not None and not isinstance(given, kind):
            raise DeclarationError(
                f"{entry.model.__name__} has {keyword}={given!r}; it takes {kind.__name__}(…)",
                code="bucket-declaration",
            )
    if bucket is None and series is None:
        return None
    settings = entry.settings
    others = {
        "tree": settings.tree,
        "discriminator": settings.discriminator,
        "version": settings.version,
        "rollup": settings.rollup,
    }
    for keyword, other in others.items():
        if other is not None:
            raise DeclarationError(
                f"{entry.model.__name__} has {keyword}= beside bucket= or timeseries=; readings have none",
                code="bucket-declaration",
            )
    if bucket is not None:
        return bucket.lay_out(entry)
    return None if series is None else series.lay_out(entry)


def refuse_derived(graph: Graph) -> None:
    """Readings in buckets or in a time series feed nothing and maintain nothing."""
    for rule in graph.rules:
        touched = [rule.target, *(graph.by_collection[name] for name in rule.watches())]
        for entry in touched:
            if entry.layout is not None:
                raise DeclarationError(
                    f"{rule.place.label} would have to follow each reading of {entry.model.__name__}, which "
                    "are not stored one by one; use the statistics of its buckets, or store the readings as "
                    "documents",
                    code="layout-derived",
                )
