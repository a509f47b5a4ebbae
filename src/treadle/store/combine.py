"""Group commit: concurrent writes of one process share a transaction.

Each caller still gets its own result or its own error. `Combiner` is for
threads, `AsyncCombiner` for the tasks of an event loop; what a group does is
in `engine/commit.py`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from treadle.engine.work import Work
from treadle.plan.server_errors import surely_not_committed
from treadle.store import shell


class Combiner:
    """Lets writes of several threads share one transaction.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the next takes the whole queue along. After a
    group, the next leader waits a moment for those who are just coming back;
    a single writer never waits.
    """

    def __init__(
        self, commit: Callable[[Sequence[Work[Any]]], list[Any]], most: int, linger_seconds: float
    ) -> None:
        self._commit = commit
        self._most = most
        # How long a leader waits for the others of the last group to come back.
        self._linger_seconds = linger_seconds
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
            mine.woken.wait()
        except BaseException:
            # Interrupted while waiting: nobody may count on this thread any more.
            self._leave(mine)
            raise
        if mine.group:
            return self._lead(mine.group)
        if mine.alone:
            return self._commit([work])[0]
        if mine.error is not None:
            raise mine.error
        return mine.outcome

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
            time.sleep(self._linger_seconds)
            with self._lock:
                group.extend(self._take(self._most - len(group)))
        self._last_size = len(group)

    def _hand_over(self) -> None:
        with self._lock:
            group = self._take(self._most)
            self._busy = bool(group)
            if group:
                group[0].group = group
        if group:
            group[0].woken.set()

    def _take(self, most: int) -> list[_Waiting]:
        return [self._waiting.popleft() for _ in range(min(len(self._waiting), most))]

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
        self.woken = threading.Event()
        self.group: list[_Waiting] = []
        self.alone = False
        self.outcome: Any = None
        self.error: Exception | None = None


class AsyncCombiner:
    """Lets writes of several tasks share one transaction.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the whole queue goes next. A group runs in a
    task of its own, so that cancelling one caller does not take its
    neighbours' writes along.
    """

    def __init__(
        self, commit: Callable[[Sequence[Work[Any]]], Awaitable[list[Any]]], most: int, linger_seconds: float
    ) -> None:
        self._commit = commit
        self._most = most
        # How long a leader waits for the others of the last group to come back.
        self._linger_seconds = linger_seconds
        self._waiting: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
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
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        outcome = await future
        return (await self._commit([work]))[0] if outcome is _ALONE else outcome

    def _hand_over(self) -> None:
        group = self._take(self._most)
        self._busy = bool(group)
        if group:
            task = asyncio.get_running_loop().create_task(self._lead(group))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    def _take(self, most: int) -> list[tuple[Work[Any], asyncio.Future[Any]]]:
        group: list[tuple[Work[Any], asyncio.Future[Any]]] = []
        while self._waiting and len(group) < most:
            work, future = self._waiting.popleft()
            # Cancelled while it waited: it was never begun.
            if not future.done():
                group.append((work, future))
        return group

    async def _lead(self, group: list[tuple[Work[Any], asyncio.Future[Any]]]) -> None:
        try:
            if len(group) < self._last_size:
                await asyncio.sleep(self._linger_seconds)
                group.extend(self._take(self._most - len(group)))
            self._last_size = len(group)
            outcomes: Sequence[Any] = await self._commit([work for work, _ in group])
        except BaseException as error:
            # One bad write must not fail its neighbours: each tries by itself,
            # unless the group may have been committed after all.
            alone = len(group) > 1 and surely_not_committed(error)
            for _, future in group:
                if not future.done():
                    if alone:
                        future.set_result(_ALONE)
                    else:
                        future.set_exception(shell.outcome_unknown(error))
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), outcome in zip(group, outcomes, strict=True):
                if not future.done():
                    future.set_result(outcome)
        finally:
            self._hand_over()


_ALONE = object()
