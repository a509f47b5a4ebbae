"""What a commit changes: single changes of documents, and new ones on their way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from treadle.plan import Plan, Raw

# In a batch: the caller passed nothing along for this document, which is not the same as None.
NOT_GIVEN: Final = object()


@dataclass(frozen=True, slots=True)
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
