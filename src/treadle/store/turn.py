"""A group of writes under way, and whether a document that somebody else holds keeps it waiting."""

from __future__ import annotations

from contextvars import ContextVar, Token


class Turn:
    """Entered by whoever performs the group; its transaction says when it has to be run again."""

    __slots__ = ("_token", "waits")

    _token: Token[Turn | None]

    def __init__(self) -> None:
        self.waits = False

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


_CURRENT: ContextVar[Turn | None] = ContextVar("treadle_turn", default=None)


def note_conflict() -> None:
    """The transaction of this turn met another's; it waits, and those in the queue need not."""
    turn = _CURRENT.get()
    if turn is not None:
        turn.waits = True
