"""Concurrent calls of one process go to the server in groups: commits, and reads and inserts by id.

The first call goes alone, at once. Calls that arrive while it is under way queue, and go next as one
group. Of tasks, a group runs in a task of its own, so that it outlives callers that are cancelled. Of
threads, one of the callers performs it.

- No call waits longer than `together_wait_seconds` behind a slow group: the queue goes past it. Only
  writes of the very documents that a slow group is trying to write wait for it.
- A group whose transaction conflicts is split by target, so that one contended document does not
  starve the writers of others. A group with one target is retried as a whole. For a second after a
  conflict, each contended document has a queue of its own.
- A group that fails is halved until the bad call fails alone. A group that may have been committed, or
  that met no server, is not tried again: each caller gets the error.
- The deadline of a caller bounds its own wait. A group has the latest deadline of its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from pymongo.errors import ConnectionFailure, PyMongoError

from treadle.engine.salvage import Contended
from treadle.plan import Failed
from treadle.plan.server_errors import surely_not_committed
from treadle.store import call_context, common
from treadle.store.call_context import NEVER
from treadle.store.shared_commands import ALONE

if True:  # ASYNC
    from asyncio import Future
else:
    from treadle.store.waiting import Waiting as Future

T = TypeVar("T")
# The documents that a call may conflict about; empty where that is not known.
Targets: TypeAlias = frozenset[Hashable]

# Into how many parts a group is split at a time. More would make a commit of each write where one of many
# is contended, fewer would let most of them conflict again.
PARTS = 8
# Attempts of a group with several targets, after which it is split.
SPREAD_ATTEMPTS_MAX = 2
# Attempts of a group whose calls have some of their targets in common. Its parts would conflict with each
# other, so it is split only where it does not get through as a whole.
SHARED_ATTEMPTS_MAX = 8
# For how long after a conflict of one group the next groups are split at once.
CONTENDED_SECONDS = 1.0
# How long the first thread after a commit of several waits for the others, so that they go together again.
RETURN_SECONDS = 0.0005


class AsyncBatcher:
    """Lets concurrent calls of one kind go to the server in groups."""

    def __init__(
        self,
        perform: Callable[[Sequence[Any], int | None], Awaitable[list[Any]]],
        *,
        size_max: int,
        wait_seconds: float,
        groups_max: int = 1,
        targets: Callable[[Any], Targets] | None = None,
        reads: bool = False,
    ) -> None:
        """Perform groups by `perform(items, attempts_max)`, which returns their outcomes in order.

        An outcome may be `Failed`, or `ALONE` for an item that must be performed as a group of one.
        `perform` raises `Contended` after `attempts_max` attempts; `targets` says which documents an
        item writes. Full groups do not wait for others, up to `groups_max` at a time. An infinite
        `wait_seconds` lets no call go past a group.
        """
        self._perform = perform
        self._targets = targets
        self._size_max = size_max
        self._wait_seconds = wait_seconds
        self._groups_max = groups_max
        self._reads = reads
        if True:  # ASYNC
            # The calls that follow those of a group queue before that group ends.
            self._gathers = False
        else:
            self._gathers = groups_max == 1
        self.reset()
        _BATCHERS.add(self)

    def reset(self) -> None:
        """Forget all calls: the child of a fork has none of the threads that wait for them."""
        if True:  # ASYNC
            # Tasks change over where one awaits, and none awaits with the lock.
            self._lock = contextlib.nullcontext()
        else:
            self._lock = threading.Lock()
        self._queue: deque[_Call] = deque()
        # The groups that the queue waits for, and those that it has gone past.
        self._running: set[_Group] = set()
        self._passed: set[_Group] = set()
        # Until then, groups are split before their transactions conflict.
        self._contended_until = 0.0
        # Of the last group.
        self._size = 1
        if True:  # ASYNC
            self._timer: asyncio.TimerHandle | None = None

    def submit(self, item: Any) -> Awaitable[Any]:
        """Return the result of a call, to be awaited at once.

        Not a coroutine: of the calls that queue there may be many, and each awaits one future.
        """
        with self._lock:
            if self._running or (self._passed and self._is_held(item)):
                call = self._enqueue(item)
                full = len(self._queue) >= self._size_max and len(self._running) < self._groups_max
                group = self._take() if full else None
            elif self._gathers and self._size > 1:
                call, group = self._enqueue(item), self._take()
            else:
                call, group = None, _Group(item)
                self._counted().add(group)
        if call is None:
            assert group is not None
            return self._go_first(group)
        if group is not None:
            self._spawn(group)
        return self._wait(call)

    async def _go_first(self, group: _Group) -> Any:
        try:
            (outcome,) = await self._perform(group.items, None)
        finally:
            self._finish(group)
        if type(outcome) is Failed:
            raise outcome.error
        return outcome

    # -- the queue -----------------------------------------------------------------------

    def _enqueue(self, item: Any) -> _Call:
        if True:  # ASYNC
            call = _Call(loop=asyncio.get_running_loop())
            if self._timer is None and self._wait_seconds < NEVER:
                self._timer = call.get_loop().call_later(self._wait_seconds, self._look)
        else:
            call = _Call()
        call.item, call.since, call.until, call.group = item, monotonic(), call_context.moment(), None
        self._queue.append(call)
        return call

    if True:  # ASYNC

        def _wait(self, call: _Call) -> Awaitable[Any]:
            return call if call.until == NEVER else self._wait_until(call)

        async def _wait_until(self, call: _Call) -> Any:
            seconds = max(0.0, call.until - monotonic())
            timer = call.get_loop().call_later(seconds, self._expire, call)
            try:
                return await call
            finally:
                timer.cancel()

        def _expire(self, call: _Call) -> None:
            error = None if call.done() else self._too_late(call)
            if error is not None:
                call.set_exception(error)

    else:

        def _wait(self, call: _Call) -> Any:
            group: _Group | None = None
            try:
                while not call.done():
                    group = call.wait(min(call.until - monotonic(), self._wait_seconds))
                    if group is not None:
                        self._lead(group)
                    elif not call.done():
                        self._look()
                        self._expire(call)
            except BaseException:
                # Interrupted, or too late: another caller performs what this one was to perform.
                call.cancel()
                for each in (group, call.leads):
                    if each is not None:
                        self._spawn(each)
                raise
            return call.result()

        def _expire(self, call: _Call) -> None:
            if call.until > monotonic():
                return
            with self._lock:
                error = None if call.done() else self._too_late(call)
                call.until = NEVER
            if error is not None:
                raise error

    def _too_late(self, call: _Call) -> call_context.TimedOut | None:
        """Return the error of a call whose deadline has passed.

        None where it is under way by itself: then it has that deadline too, and its outcome will be known.
        """
        if self._reads:
            return call_context.passed("reading together with others")
        if call.group is None:
            return call_context.passed("queued behind other writes")
        return None if call.group.is_alone else call_context.unknown()

    def _look(self) -> None:
        """Let the queue go past the groups under way, if a call has waited for long enough."""
        with self._lock:
            group = None
            since = monotonic() - self._wait_seconds
            if any(call.since <= since and not self._is_unable(call) for call in self._queue):
                self._passed |= self._running
                self._running.clear()
                group = self._take()
            if True:  # ASYNC
                self._timer = None
                if self._queue:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(self._wait_seconds, self._look)
        if group is not None:
            self._spawn(group)

    def _is_unable(self, call: _Call) -> bool:
        return call.done() or (bool(self._passed) and self._is_held(call.item))

    def _is_held(self, item: Any) -> bool:
        """Whether a group that the queue went past is trying to write the same documents."""
        if self._targets is None:
            return False
        targets = self._targets(item)
        return bool(targets) and any(self._common_targets(group) == targets for group in self._passed)

    def _common_targets(self, group: _Group) -> Targets:
        assert self._targets is not None
        if group.common is None:
            first, *others = {self._targets(item) for item in group.items}
            group.common = frozenset() if others else first
        return group.common

    def _take(self) -> _Group | None:
        """Begin the next group of the queue; the lock is held."""
        calls = self._dequeue(self._size_max)
        return self._begin(calls, self._counted()) if calls else None

    def _counted(self) -> set[_Group]:
        """Return where a group that begins now is counted.

        While there are conflicts, no call waits for those of other documents.
        """
        return self._passed if monotonic() < self._contended_until else self._running

    def _dequeue(self, count: int) -> list[_Call]:
        calls: list[_Call] = []
        held: list[_Call] = []
        while self._queue and len(calls) < count:
            call = self._queue.popleft()
            if not call.done():
                (held if self._passed and self._is_held(call.item) else calls).append(call)
        self._queue.extendleft(reversed(held))
        return calls

    def _begin(self, calls: Sequence[_Call], groups: set[_Group]) -> _Group:
        group = _Group()
        group.add(calls)
        groups.add(group)
        return group

    # -- groups --------------------------------------------------------------------------

    def _spawn(self, group: _Group) -> None:
        if True:  # ASYNC
            # In an empty context: a group belongs to none of its callers' transactions.
            lead = self._lead(group)
            group.task = asyncio.get_running_loop().create_task(lead, context=contextvars.Context())
        else:
            # Led by a caller whose deadline is the latest: so is the group's.
            calls = [call for call in group.calls if not call.done()]
            if calls:
                max(calls, key=_end_of).lead(group)
            else:
                self._finish(group)

    if False:  # BLOCKING

        def _gather(self, group: _Group) -> None:
            """Add to a group the calls of threads that come back from the last one.

            Not to one with a deadline, which would bound the others.
            """
            if self._gathers and not group.is_part and len(group.calls) < self._size and group.until == NEVER:
                time.sleep(RETURN_SECONDS)
                with self._lock:
                    group.add(self._dequeue(self._size_max - len(group.calls)))
            self._size = len(group.calls)

    async def _lead(self, group: _Group) -> None:
        """Perform a group, and give each of its calls its outcome."""
        if False:  # BLOCKING
            self._gather(group)
        try:
            if monotonic() < self._contended_until and not group.is_alone and not group.is_part:
                self._divide(group)
            else:
                with call_context.instead_until(group.until), call_context.retrying_since(group.since):
                    attempts_max = None if group.is_alone else group.attempts_max
                    outcomes = await self._perform(group.items, attempts_max)
                self._settle(group, outcomes)
        except Contended:
            self._contended_until = monotonic() + CONTENDED_SECONDS
            self._divide(group)
        except BaseException as error:
            self._settle_failure(group, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if True:  # ASYNC
                # After its callers have gone on: their next calls go together, too.
                asyncio.get_running_loop().call_soon(self._finish, group)
            else:
                self._finish(group)

    def _settle(self, group: _Group, outcomes: Sequence[Any]) -> None:
        for call, outcome in zip(group.calls, outcomes, strict=True):
            if outcome is ALONE:
                self._replace(group, [[call]])
            elif type(outcome) is Failed:
                _fail(call, outcome.error)
            elif not call.done():
                call.set_result(outcome)

    def _settle_failure(self, group: _Group, error: BaseException) -> None:
        """Give an error to the calls of a group, or find the one that caused it."""
        if group.is_alone and isinstance(error, Exception):
            _fail(group.calls[0], error)
        elif not group.is_alone and self._targets is not None and _is_one_calls_fault(error):
            middle = len(group.calls) // 2
            self._replace(group, [group.calls[:middle], group.calls[middle:]])
        else:
            for call in group.calls:
                _fail(call, common.outcome_unknown(error))

    def _divide(self, group: _Group) -> None:
        """Go on with a group whose transaction conflicted, or would, in parts if it has several targets."""
        assert self._targets is not None
        targets = list(map(self._targets, group.items))
        parts = split(group.calls, targets, by_sets=group.attempts_max == SHARED_ATTEMPTS_MAX)
        if len(parts) == 1:
            group.attempts_max = None if len(set(targets)) == 1 else SHARED_ATTEMPTS_MAX
        self._replace(group, parts)

    def _replace(self, group: _Group, parts: Sequence[Sequence[_Call]]) -> None:
        """Perform calls of a group as groups of their own, for which the queue does not wait."""
        with self._lock:
            groups = [self._begin(calls, self._passed) for calls in parts]
        for each in groups:
            each.is_part, each.since, each.attempts_max = True, group.since, group.attempts_max
            self._spawn(each)

    def _finish(self, group: _Group) -> None:
        """Let the next group go."""
        with self._lock:
            self._running.discard(group)
            self._passed.discard(group)
            following = self._take() if len(self._running) < self._groups_max else None
        if following is not None:
            self._spawn(following)


class _Group:
    """Calls that are performed together."""

    __slots__ = ("attempts_max", "calls", "common", "is_part", "items", "since", "task")

    def __init__(self, *items: Any) -> None:
        self.items: list[Any] = list(items)
        # None of the call that goes first, which is performed by its caller.
        self.calls: list[_Call] = []
        # Of a group that was split, and since when its calls have been tried.
        self.is_part = False
        self.since = monotonic()
        self.attempts_max: int | None = SPREAD_ATTEMPTS_MAX
        # The targets of each of its calls, if these are the same; determined when it is asked for.
        self.common: Targets | None = None
        # Held here, because the event loop does not.
        self.task: Any = None

    @property
    def until(self) -> float:
        """The latest deadline of its calls."""
        return max(call.until for call in self.calls)

    @property
    def is_alone(self) -> bool:
        return len(self.calls) == 1

    def add(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            call.group = self
        self.calls += calls
        self.items += [call.item for call in calls]


class _Call(Future[Any]):
    """A call in the queue, and the future of its outcome."""

    # No `__init__` of its own, which would take longer than all the rest: `_enqueue` sets these.
    __slots__ = ("group", "item", "since", "until")

    item: Any
    since: float
    until: float
    # The group that it is performed in.
    group: _Group | None


def split(items: Sequence[T], targets: Sequence[Targets], *, by_sets: bool = False) -> list[list[T]]:
    """Return the items in parts of about one size that have no target in common.

    Returns one part where there are no such; with `by_sets`, only where all have the same targets.
    """
    groups: list[tuple[Targets, list[T]]] = []
    for item, own in zip(items, targets, strict=True):
        common, members, others = own, [item], list[tuple[Targets, list[T]]]()
        for group in groups:
            if own and (group[0] == own if by_sets else group[0] & own):
                common, members = group[0] | common, [*group[1], *members]
            else:
                others.append(group)
        groups = [*others, (common, members)]
    parts = [list[T]() for _ in groups[:PARTS]]
    for _, members in sorted(groups, key=lambda group: -len(group[1])):
        min(parts, key=len).extend(members)
    return parts


def _end_of(call: _Call) -> float:
    return call.until


def _fail(call: _Call, error: Exception) -> None:
    if not call.done():
        call.set_exception(error)


def _is_one_calls_fault(error: BaseException) -> bool:
    """Whether a group that failed wrote nothing, and some of its calls may fare better without the others."""
    server = isinstance(error, ConnectionFailure) or (isinstance(error, PyMongoError) and error.timeout)
    return surely_not_committed(error) and not server


_BATCHERS: weakref.WeakSet[AsyncBatcher] = weakref.WeakSet()


def _after_fork() -> None:
    for batcher in list(_BATCHERS):
        batcher.reset()


os.register_at_fork(after_in_child=_after_fork)
