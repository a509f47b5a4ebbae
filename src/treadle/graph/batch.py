"""New documents of one model, from the call that brings them to the commit that stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from treadle.plan import Raw

# In a batch: the caller passed nothing along for this document, which is not the same as None.
NOT_GIVEN: Final = object()


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
