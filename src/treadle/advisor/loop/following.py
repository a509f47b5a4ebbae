"""What the worker's own work takes: its time without what it spends waiting for something to happen."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from treadle.plan import Command, DatabaseCommand, Plan, Wait
from treadle.store import common
from treadle.store.blocking.store import Store
from treadle.upkeep.change_stream import BEATS
from treadle.upkeep.position import NAME
from treadle.upkeep.stream import Follower


def catch_up(store: Store) -> float:
    """Let a worker apply everything that was written before this call; the seconds of its work."""
    with store.database.client.start_session() as session, store._owning() as owner:
        follower = Follower(
            store.graph,
            store._capabilities(),
            name=NAME,
            owner=owner,
            session=session.session_id["id"],
            is_dead=common.is_dead,
        )
        work = _Work()
        store.runner.run(work.measured(_all(follower)), session)
        return work.seconds


def _all(follower: Follower) -> Plan[None]:
    # On a private server there is no other leader.
    yield from follower.lead()
    yield from follower.run_until_idle()
    yield from follower.resign()


class _Work:
    """Adds up the time of a plan, without that of the commands that wait."""

    seconds = 0.0

    def measured(self, plan: Plan[None]) -> Plan[None]:
        answer: Any = None
        failure: BaseException | None = None
        while True:
            start = perf_counter()
            try:
                command = plan.send(answer) if failure is None else plan.throw(failure)
            except StopIteration:
                self.seconds += perf_counter() - start
                return
            answer, failure = None, None
            try:
                answer = yield command
            except BaseException as error:
                failure = error
            if not _waits(command, answer):
                self.seconds += perf_counter() - start


def _waits(command: Command, answer: Any) -> bool:
    """Whether a command only waited: a pause, or a look at the stream that shows no client's write."""
    if isinstance(command, Wait):
        return True
    if not isinstance(command, DatabaseCommand) or "getMore" not in command.document:
        return False
    cursor = answer.get("cursor") if isinstance(answer, Mapping) else None
    events = cursor.get("nextBatch", []) if isinstance(cursor, Mapping) else []
    namespaces = [each.get("ns", {}) if isinstance(each, Mapping) else {} for each in events]
    return all(each.get("coll") == BEATS for each in namespaces)
