"""The documents of one write, before and after it, as the write hooks of rules see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from treadle.graph.scope import Scope
from treadle.plan import Raw

Pair: TypeAlias = tuple[Raw | None, Raw | None]


@dataclass(slots=True)
class Batch:
    """Documents of one model before and after a write; the same one is passed before and after it is stored.

    There is no before where a document is new to the model, and no after
    where it is removed. A soft-deleted document is still stored: what enters
    and leaves the model is seen through a scope. Before a soft deletion is
    stored, the date in its after-image is provisional.
    """

    pairs: Sequence[Pair]
    # Per document whether its id was generated in this call, so that nothing can refer to it yet.
    fresh: Sequence[bool] = ()
    # By rule and frozen id what the caller passed along for a document.
    given: Mapping[Any, Mapping[Any, Any]] = field(default_factory=dict)
    # By rule what `before` leaves for `after`.
    notes: dict[Any, Any] = field(default_factory=dict)
    # The order in which new documents are stored, where a rule sets one.
    order: list[Raw] | None = None

    @property
    def new(self) -> list[Raw]:
        """The documents that are stored now and were not before."""
        return [after for before, after in self.pairs if before is None and after is not None]

    @property
    def known(self) -> list[Raw]:
        """The new documents whose ids others may know already."""
        fresh = self.fresh or [False] * len(self.pairs)
        return [
            after
            for (before, after), is_fresh in zip(self.pairs, fresh, strict=True)
            if before is None and after is not None and not is_fresh
        ]

    @property
    def removed(self) -> list[Raw]:
        """The documents that are stored no longer."""
        return [before for before, after in self.pairs if before is not None and after is None]

    def entering(self, scope: Scope) -> list[Raw]:
        """The documents that a scope sees after the write and not before it."""
        return [after for before, after in self._through(scope) if before is None and after is not None]

    def leaving(self, scope: Scope) -> list[Raw]:
        """The documents that a scope sees before the write and not after it."""
        return [before for before, after in self._through(scope) if before is not None and after is None]

    def staying(self, scope: Scope) -> list[tuple[Raw, Raw]]:
        """The documents that a scope sees before the write and after it."""
        pairs = self._through(scope)
        return [(before, after) for before, after in pairs if before is not None and after is not None]

    def _through(self, scope: Scope) -> list[Pair]:
        return [
            (
                before if before is not None and scope.admits(before) else None,
                after if after is not None and scope.admits(after) else None,
            )
            for before, after in self.pairs
        ]
