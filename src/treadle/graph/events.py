"""Changes of single documents, as a change stream reports them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.plan import Raw
from treadle.query.paths import overlap

# Where an event of a change stream has the document before and after.
BEFORE = "fullDocumentBeforeChange"
AFTER = "fullDocument"


@dataclass(slots=True)
class Event:
    """A change of one document, as the stream reports it."""

    kind: str
    key: Any
    # The paths that an update touched, without positions; None where any may have changed.
    touched: set[str] | None
    raw: Mapping[str, Any]

    @property
    def before(self) -> Raw | None:
        """The document before, where the server kept it."""
        return self.raw.get(BEFORE) or None

    @property
    def after(self) -> Raw | None:
        """The document after; None also where the server did not keep it."""
        return self.raw.get(AFTER) or None

    @property
    def time(self) -> dt.datetime:
        """When it was committed, by the server's clock."""
        time: dt.datetime = self.raw.get("wallTime") or self.raw["clusterTime"].as_datetime()
        return time

    def touches(self, paths: Iterable[str]) -> bool:
        return self.touched is None or any(overlap(one, other) for one in self.touched for other in paths)
