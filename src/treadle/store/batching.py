"""Concurrent calls of one process share round trips: group commit, and what `store/shared_commands.py` joins.

Each caller still gets its own result or its own error, and waits no longer
than its deadline: while it queues, nothing of it is written; while its group
is under way, the outcome of a write is unknown. A group goes by the latest
deadline in it. Plain commands do not wait for one that takes long, because its
document is locked, say: they go on beside it. Group commits do so where the one
under way has met a conflict: a few may wait while others go past them.
`Combiner` is for threads, `AsyncCombiner` for the tasks of an event loop; what a
group does is in `engine/commit.py` and `store/shared_commands.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

from treadle.graph.limits import Limits
from treadle.plan import Failed
from treadle.plan.server_errors import surely_not_committed
from treadle.store import common, deadline
from treadle.store.deadline import NEVER
from treadle.store.shared_commands import ALONE
from treadle.store.turn import GroupContended, Turn

# How long the next group waits for writers of the last one.
COMBINE_SECONDS = 0.0005
# Groups that wait for a locked document while other writes go past them.
COMBINED_PAST_MAX = 4
# So many of these are under way at once, each full but the first.
TOGETHER_GROUPS_MAX = 4


class Combiner:
    """Lets calls of several threads go together.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the next takes the whole queue along. With
    `lingers`, the leader of a group that is smaller than the one before waits
    a moment for those who are just coming back; a single caller never waits.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Any]], list[Any]],
        most: int,
        limits: Limits,
        *,
        alone: Callable[[Any], Any] | None = None,
        lingers: bool = True,
        reads: bool = False,
        past_max: int | None = None,
    ) -> None:
        self._perform = perform
        self._alone = alone or (lambda work: self._perform([work])[0])
        self._most = most
        self._limits = limits
        self._lingers = lingers
        self._reads = reads
        self._past_max = COMBINED_PAST_MAX if past_max is None else past_max
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._busy = False
        self._last_size = 1
        # The turn of whoever hands over next, and how many wait whom others have gone past.
        self._turn = Turn()
        self._passed = 0

    def perform(self, work: Any) -> Any:
        """The outcome of a call, or its own error."""
        if self._process != os.getpid():
            # A fork took the queue along, but not the threads that stand in it.
            self._begin_anew()
        with self._lock:
            mine = None
            if self._busy:
                mine = _Waiting(work)
                self._waiting.append(mine)
            else:
                turn = self._turn = Turn()
            self._busy = True
        if mine is None and self._last_size == 1:
            try:
                if not self._lingers:
                    # One plain command, which runs no transaction that could meet another's.
                    return self._alone(work)
                with turn:
                    return self._alone(work)
            finally:
                self._hand_over(turn)
        if mine is None:
            return self._lead([_Waiting(work)], turn)
        try:
            self._await_turn(mine)
        except BaseException:
            # Interrupted while waiting, or too late: nobody may count on this thread any more.
            self._leave(mine)
            raise
        if mine.group:
            return self._lead(mine.group, mine.turn)
        if mine.error is not None:
            raise mine.error
        return self._alone(work) if mine.outcome is ALONE else mine.outcome

    # A thread has nothing else to do meanwhile.
    join = perform

    def _await_turn(self, mine: _Waiting) -> None:
        """Wait until this call is done, or is to lead a group."""
        end = mine.until
        if self._goes_past(mine, end) if self._lingers else self._goes_on(mine):
            return
        seconds = end - monotonic()
        if mine.woken.wait(None if seconds == NEVER else max(0.0, seconds)):
            return
        with self._lock:
            if mine.woken.is_set():
                return
            begun = not mine.group and mine not in self._waiting
        if not begun or mine.until < NEVER:
            raise _too_late(begun, self._reads)
        # Its group is under way, and whoever leads that has a bound of its own.
        mine.woken.wait()

    def _goes_on(self, mine: _Waiting) -> bool:
        """Wait a little while; whether the call is done by then, or is to lead a group.

        Those who are still in the queue do not wait for whoever is under way.
        """
        seconds = self._limits.together_wait_seconds
        if mine.until < monotonic() + seconds:
            return False
        if mine.woken.wait(seconds):
            return True
        with self._lock:
            if mine not in self._waiting:
                return mine.woken.is_set()
            self._waiting.remove(mine)
            # By its own deadline nobody else is bound.
            others = _take(self._waiting, self._most - 1) if mine.until == NEVER else []
            mine.group = [mine, *others]
        return True

    def _goes_past(self, mine: _Waiting, end: float) -> bool:
        """Let the queue go past a group that waits for a locked document; whether this call was woken.

        The first in the queue looks for all of it.
        """
        seconds = self._limits.together_wait_seconds
        while monotonic() + seconds < end:
            if mine.woken.wait(seconds):
                return True
            with self._lock:
                first = bool(self._waiting) and self._waiting[0] is mine
                passes = first and self._turn.waits and self._passed < self._past_max
                self._passed += passes
                group = self._next() if passes else []
            if group:
                group[0].woken.set()
        return False

    def _next(self) -> list[_Waiting]:
        """The group whose turn it is, with its leader, who is still to be woken; the lock is held."""
        group = _take(self._waiting, self._most)
        self._busy = bool(group)
        if group:
            self._turn = group[0].turn
            group[0].group = group
        return group

    def _lead(self, group: list[_Waiting], turn: Turn) -> Any:
        try:
            self._linger(group)
        except BaseException:
            with self._lock:
                self._waiting.extendleft(reversed(group[1:]))
            self._hand_over(turn)
            raise
        first, *others = group
        try:
            if not others:
                with turn:
                    return self._alone(first.work)
            try:
                with turn:
                    outcomes = self._settle([each.work for each in group], turn)
            except BaseException as error:
                # One bad write must not fail its neighbours: each tries by itself,
                # unless the group may have been committed after all.
                again = self._reads or surely_not_committed(error)
                for each in others:
                    each.outcome, each.error = ALONE, None if again else common.outcome_unknown(error)
                    each.woken.set()
                if not again or not isinstance(error, Exception):
                    raise
                return self._alone(first.work)
            for each, outcome in zip(others, outcomes[1:], strict=True):
                each.outcome = outcome
                each.woken.set()
            return self._alone(first.work) if outcomes[0] is ALONE else outcomes[0]
        finally:
            self._hand_over(turn)

    def _settle(self, works: Sequence[Any], turn: Turn) -> list[Any]:
        """Return the outcome of each work of a group, which is split while its transactions conflict."""
        try:
            with turn.splitting(self._past_max > 0 and len(works) > 1):
                return self._perform(works)
        except GroupContended:
            outcomes: list[Any] = []
            for half in _halves(works):
                try:
                    # A single write may wait for a lock, and does so in its own caller's thread.
                    outcomes += self._settle(half, turn) if len(half) > 1 else [ALONE]
                except Exception as error:
                    outcomes += _outcomes_of(error, half)
            return outcomes

    def _linger(self, group: list[_Waiting]) -> None:
        """Wait a moment for those who were in the last group too."""
        if not self._lingers:
            return
        if len(group) < self._last_size:
            time.sleep(COMBINE_SECONDS)
            with self._lock:
                group.extend(_take(self._waiting, self._most - len(group), led_until=group[0].until))
        self._last_size = len(group)

    def _hand_over(self, turn: Turn | None = None) -> None:
        """Let the next of the queue go, unless somebody else has the turn already."""
        with self._lock:
            if self._lingers and turn is not None and turn is not self._turn:
                # Others have gone past it.
                self._passed -= 1
                return
            if not self._waiting:
                self._busy = False
                return
            group = self._next()
        if group:
            group[0].woken.set()

    def _leave(self, mine: _Waiting) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
            others = mine.group[1:]
            led = bool(mine.group)
            if others:
                others[0].group, others[0].turn = others, mine.turn
        if others:
            others[0].woken.set()
        elif led:
            self._hand_over(mine.turn)


class _Waiting:
    """A call in the queue, and how it ended."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.until = deadline.moment()
        self.woken = threading.Event()
        self.group: list[_Waiting] = []
        # Of the group that it leads.
        self.turn = Turn()
        self.outcome: Any = None
        self.error: Exception | None = None


W = TypeVar("W", "_Waiting", "_AsyncWaiting")


def _take(waiting: deque[W], most: int, led_until: float = NEVER) -> list[W]:
    """The next of a queue; first, to lead them, the one with the latest deadline.

    Whoever has no deadline is not made to join a group that has one already.
    """
    group: list[W] = []
    while waiting and len(group) < most and (led_until == NEVER or waiting[0].until < NEVER):
        group.append(waiting.popleft())
    if group:
        last = max(range(len(group)), key=lambda place: group[place].until)
        group.insert(0, group.pop(last))
    return group


def _halves(works: Sequence[Any]) -> list[Sequence[Any]]:
    middle = len(works) // 2
    return [works[:middle], works[middle:]]


def _outcomes_of(error: Exception, works: Sequence[Any]) -> list[Any]:
    """Return what the members of a failed half get: a try by themselves, unless it may be committed.

    The error of one half never reaches the members of the other.
    """
    if surely_not_committed(error):
        return [ALONE] * len(works)
    return [Failed(common.outcome_unknown(error)) for _ in works]


def _too_late(begun: bool, reads: bool) -> deadline.TimedOut:
    """The error of a call whose time is over while it queues, or while its group is under way."""
    if reads:
        return deadline.passed("reading together with others")
    return deadline.unknown() if begun else deadline.passed("queued behind other writes")


class AsyncCombiner:
    """Lets calls of several tasks go together.

    Whoever comes first goes alone, at once. Those who come meanwhile queue,
    and when the first is done, the whole queue goes next. Where nobody lingers,
    a full group does not wait for those under way, so that the server works on
    one while the client encodes or decodes another. A group runs in a task of
    its own, so that cancelling one caller does not take its neighbours' writes
    along.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Any]], Awaitable[list[Any]]],
        most: int,
        limits: Limits,
        *,
        alone: Callable[[Any], Awaitable[Any]] | None = None,
        lingers: bool = True,
        reads: bool = False,
        past_max: int | None = None,
    ) -> None:
        self._perform = perform
        self._alone = alone or self._as_a_group
        self._most = most
        self._limits = limits
        self._lingers = lingers
        self._reads = reads
        self._past_max = COMBINED_PAST_MAX if past_max is None else past_max
        self._waiting: deque[_AsyncWaiting] = deque()
        self._busy = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_size = 1
        self._groups: set[asyncio.Task[None]] = set()
        # How many are under way.
        self._flying = 0
        # The turn of whoever hands over next, and how many wait whom others have gone past.
        self._turn = Turn()
        self._passed = 0
        self._timer: asyncio.TimerHandle | None = None

    async def perform(self, work: Any) -> Any:
        """The outcome of a call, or its own error."""
        outcome = await self.join(work)
        return await self._alone(work) if outcome is ALONE else outcome

    def join(self, work: Any) -> Awaitable[Any]:
        """The outcome of a call, its own error, or `ALONE`; to be awaited at once.

        Not a coroutine: of those who queue there may be many, and each waits
        for its future with nothing in between.
        """
        if not self._busy:
            self._busy = True
            # Asked for here, because the answer takes as long as making a future.
            self._loop = asyncio.get_running_loop()
            return self._go_first(work)
        waiting, until = self._waiting, deadline.moment()
        mine = _AsyncWaiting(loop=self._loop)
        mine.work, mine.until, mine.begun, mine.since = work, until, False, monotonic()
        # Where neither has a deadline, the context of the one ahead will serve.
        same = waiting and until == NEVER and waiting[-1].until == NEVER
        mine.context = waiting[-1].context if same else contextvars.copy_context()
        waiting.append(mine)
        if self._timer is None:
            self._look_later(self._limits.together_wait_seconds)
        # Once for each group that the queue fills.
        if not self._lingers and len(waiting) % self._most == 0 and self._flying < TOGETHER_GROUPS_MAX:
            self._hand_over()
        return mine if until == NEVER else self._wait(mine, until - monotonic())

    async def _go_first(self, work: Any) -> Any:
        self._flying += 1
        turn = self._turn = Turn()
        try:
            with turn:
                return await self._alone(work)
        finally:
            self._land(turn)

    async def _as_a_group(self, work: Any) -> Any:
        return (await self._perform([work]))[0]

    async def _wait(self, mine: _AsyncWaiting, seconds: float) -> Any:
        timer = asyncio.get_running_loop().call_later(seconds, mine.expire, self._reads)
        try:
            return await mine
        finally:
            timer.cancel()

    def _look_later(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        """Let those go on who have waited for a while; whoever is under way takes long."""
        self._timer = None
        self._forget_done()
        if self._waiting:
            waited = monotonic() - self._waiting[0].since
            if waited >= self._limits.together_wait_seconds:
                if not self._lingers:
                    self._hand_over()
                elif self._turn.waits and self._passed < self._past_max:
                    self._passed += 1
                    self._hand_over()
                waited = 0.0
        if self._waiting:
            self._look_later(self._limits.together_wait_seconds - waited)

    def _land(self, turn: Turn) -> None:
        self._flying -= 1
        if self._lingers and turn is not self._turn:
            # Others have gone past it.
            self._passed -= 1
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the next of the queue go."""
        group = self._take(self._most) if self._waiting else []
        self._busy = bool(group)
        if group:
            self._flying += 1
            # As the one whose deadline is the latest, not as whoever was served before.
            context = group[0].context.copy()
            turn = self._turn = Turn()
            task = asyncio.get_running_loop().create_task(self._lead(group, turn), context=context)
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    def _forget_done(self) -> None:
        """Whoever was cancelled while it waited, or came too late, was never begun."""
        self._waiting = deque(each for each in self._waiting if not each.done())

    def _take(self, most: int, led_until: float = NEVER) -> list[_AsyncWaiting]:
        self._forget_done()
        group = _take(self._waiting, most, led_until)
        for each in group:
            each.begun = True
        return group

    async def _lead(self, group: list[_AsyncWaiting], turn: Turn) -> None:
        try:
            if self._lingers and len(group) < self._last_size:
                await asyncio.sleep(COMBINE_SECONDS)
                group += self._take(self._most - len(group), group[0].until)
            self._last_size = len(group)
            with turn:
                outcomes = await self._settle([each.work for each in group], turn)
        except BaseException as error:
            # One bad write must not fail its neighbours: each tries by itself,
            # unless the group may have been committed after all.
            alone = len(group) > 1 and (self._reads or surely_not_committed(error))
            for each in group:
                if not each.done():
                    if alone:
                        each.set_result(ALONE)
                    else:
                        each.set_exception(common.outcome_unknown(error))
            if not isinstance(error, Exception):
                raise
        else:
            for each, outcome in zip(group, outcomes, strict=True):
                if not each.done():
                    each.set_result(outcome)
        finally:
            self._land(turn)

    async def _settle(self, works: Sequence[Any], turn: Turn) -> list[Any]:
        """Return the outcome of each work of a group, which is split while its transactions conflict."""
        try:
            with turn.splitting(self._past_max > 0 and len(works) > 1):
                return await self._perform(works)
        except GroupContended:
            outcomes: list[Any] = []
            for half in _halves(works):
                try:
                    # A single write may wait for a lock, and does so in its own caller's task.
                    outcomes += await self._settle(half, turn) if len(half) > 1 else [ALONE]
                except Exception as error:
                    outcomes += _outcomes_of(error, half)
            return outcomes


class _AsyncWaiting(asyncio.Future[Any]):
    """A call in the queue of a loop; the future of how it ends."""

    # No `__init__` of its own, which would take longer than all the rest: `join` sets these.
    __slots__ = ("begun", "context", "since", "until", "work")

    work: Any
    begun: bool
    since: float
    until: float
    context: contextvars.Context

    def expire(self, reads: bool) -> None:
        """Fail this call, because its deadline has passed."""
        if not self.done():
            self.set_exception(_too_late(self.begun, reads))
