"""A group of writes under way: whether it waits for a locked document, and when it must be split."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar, Token

# A group whose transaction met as many conflicts is split. A group that is retried as a whole conflicts
# again for as long as any of its documents is contended, and starves all of its callers.
GROUP_CONFLICTS_MAX = 2


class GroupContended(Exception):
    """The transaction of a group met conflicts, and the group goes on in two halves; nothing was written."""


class Turn:
    """Entered where the group is performed; its transaction reports when it has to be run again."""

    __slots__ = ("_conflicts", "_conflicts_max", "_token", "waits")

    _token: Token[Turn | None]

    def __init__(self) -> None:
        self.waits = False
        self._conflicts = 0
        self._conflicts_max: int | None = None

    @contextlib.contextmanager
    def splitting(self, may_split: bool) -> Generator[None]:
        """End the attempts of a group that conflicts by `GroupContended`, if it may be split."""
        self._conflicts, self._conflicts_max = 0, GROUP_CONFLICTS_MAX if may_split else None
        try:
            yield
        finally:
            self._conflicts_max = None

    def note_conflict(self) -> None:
        self.waits = True
        self._conflicts += 1
        if self._conflicts_max is not None and self._conflicts >= self._conflicts_max:
            raise GroupContended

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


_CURRENT: ContextVar[Turn | None] = ContextVar("treadle_turn", default=None)


def note_conflict() -> None:
    """Report that the transaction of the current group met another one.

    Raises `GroupContended` where the group is to be split.
    """
    turn = _CURRENT.get()
    if turn is not None:
        turn.note_conflict()
