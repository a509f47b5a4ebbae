"""The rules that handles of the Store look up: arrays, counters, trees, former states, archives and links.

A handle looks up the rule that the caller named, asks it for its calls, and
runs the plans that these return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from bson import ObjectId

from treadle.errors import DeclarationError, UsageError
from treadle.graph.layout import PageReader
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Report
from treadle.graph.rule import Place, Rule
from treadle.plan import Plan

Named = TypeVar("Named", bound="NamedRule")
Called = TypeVar("Called", bound="CalledRule")
Sums: TypeAlias = Mapping[Any, Any]
Children: TypeAlias = Literal["refuse", "subtree", "lift"]


class CalledRule(Rule):
    """A rule whose calls a handle makes."""

    # How the refusal of a model without such a rule ends, and its code.
    undeclared: ClassVar[str] = ""
    undeclared_code: ClassVar[str] = ""
    # Returns the calls, given the Store's `WritePath`; what else it takes, a handle knows.
    calls: Callable[..., Any]


def rule_of(entry: ModelEntry, family: type[Called]) -> Called:
    """Return the one rule of a family that a model has; else an error that says how to declare it."""
    for rule in entry.rules.of_type(family):
        return rule
    raise UsageError(f"{entry.model.__name__} {family.undeclared}", code=family.undeclared_code)


class NamedRule(CalledRule):
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

    def finding(self, key: Any, path: str, stored: Any, expected: Any) -> Finding:
        return Finding(self.pattern, self.target.model.__name__, key, path, stored, expected)


def rule_named(entry: ModelEntry, family: type[Named], name: str) -> Named:
    """Return the rule of a family that a caller named."""
    rules = entry.rules.of_type(family)
    for rule in rules:
        if rule.name == name:
            return rule
    known = ", ".join(repr(rule.name) for rule in rules) or "none"
    raise UsageError(
        f"{entry.model.__name__} has no {family.noun.partition(' ')[2]} {name!r}; it has {known}: "
        f"{family.undeclared}",
        code=family.undeclared_code,
    )


class ArrayRule(NamedRule):
    """An array that is stored in several documents."""

    noun = "an outlier array"
    undeclared = "declare it as Annotated[list[…], Outlier(limit=…, overflow=…)]"
    undeclared_code = "array-unknown"


class HierarchyRule(CalledRule):
    """A tree over the documents of a model."""

    undeclared = (
        'is no tree; declare it with tree=, such as tree=AncestorArray(parent="parent_id", '
        'ancestors="ancestors")'
    )
    undeclared_code = "tree-undeclared"


class PastRule(CalledRule):
    """The states that the documents of a model had."""

    undeclared = "keeps no history; declare it with history=History()"
    undeclared_code = "history-undeclared"


class MovingRule(CalledRule):
    """Documents that move to another collection when they are old."""

    undeclared = "has no archive; declare it with archive=Archive(…)"
    undeclared_code = "archive-undeclared"

    def archive(self, now: Any, report: Report | None, dry_run: bool) -> Plan[int]:
        """Move what is old enough, at the pace of the report. Returns the number of documents."""
        raise NotImplementedError  # pragma: no cover


class RelatingRule(CalledRule):
    """Documents of one collection that name each other."""

    undeclared = 'has no links; declare them with links=Links("links")'
    undeclared_code = "links-undeclared"

    def related(self, write_path: Any, id: Any, filter: Any, sort: Any, limit: int | None) -> PageReader[Any]:
        """Return what reads a document and all that belongs to it."""
        raise NotImplementedError  # pragma: no cover


# -- counters ------------------------------------------------------------------------------------------


class CounterRule(NamedRule):
    """A number that is written some time after its events."""

    noun = "a counter"
    undeclared = "declare it as Annotated[int, Approximate(every=…)]"
    undeclared_code = "counter-unknown"
    # What it was declared with: where events wait, and until when.
    declared: Any
    # Ids of exactly this class need no validation.
    exact_key: type | None
    # Returns the sum of two amounts.
    plus: Callable[[Any, Any], Any]


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
        """Return a number for the next batch or event of this writer; they only grow."""

    def divide(self, size: int) -> None:
        """Write what is unfinished in smaller chunks, under new numbers."""

    def pending(self) -> dict[Any, Any]:
        """Return what is not known to be written, by key."""
