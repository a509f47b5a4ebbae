"""The results that set-up, verify, long runs and reads return to their callers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from treadle.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Action:
    """One thing that set-up did, or would do."""

    what: str
    collection: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.collection}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Finding:
    """A stored value that differs from its recomputed one."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any


@dataclass(frozen=True)
class Progress:
    """How far a long run is with one model."""

    model: str
    done: int
    total: int
    # How long the rest takes at the pace so far, where that is known.
    seconds_left: float | None = None


Report = Callable[[Progress], None]


class Pace:
    """A report that also sets the pace of a long run: how much at a time, and how long to rest in between."""

    def __call__(self, progress: Progress) -> None:
        raise NotImplementedError  # pragma: no cover

    def sized(self, most: int) -> int:
        """Return how many documents to take at a time."""
        raise NotImplementedError  # pragma: no cover

    def begins_after(self, model: str) -> list[Any] | None:
        """Return the id, in a list, after which to begin with a model; None for its first document."""
        raise NotImplementedError  # pragma: no cover

    def rest(self, documents: int, last: list[Any] | None = None) -> Plan[None]:
        """Record how far the run is, and wait as long as the pace demands."""
        raise NotImplementedError  # pragma: no cover

    def found(self, findings: Sequence[Finding]) -> Plan[None]:
        """Keep the findings of a page, before the page counts as done."""
        raise NotImplementedError  # pragma: no cover


def resting(report: Report | None, documents: int, last: list[Any] | None = None) -> Plan[None]:
    """Rest between two pages, if the report sets the pace."""
    if isinstance(report, Pace):
        yield from report.rest(documents, last)


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some documents in the order of a sort; `next` is what `after=` takes for those that follow."""

    items: list[T]
    next: str | None


@dataclass(slots=True)
class Nested(Generic[T]):
    """A node of a tree with all that is below it, siblings in their order."""

    node: T
    children: list[Nested[T]] = field(default_factory=list)


@dataclass(frozen=True)
class State(Generic[T]):
    """A document as it was from `valid_from` to `valid_to`, which is None while it still is.

    The document's own fields can be read from the state as well.
    """

    document: T
    revision: int
    valid_from: dt.datetime
    valid_to: dt.datetime | None
    # How many states before this one are not known: another program made them.
    missed: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.document, name)


@dataclass(frozen=True)
class FieldSummary:
    """Statistics of one field; `avg` is None where no reading has a value."""

    min: Any
    max: Any
    sum: Any
    avg: Any

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class Summary:
    """The statistics that one bucket keeps of its readings, by field."""

    start: dt.datetime
    end: dt.datetime
    count: int
    stats: dict[str, FieldSummary]

    def __getitem__(self, name: str) -> Any:
        return self.stats[name] if name in self.stats else getattr(self, name)
