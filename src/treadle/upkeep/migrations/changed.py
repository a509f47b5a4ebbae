"""What others write to a collection while it is being migrated by a swap: the ids of their documents.

The stream is that of the collection alone, because the server looks at every
entry of its log, and takes less time to pass over those of other collections
there. Such a stream shows no marker that is written elsewhere. But its resume
token tells the time up to which it was read: past the time of a marker, it has
told everything that was written before the marker.

Where a token tells no time, the stream is one of the whole database, and shows
the marker itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.graph.gather import freeze
from treadle.graph.limits import Limits
from treadle.plan import Plan, Raw, delete_many, server_facts
from treadle.plan.server_errors import HISTORY_LOST
from treadle.upkeep.change_stream import BEATS, UPHEAVALS, ChangeStream, beat, first_stages, operation_time
from treadle.upkeep.headroom import time_of

AT_END_SECONDS = 0.01
# Of an event, only this is read, so that no document is sent.
READ: Raw = {"$project": {"operationType": 1, "documentKey": 1, "ns": 1}}


class Changed:
    """The documents of a collection that were written since a place in history."""

    def __init__(self, collection: str, limits: Limits) -> None:
        self.collection = collection
        self._limits = limits
        self._stream = ChangeStream()
        self._keys: dict[Any, Any] = {}
        self._beats: set[Any] = set()
        # Whether the stream is that of the collection alone.
        self._alone = False

    def open(self, place: Raw) -> Plan[None]:
        """Begin to follow at a place."""
        stages = [*first_stages(place, [self.collection, BEATS]), READ]
        server = yield from server_facts()
        if place["token"] is None and server.streams != "cluster":
            yield from self._stream.open([stages[0], READ], self.collection)
            yield from self.look()
            self._alone = self._time is not None
            if self._alone:
                return
            yield from self.close()
        yield from self._stream.open(stages)

    def close(self) -> Plan[None]:
        yield from self._stream.close()

    @property
    def _time(self) -> Any:
        return time_of({"token": self._stream.token})

    def look(self, await_seconds: float = 0) -> Plan[None]:
        """Read on; waits for so long if there is nothing."""
        if self._stream.cursor is None:
            raise self.taken_away()
        try:
            events = yield from self._stream.read(self._limits.schedule_events_page, await_seconds)
        except OperationFailure as error:
            if error.code not in HISTORY_LOST:
                raise
            raise self.taken_away() from error
        for event in events:
            if event["operationType"] in UPHEAVALS:
                raise self.taken_away()
            key = event["documentKey"]["_id"]
            if event["ns"]["coll"] == self.collection:
                self.note([key])
            else:
                self._beats.add(key)

    def note(self, keys: Iterable[Any]) -> None:
        """These documents are among those that were written."""
        self._keys.update((freeze(key), key) for key in keys)

    def until_now(self) -> Plan[list[Any]]:
        """The ids of all that was written since the last time, up to this call."""
        limits = self._limits
        marker = yield from beat()
        # No earlier than the marker, of which nothing is read: whatever came before it has an earlier time.
        present = (yield from operation_time()) if self._alone else None
        # A stream of one collection does not say when it has come to the end, so it is not waited for long.
        await_seconds = AT_END_SECONDS if self._alone else limits.worker_await_seconds
        for _ in range(limits.schedule_events_max):
            if self._time >= present if self._alone else marker in self._beats:
                yield from delete_many(BEATS, {"_id": marker})
                keys, self._keys, self._beats = self._keys, {}, set()
                return list(keys.values())
            yield from self.look(await_seconds)
        raise self.taken_away()

    def taken_away(self) -> DataError:
        return DataError(
            f"{self.collection} was dropped or renamed or got another validator, index or option while it "
            "was migrated, or its change stream has ended, because the server's history (its oplog) is too "
            "short for what is written; nothing was changed, try again",
            code="migration-failed",
        )
