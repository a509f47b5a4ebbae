"""What set-up, proof, long runs and summaries tell their callers."""

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
    """Something stored is not what it should be."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any


@dataclass(frozen=True)
class Progress:
    """How far a long run has come with one model."""

    model: str
    done: int
    total: int
    # How long the rest will take at the pace so far, where that is known.
    seconds_left: float | None = None


Report = Callable[[Progress], None]


class Pace:
    """A report that also sets the pace of a long run: how much at a time, and how long to rest in between."""

    def __call__(self, progress: Progress) -> None:
        raise NotImplementedError  # pragma: no cover

    def sized(self, most: int) -> int:
        """How many documents to take at a time, at most so many."""
        raise NotImplementedError  # pragma: no cover

    def begins_after(self, model: str) -> list[Any] | None:
        """The id, in a list, after which to begin with a model; None for its first document."""
        raise NotImplementedError  # pragma: no cover

    def rest(self, documents: int, last: list[Any] | None = None) -> Plan[None]:
        """Note how far the run came, and wait as long as the pace demands."""
        raise NotImplementedError  # pragma: no cover

    def found(self, findings: Sequence[Finding]) -> Plan[None]:
        """Keep what a page showed, before the page counts as done."""
        raise NotImplementedError  # pragma: no cover


def resting(report: Report | None, documents: int, last: list[Any] | None = None) -> Plan[None]:
    """Rest between two pages, if whoever wants to hear of the run also sets its pace."""
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
    # How many states before this one are not known, because another writer's were not seen.
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
    """What one bucket says about its readings, by the names of the fields."""

    start: dt.datetime
    end: dt.datetime
    count: int
    stats: dict[str, FieldSummary]

    def __getitem__(self, name: str) -> Any:
        return self.stats[name] if name in self.stats else getattr(self, name)
