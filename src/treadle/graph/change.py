"""What a commit changes: single changes of documents, and new ones on their way in."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from treadle.plan import Plan, Raw
from treadle.query.paths import overlap

# In a batch: the caller passed nothing along for this document, which is not the same as None.
NOT_GIVEN: Final = object()
# Where an event of a change stream has the document before and after.
BEFORE = "fullDocumentBeforeChange"
AFTER = "fullDocument"


@dataclass(slots=True, eq=False, repr=False)
class Change:
    """Before and after of one document, as stored; None where there was or is none.

    An empty `before` says that there was one, but nobody looked.

    `fresh` says that the document was inserted under an id that nobody else
    can know yet, so that nothing can refer to it.
    """

    collection: str
    id: Any
    before: Raw | None
    after: Raw | None
    fresh: bool = False


class Changes(Protocol):
    """What one commit has changed so far; rules note here what they write themselves."""

    # Whether the transaction is the caller's own, and may hold earlier writes of the same documents.
    joined: bool

    def add(self, change: Change) -> None:
        """Note a change; several of one document become one."""

    def of(self, collection: str) -> list[Change]:
        """The net changes of a collection."""

    def note_before(self, entry: Any, ids: Sequence[Any]) -> Plan[None]:
        """Called before documents are written: what follows from them is known by what they were."""


@dataclass(slots=True)
class Batch:
    """New documents of one model, from the call that brings them to the commit that stores them."""

    raws: list[Raw]
    # Per document whether nobody else can know its id yet.
    fresh: list[bool]
    # By rule and document what the rule's `prepare` returned, and what its caller passed along.
    notes: dict[Any, list[Any]] = field(default_factory=dict)
    given: dict[Any, list[Any]] = field(default_factory=dict)
    # The order in which they are inserted, where a rule asks for one.
    order: list[Raw] | None = None

    @property
    def known(self) -> list[Raw]:
        """The documents whose ids others may know already."""
        return [raw for raw, fresh in zip(self.raws, self.fresh, strict=True) if not fresh]

    def joined(self, other: Batch) -> Batch:
        """This batch and another of the same model, as one."""

        def both(mine: dict[Any, list[Any]], theirs: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
            return {
                rule: [
                    *mine.get(rule, [NOT_GIVEN] * len(self.raws)),
                    *theirs.get(rule, [NOT_GIVEN] * len(other.raws)),
                ]
                for rule in {**mine, **theirs}
            }

        return Batch(
            [*self.raws, *other.raws],
            [*self.fresh, *other.fresh],
            both(self.notes, other.notes),
            both(self.given, other.given),
        )


@dataclass(slots=True)
class Event:
    """A change of one document, as the stream tells it."""

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
