"""A rule that was paused catches up by itself, beside those that follow the stream.

It reads the stream from where it was paused, with its own events alone.
When little is left, a marker is written, and nothing else is read before that
marker appears here: so the rule has seen at least as much as the others, and
joins them without a gap. What it then sees twice is harmless, because events
only mark documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.graph.graph import Graph
from treadle.graph.rule import Rule
from treadle.plan import Plan, Raw, transact
from treadle.plan.capabilities import Capabilities
from treadle.upkeep import controls
from treadle.upkeep.apply import apply
from treadle.upkeep.change_stream import BEATS, ChangeStream, beat, key_of, places
from treadle.upkeep.dirty import Dirty, mark_targets
from treadle.upkeep.events import Watch

# How long.
WORKER_LINGER_SECONDS = 0.1
# Reads in which a rule that was resumed must meet its own marker.
WORKER_REPLAY_READS = 50


class Replay:
    """What one label stands for, on its way from the place of its pause to the present."""

    def __init__(self, graph: Graph, server: Capabilities, row: Raw, stopped: set[Rule]) -> None:
        self.graph = graph
        self.server = server
        self.label: str = row["_id"]
        self.rules = controls.together(graph, self.label)
        self.place: Raw = row["place"]
        self._others = places(self.place)[1:]
        self.watch = Watch(graph, server.pre_images, only=self.rules)
        # Rules that do not change.
        self.without = frozenset(stopped - set(self.rules))
        self.handled = 0
        # Rules that need a backfill after all.
        self.unsettled: set[Rule] = set()
        self._stream = ChangeStream()

    def is_lost(self) -> bool:
        """Whether its place cannot be found in any other way either."""
        self._stream = ChangeStream()
        if not self._others:
            return True
        self.place = self._others.pop()
        return False

    def step(self, fence: Callable[[], Plan[None]]) -> Plan[bool]:
        """Handle the next events; whether everything that the others have seen was seen."""
        try:
            return (yield from self._step(fence))
        except BaseException:
            # What was read and not handled is read again.
            self._stream = ChangeStream()
            raise

    def _step(self, fence: Callable[[], Plan[None]]) -> Plan[bool]:
        limits = self.graph.limits
        events = yield from self._read(0.001)
        if len(events) >= limits.worker_linger_below:
            yield from self._handle(events, fence)
            return False
        marker = yield from beat()
        for _ in range(WORKER_REPLAY_READS):
            seen = yield from self._handle(events, fence)
            if marker in seen:
                return True
            events = yield from self._read(WORKER_LINGER_SECONDS)
        return False

    def _read(self, await_seconds: float) -> Plan[list[Raw]]:
        if self._stream.cursor is None:
            yield from self._stream.open(self.watch.pipeline(self.place, apart=True))
        return (yield from self._stream.read(self.graph.limits.worker_batch_max, await_seconds, raw=True))

    def _handle(self, events: list[Raw], fence: Callable[[], Plan[None]]) -> Plan[set[Any]]:
        """Recompute what these events concern, and store the position. Returns the markers among them."""
        dirty, beats = Dirty(), set()
        for event in events:
            if event.get("coll") == BEATS:
                beats.add(key_of(event))
            else:
                self.watch.note(event, dirty)
        yield from mark_targets(dirty)
        self.unsettled |= {*dirty.upset, *dirty.blind}
        start = events[-1].get("clusterTime") if events else self.place["start"]
        place = {"token": self._stream.token, "start": start}

        def finish() -> Plan[None]:
            yield from fence()
            yield from controls.move(self.label, place)

        if dirty:
            self.handled += yield from apply(
                self.graph, self.server, dirty, fence, finish, without=self.without
            )
        elif events:
            yield from transact(finish)
        self.place = place
        return beats
