"""A listener that records the commands of a client, and can act just before one of them is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from pymongo import monitoring

from treadle.plan.capabilities import NOWHERE

# How a client greets, logs in and leaves is not part of any call.
GREETINGS = frozenset(
    {"hello", "ismaster", "isMaster", "ping", "buildInfo", "endSessions", "saslStart", "saslContinue"}
)
# The sessions of probes that have begun a transaction and not yet aborted it.
_probe_sessions: set[bytes] = set()


def is_probe(event: monitoring.CommandStartedEvent) -> bool:
    """Whether a command only asks what the server can do.

    Each Store sends about a dozen of these once. They are never logged, so
    that a test can say how many commands a call costs.
    """
    if event.command_name == "getParameter":
        return True
    first = event.command.get(event.command_name)
    inside = first.get("aggregate") if isinstance(first, dict) else first
    session = bytes((event.command.get("lsid") or {}).get("id", b""))
    if event.command_name == "abortTransaction" and session in _probe_sessions:
        _probe_sessions.discard(session)
        return True
    if event.command.get("startTransaction") and first == NOWHERE:
        _probe_sessions.add(session)
    return NOWHERE in (first, inside)


class CommandLog(monitoring.CommandListener):
    """The names and bodies of the commands that a client sent."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, Any]] = []
        self._awaited: Collection[str] = ()
        self._skip = 0
        self._act: Callable[[], Any] | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.commands]

    def count(self, names: Collection[str]) -> int:
        """Count the logged commands that have one of these names."""
        return sum(name in names for name, _ in self.commands)

    def clear(self) -> None:
        """Forget the commands, and what was to be done before one of them."""
        self.commands.clear()
        self._act = None

    def before(self, commands: Collection[str], skip: int, act: Callable[[], Any]) -> None:
        """Call `act` once, just before one of these commands is sent, after `skip` of them."""
        self._awaited, self._skip, self._act = commands, skip, act

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        name = event.command_name
        if name in GREETINGS or is_probe(event):
            return
        self.commands.append((name, event.command))
        if self._act is None or name not in self._awaited:
            return
        if self._skip:
            self._skip -= 1
            return
        act, self._act = self._act, None
        act()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...
