"""Callers' transactions: what they have changed, and which of them are over before their block is.

A call that is refused after it has changed something cannot take that back.
If the caller goes on all the same, nothing of the transaction may be
committed, as after an error of the server's own.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from treadle.errors import UsageError
from treadle.graph.rule import REVISION
from treadle.plan import Call

# It only makes others wait, and changes nothing that anybody reads.
_BUMP = {"$inc": {REVISION: 1}}


class Transactions:
    """The transactions of one Store's callers, by their sessions."""

    def __init__(self) -> None:
        # Of the sessions that anybody has asked for.
        self._changes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Sessions of Treadle's own blocks, and those of them that can commit nothing any more.
        self._blocks: WeakSet[Any] = WeakSet()
        self._over: WeakSet[Any] = WeakSet()

    def begin(self, session: Any) -> None:
        """Note that a block has opened a transaction."""
        self._blocks.add(session)
        self._over.discard(session)

    def note(self, session: Any, command: Call) -> None:
        """Note a write; not one that only makes others wait."""
        if not self._changes or session not in self._changes:
            return
        if not command.collection.startswith("treadle.") and _BUMP not in command.arguments[1:2]:
            self._changes[session] += 1

    def changes(self, session: Any) -> int:
        """How many writes a session has sent since this was first asked."""
        return self._changes.setdefault(session, 0)

    def end(self, session: Any) -> None:
        """Note that nothing of the transaction can be committed."""
        if session in self._blocks:
            self._over.add(session)

    def require_open(self, session: Any) -> None:
        """Refuse to go on with a transaction of which nothing can be committed."""
        if session in self._over:
            raise UsageError(
                "a call inside this transaction was refused or cut off after it had changed something, so "
                "that nothing of the transaction can be committed; let the error leave the block, and begin "
                "a new one",
                code="transaction-ended",
            )
