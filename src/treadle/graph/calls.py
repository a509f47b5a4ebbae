"""The Store's calls on arrays, counters and trees, and on what was before or is elsewhere.

A handle of the Store looks up the rule that the caller named, asks it for its
calls, and runs the plans that these return. Rules are given the Store's
`WritePath`; it is `Any` here, because its room comes after this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from bson import ObjectId
from pymongo.errors import OperationFailure

from treadle.errors import DeclarationError, UsageError
from treadle.graph.layout import PageReader
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Nested, Report, State
from treadle.graph.rule import Place, Rule
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read
from treadle.query.filters import Sort

D = TypeVar("D", bound=Document)
D_co = TypeVar("D_co", bound=Document, covariant=True)
Named = TypeVar("Named", bound="NamedRule")
Called = TypeVar("Called", bound=Rule)
Sums: TypeAlias = Mapping[Any, Any]
Children: TypeAlias = Literal["refuse", "subtree", "lift"]


class NamedRule(Rule):
    """A rule that callers name by the Python path of its field."""

    noun = ""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.limits = place.entry.limits
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; {self.noun} belongs to the document itself or to a "
                "nested model",
                code="maintained-in-array",
            )

    @property
    def name(self) -> str:
        return self.place.label.partition(".")[2]

    @classmethod
    def unknown(cls, asked: str, known: str) -> UsageError:
        """The error that lists those that there are, and says how to declare one."""
        raise NotImplementedError  # pragma: no cover

    def finding(self, key: Any, path: str, stored: Any, expected: Any) -> Finding:
        return Finding(self.pattern, self.target.model.__name__, key, path, stored, expected)


def rule_named(entry: ModelEntry[Any], family: type[Named], name: str) -> Named:
    """The rule of a family that a caller named."""
    rules = entry.rules.of_type(family)
    for rule in rules:
        if rule.name == name:
            return rule
    known = ", ".join(repr(rule.name) for rule in rules) or "none"
    raise family.unknown(f"{entry.model.__name__} has no {family.noun.partition(' ')[2]} {name!r}", known)


def rule_of(entry: ModelEntry[Any], family: type[Called], how: str, *, code: str) -> Called:
    """The one rule of a family that a model has; else an error that says how to declare it."""
    for rule in entry.rules.of_type(family):
        return rule
    raise UsageError(f"{entry.model.__name__} {how}", code=code)


# -- arrays ------------------------------------------------------------------------------------------


class ArrayRule(NamedRule):
    """An array that is stored in several documents."""

    noun = "an outlier array"

    @classmethod
    def unknown(cls, asked: str, known: str) -> UsageError:
        return UsageError(
            f"{asked}; it has {known}: declare it as Annotated[list[…], Outlier(limit=…, overflow=…)]",
            code="array-unknown",
        )

    def calls(self, write_path: Any, id: Any) -> ArrayCalls:
        """The calls on the array of one document."""
        raise NotImplementedError  # pragma: no cover


class ArrayReader(Protocol):
    """One pass over an array."""

    over: bool

    def next(self) -> Plan[list[Any]]:
        """The next items; the last ones when it is `over` then."""


class ArrayCalls(Protocol):
    """What `store.array(…)` answers with."""

    # How many duplicates were left out.
    ignored: int

    def extend(self, items: Iterable[Any]) -> Plan[int]: ...
    def remove(self, item: Any) -> Plan[int]: ...
    def contains(self, item: Any) -> Plan[bool]: ...
    def count(self) -> Plan[int]: ...
    def page(self, number: int, size: int) -> Plan[list[Any]]: ...

    def reader(self, snapshot: bool) -> ArrayReader:
        """What reads all items; `snapshot` tells whether its reads all see one moment."""


# -- counters ------------------------------------------------------------------------------------------


class CounterRule(NamedRule):
    """A number that is written some time after its events."""

    noun = "a counter"
    # What it was declared with: where events wait, and until when.
    declared: Any
    # Ids of this very class need no validation.
    exact_key: type | None
    # The sum of two amounts.
    plus: Callable[[Any, Any], Any]

    @classmethod
    def unknown(cls, asked: str, known: str) -> UsageError:
        return UsageError(
            f"{asked}; it has {known}: declare it as Annotated[int, Approximate(every=…)]",
            code="counter-unknown",
        )

    def calls(self, write_path: Any) -> CounterCalls:
        """The calls on this counter."""
        raise NotImplementedError  # pragma: no cover


@dataclass(slots=True)
class Chunk:
    """Sums that are written together, once, under one number."""

    number: int
    sums: dict[Any, Any]


@dataclass(slots=True)
class Flushed:
    """What a flush did: how many documents were updated, and the amounts of ids that could not be."""

    documents: int = 0
    unknown: dict[Any, Any] = field(default_factory=dict)


class Waiting(Protocol):
    """The sums of a counter that wait in the memory of this process."""

    writer: ObjectId
    # What was taken to be written, and is not known to be.
    unfinished: deque[Chunk]

    def take(self) -> None:
        """Move all sums to `unfinished`."""

    def next_number(self) -> int:
        """A number for the next batch or event of this writer; they only grow."""

    def divide(self, size: int) -> None:
        """Write what is unfinished in smaller chunks, under new numbers."""

    def pending(self) -> dict[Any, Any]:
        """What is not known to be written, by key."""


class CounterCalls(Protocol):
    """What `store.counter(…)` answers with; events in memory are the handle's own."""

    def amounts(self, counts: Sums) -> dict[Any, Any]:
        """What a caller gave, checked and by key."""

    def record(self, waiting: Waiting, group: Sequence[Sums]) -> Plan[None]:
        """Store the amounts of several callers as one durable event."""

    def sample(self, key: Any, n: Any) -> Plan[dict[Any, Any]]:
        """Add an amount at once; what could not be added."""

    def flush(self, waiting: Waiting, done: Flushed) -> Plan[None]:
        """Write everything that waits; `done` holds the outcome, even where an error ends it."""

    def pending(self) -> Plan[dict[Any, Any]]:
        """The durable events that wait, of all processes."""

    def read(self, id: Any, exact: bool, waiting: Waiting) -> Plan[Any]:
        """The stored number, or with what waits."""

    def close(self, waiting: Waiting) -> Plan[None]:
        """Forget a writer whose chunks are all written."""


# -- trees ---------------------------------------------------------------------------------------------


class HierarchyRule(Rule):
    """A tree over the documents of a model."""

    def calls(self, write_path: Any) -> TreeCalls[Any]:
        """The calls on the tree."""
        raise NotImplementedError  # pragma: no cover


def hierarchy_of(entry: ModelEntry[Any]) -> HierarchyRule:
    """The rule of a model's tree."""
    example = 'tree=AncestorArray(parent="parent_id", ancestors="ancestors")'
    how = f"is no tree; declare it with tree=, such as {example}"
    return rule_of(entry, HierarchyRule, how, code="tree-undeclared")


class NodeReader(Protocol[D_co]):
    """Nodes that several reads find, one after another."""

    page: int

    def first(self) -> Plan[Read | None]:
        """The first read; None where there are no nodes."""

    def instead(self, error: OperationFailure) -> Read:
        """The read to make in place of one that the server refused; or it raises."""

    def take(self, raws: list[Raw]) -> Iterable[D_co]:
        """The nodes of a page."""

    def next(self) -> Read | None:
        """The read that comes next; None at the end."""


class TreeCalls(Protocol[D]):
    """What `store.tree(…)` answers with."""

    def roots(self, sort: Sort | None) -> NodeReader[D]: ...
    def children(self, id: Any, sort: Sort | None) -> NodeReader[D]: ...
    def descendants(self, id: Any, max_depth: int | None, sort: Sort | None) -> NodeReader[D]: ...
    def nested(self, id: Any, max_depth: int | None, sort: Sort | None) -> Plan[Nested[D]]: ...
    def ancestors(self, id: Any) -> Plan[list[D]]: ...
    def path(self, id: Any) -> Plan[list[D]]: ...
    def parent(self, id: Any) -> Plan[D | None]: ...
    def depth(self, id: Any) -> Plan[int]: ...
    def count(self, id: Any, max_depth: int | None) -> Plan[int]: ...
    def insert(self, node: D, parent: Any, at: int | None) -> Plan[D]: ...
    def move(self, id: Any, parent: Any, at: int | None) -> Plan[D]: ...
    def rename(self, id: Any, segment: str) -> Plan[D]: ...
    def remove(self, id: Any, children: Children) -> Plan[int]: ...


# -- former states -------------------------------------------------------------------------------------


class PastRule(Rule):
    """The states that the documents of a model had."""

    def calls(self, write_path: Any, entry: ModelEntry[Any]) -> PastCalls[Any]:
        """The calls on former states, of the kind that is asked for."""
        raise NotImplementedError  # pragma: no cover


def past_of(entry: ModelEntry[Any]) -> PastRule:
    """The rule that keeps a model's former states."""
    how = "keeps no history; declare it with history=History()"
    return rule_of(entry, PastRule, how, code="history-undeclared")


class PastCalls(Protocol[D]):
    """What `store.history(…)` and its like answer with."""

    def states(self, id: Any) -> PageReader[State[D]]: ...
    def at(self, id: Any, moment: Any) -> Plan[D | None]: ...
    def find_at(self, filter: Any, moment: Any) -> PageReader[D]: ...
    def revert(self, id: Any, revision: int) -> Plan[D]: ...


# -- documents that are elsewhere ----------------------------------------------------------------------


class RestoringRule(Rule):
    """Documents that were taken away, and can be brought back."""

    def restore(self, write_path: Any, id: Any) -> Plan[Any]:
        """Bring a document back; the document, or None where it is not among those taken away."""
        raise NotImplementedError  # pragma: no cover


class MovingRule(RestoringRule):
    """Documents that move to another collection when they are old."""

    def archive(self, now: Any, report: Report | None, dry_run: bool) -> Plan[int]:
        """Move what is old enough, at the pace of the report; how many documents."""
        raise NotImplementedError  # pragma: no cover


def moving_of(entry: ModelEntry[Any]) -> MovingRule:
    """The rule that archives a model's documents."""
    how = "has no archive; declare it with archive=Archive(…)"
    return rule_of(entry, MovingRule, how, code="archive-undeclared")


# -- documents that belong together --------------------------------------------------------------------


class RelatingRule(Rule):
    """Documents of one collection that name each other."""

    def related(self, write_path: Any, id: Any, filter: Any, sort: Any, limit: int | None) -> PageReader[Any]:
        """What reads a document and all that belongs to it."""
        raise NotImplementedError  # pragma: no cover


def relating_of(entry: ModelEntry[Any]) -> RelatingRule:
    """The rule that keeps a model's links."""
    how = 'has no links; declare them with links=Links("links")'
    return rule_of(entry, RelatingRule, how, code="links-undeclared")
