"""Group commit: concurrent writes of one process share a transaction.

Each caller still gets its own result or its own error, and waits no longer
than its deadline: while it queues, nothing of it is written; while its group
is being committed, the outcome is unknown. A group goes by the latest deadline
in it. `Combiner` is for threads, `AsyncCombiner` for the tasks of an event
loop; what a group does is in `engine/commit.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from treadle.engine.work import Work
from treadle.graph.limits import Limits
from treadle.plan.server_errors import surely_not_committed
from treadle.store import deadline, shell


class Combiner:
    """Lets writes of several threads share one transaction.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the next takes the whole queue along. After a
    group, the next leader waits a moment for those who are just coming back;
    a single writer never waits.
    """

    def __init__(self, commit: Callable[[Sequence[Work[Any]]], list[Any]], most: int, limits: Limits) -> None:
        self._commit = commit
        self._most = most
        self._limits = limits
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._busy = False
        self._last_size = 1

    def perform(self, work: Work[Any]) -> Any:
        """The outcome of a work, or its own error."""
        if self._process != os.getpid():
            # A fork took the queue along, but not the threads that stand in it.
            self._begin_anew()
        with self._lock:
            mine = None
            if self._busy:
                mine = _Waiting(work)
                self._waiting.append(mine)
            self._busy = True
        if mine is None:
            return self._lead([_Waiting(work)])
        try:
            self._await_turn(mine)
        except BaseException:
            # Interrupted while waiting, or too late: nobody may count on this thread any more.
            self._leave(mine)
            raise
        if mine.group:
            return self._lead(mine.group)
        if mine.alone:
            return self._commit([work])[0]
        if mine.error is not None:
            raise mine.error
        return mine.outcome

    def _await_turn(self, mine: _Waiting) -> None:
        """Wait until this write is done, or is to lead a group."""
        patience = min(mine.until, time.monotonic() + self._limits.retry_seconds)
        if mine.woken.wait(max(0.0, patience - time.monotonic())):
            return
        with self._lock:
            begun = not mine.group and mine not in self._waiting and not mine.alone
        if not begun:
            raise deadline.passed("queued behind other writes")
        if mine.until < math.inf:
            raise deadline.unknown()
        # Its group is under way, and whoever leads that has a bound of its own.
        mine.woken.wait()

    def _lead(self, group: list[_Waiting]) -> Any:
        try:
            self._linger(group)
        except BaseException:
            with self._lock:
                self._waiting.extendleft(reversed(group[1:]))
            self._hand_over()
            raise
        first, *others = group
        try:
            if not others:
                return self._commit([first.work])[0]
            try:
                outcomes = self._commit([each.work for each in group])
            except BaseException as error:
                # One bad write must not fail its neighbours: each tries by itself,
                # unless the group may have been committed after all.
                again = surely_not_committed(error)
                for each in others:
                    each.alone, each.error = again, None if again else shell.outcome_unknown(error)
                    each.woken.set()
                if not again:
                    raise
                others = []
                return self._commit([first.work])[0]
            for each, outcome in zip(others, outcomes[1:], strict=True):
                each.outcome = outcome
                each.woken.set()
            return outcomes[0]
        finally:
            self._hand_over()

    def _linger(self, group: list[_Waiting]) -> None:
        """Wait a moment for those who were in the last group too."""
        if len(group) < self._last_size:
            time.sleep(self._limits.combine_seconds)
            with self._lock:
                group.extend(_take(self._waiting, self._most - len(group), led_until=group[0].until))
        self._last_size = len(group)

    def _hand_over(self) -> None:
        with self._lock:
            group = _take(self._waiting, self._most)
            self._busy = bool(group)
            if group:
                group[0].group = group
        if group:
            group[0].woken.set()

    def _leave(self, mine: _Waiting) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
            others = mine.group[1:]
            led = bool(mine.group)
            if others:
                others[0].group = others
        if others:
            others[0].woken.set()
        elif led:
            self._hand_over()


class _Waiting:
    """A write in the queue, and how it ended."""

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.until = deadline.moment()
        self.woken = threading.Event()
        self.group: list[_Waiting] = []
        self.alone = False
        self.outcome: Any = None
        self.error: Exception | None = None


W = TypeVar("W", "_Waiting", "_AsyncWaiting")


def _take(waiting: deque[W], most: int, led_until: float = math.inf) -> list[W]:
    """The next of a queue; first, to lead them, the one with the latest deadline.

    Whoever has no deadline is not made to join a group that has one already.
    """
    group: list[W] = []
    while waiting and len(group) < most and (led_until == math.inf or waiting[0].until < math.inf):
        group.append(waiting.popleft())
    if group:
        last = max(range(len(group)), key=lambda place: group[place].until)
        group.insert(0, group.pop(last))
    return group


class AsyncCombiner:
    """Lets writes of several tasks share one transaction.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the whole queue goes next. A group runs in a
    task of its own, so that cancelling one caller does not take its
    neighbours' writes along.
    """

    def __init__(
        self, commit: Callable[[Sequence[Work[Any]]], Awaitable[list[Any]]], most: int, limits: Limits
    ) -> None:
        self._commit = commit
        self._most = most
        self._limits = limits
        self._waiting: deque[_AsyncWaiting] = deque()
        self._busy = False
        self._last_size = 1
        self._groups: set[asyncio.Task[None]] = set()

    async def perform(self, work: Work[Any]) -> Any:
        """The outcome of a work, or its own error."""
        if not self._busy:
            self._busy = True
            try:
                return (await self._commit([work]))[0]
            finally:
                self._hand_over()
        mine = _AsyncWaiting(work)
        self._waiting.append(mine)
        seconds = min(mine.until - time.monotonic(), self._limits.retry_seconds)
        timer = asyncio.get_running_loop().call_later(seconds, mine.expire)
        try:
            outcome = await mine.future
        finally:
            timer.cancel()
        return (await self._commit([work]))[0] if outcome is _ALONE else outcome

    def _hand_over(self) -> None:
        group = self._take(self._most)
        self._busy = bool(group)
        if group:
            # As the one whose deadline is the latest, not as whoever was served before.
            task = asyncio.get_running_loop().create_task(self._lead(group), context=group[0].context)
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    def _take(self, most: int, led_until: float = math.inf) -> list[_AsyncWaiting]:
        # Whoever was cancelled while it waited, or came too late, was never begun.
        self._waiting = deque(each for each in self._waiting if not each.future.done())
        group = _take(self._waiting, most, led_until)
        for each in group:
            each.begun = True
        return group

    async def _lead(self, group: list[_AsyncWaiting]) -> None:
        try:
            if len(group) < self._last_size:
                await asyncio.sleep(self._limits.combine_seconds)
                group.extend(self._take(self._most - len(group), group[0].until))
            self._last_size = len(group)
            outcomes: Sequence[Any] = await self._commit([each.work for each in group])
        except BaseException as error:
            # One bad write must not fail its neighbours: each tries by itself,
            # unless the group may have been committed after all.
            alone = len(group) > 1 and surely_not_committed(error)
            for each in group:
                if not each.future.done():
                    if alone:
                        each.future.set_result(_ALONE)
                    else:
                        each.future.set_exception(shell.outcome_unknown(error))
            if not isinstance(error, Exception):
                raise
        else:
            for each, outcome in zip(group, outcomes, strict=True):
                if not each.future.done():
                    each.future.set_result(outcome)
        finally:
            self._hand_over()


class _AsyncWaiting:
    """A write in the queue of a loop."""

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.until = deadline.moment()
        self.context = contextvars.copy_context()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.begun = False

    def expire(self) -> None:
        """Its time is over; where its group is under way, whoever set no deadline goes on waiting."""
        if not self.future.done() and not (self.begun and self.until == math.inf):
            self.future.set_exception(
                deadline.unknown() if self.begun else deadline.passed("queued behind other writes")
            )


_ALONE = object()
