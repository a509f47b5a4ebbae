"""What set-up, proof, long runs and summaries tell their callers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that set-up did, or would do."""

    what: str
    collection: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.collection}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something stored is not what it should be."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long run has come with one model."""

    model: str
    done: int
    total: int


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class FieldSummary:
    """Statistics of one field; `avg` is None where no reading has a value."""

    min: Any
    max: Any
    sum: Any
    avg: Any

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class Summary:
    """What one bucket says about its readings, by the names of the fields."""

    start: dt.datetime
    end: dt.datetime
    count: int
    stats: dict[str, FieldSummary]

    def __getitem__(self, name: str) -> Any:
        return self.stats[name] if name in self.stats else getattr(self, name)
