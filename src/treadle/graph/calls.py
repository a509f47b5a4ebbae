"""The Store's calls on arrays, counters and trees, and on what was before or is elsewhere.

A handle of the Store looks up the rule that the caller named, asks it for its
calls, and runs the plans that these return. Rules are given the Store's
`WritePath`; it is `Any` here, because its room comes after this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from bson import ObjectId

from treadle.errors import DeclarationError, UsageError
from treadle.graph.layout import PageReader
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Report
from treadle.graph.rule import Place, Rule
from treadle.model.document import Document
from treadle.plan import Plan

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


def rule_named(entry: ModelEntry, family: type[Named], name: str) -> Named:
    """The rule of a family that a caller named."""
    rules = entry.rules.of_type(family)
    for rule in rules:
        if rule.name == name:
            return rule
    known = ", ".join(repr(rule.name) for rule in rules) or "none"
    raise family.unknown(f"{entry.model.__name__} has no {family.noun.partition(' ')[2]} {name!r}", known)


def rule_of(entry: ModelEntry, family: type[Called], how: str, *, code: str) -> Called:
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

    def calls(self, write_path: Any, id: Any) -> Any:
        """The calls on the array of one document."""
        raise NotImplementedError  # pragma: no cover


# -- counters ------------------------------------------------------------------------------------------


class CounterRule(NamedRule):
    """A number that is written some time after its events."""

    noun = "a counter"
    # What it was declared with: where events wait, and until when.
    declared: Any
    # Ids of exactly this class need no validation.
    exact_key: type | None
    # The sum of two amounts.
    plus: Callable[[Any, Any], Any]

    @classmethod
    def unknown(cls, asked: str, known: str) -> UsageError:
        return UsageError(
            f"{asked}; it has {known}: declare it as Annotated[int, Approximate(every=…)]",
            code="counter-unknown",
        )

    def calls(self, write_path: Any) -> Any:
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


# -- trees ---------------------------------------------------------------------------------------------


class HierarchyRule(Rule):
    """A tree over the documents of a model."""

    def calls(self, write_path: Any) -> Any:
        """The calls on the tree."""
        raise NotImplementedError  # pragma: no cover


def hierarchy_of(entry: ModelEntry) -> HierarchyRule:
    """The rule of a model's tree."""
    example = 'tree=AncestorArray(parent="parent_id", ancestors="ancestors")'
    how = f"is no tree; declare it with tree=, such as {example}"
    return rule_of(entry, HierarchyRule, how, code="tree-undeclared")


# -- former states -------------------------------------------------------------------------------------


class PastRule(Rule):
    """The states that the documents of a model had."""

    def calls(self, write_path: Any, entry: ModelEntry) -> Any:
        """The calls on former states, of the kind that is asked for."""
        raise NotImplementedError  # pragma: no cover


def past_of(entry: ModelEntry) -> PastRule:
    """The rule that keeps a model's former states."""
    how = "keeps no history; declare it with history=History()"
    return rule_of(entry, PastRule, how, code="history-undeclared")


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


def moving_of(entry: ModelEntry) -> MovingRule:
    """The rule that archives a model's documents."""
    how = "has no archive; declare it with archive=Archive(…)"
    return rule_of(entry, MovingRule, how, code="archive-undeclared")


# -- documents that belong together --------------------------------------------------------------------


class RelatingRule(Rule):
    """Documents of one collection that name each other."""

    def related(self, write_path: Any, id: Any, filter: Any, sort: Any, limit: int | None) -> PageReader[Any]:
        """What reads a document and all that belongs to it."""
        raise NotImplementedError  # pragma: no cover


def relating_of(entry: ModelEntry) -> RelatingRule:
    """The rule that keeps a model's links."""
    how = 'has no links; declare them with links=Links("links")'
    return rule_of(entry, RelatingRule, how, code="links-undeclared")
