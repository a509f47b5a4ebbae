"""What calls promise each other that go to the server in groups, for tasks and for threads.

Covers: store/async_batching, store/waiting, store/call_context, store/shared_commands
Covers: engine/salvage, plan/server_errors
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure, ServerSelectionTimeoutError

from treadle import DataError
from treadle.engine.salvage import Contended
from treadle.plan import Failed
from treadle.plan.server_errors import OUTCOME_UNKNOWN
from treadle.store import call_context
from treadle.store.async_batching import AsyncBatcher, split
from treadle.store.blocking.batching import Batcher
from treadle.store.shared_commands import ALONE

NEVER = call_context.NEVER
# How long a test waits for what must happen.
SECONDS_MAX = 30


class Bench:
    """A batcher whose groups this test performs, for tasks or for threads.

    Items are numbers; the target of 37 is 30. Groups of locked targets conflict.
    """

    def __init__(self, tasks: bool, wait_seconds: float = NEVER, **options: Any) -> None:
        self.groups: list[list[int]] = []
        self.since: list[float] = []
        self.locked: dict[int, asyncio.Event] = {}
        # Whether groups of locked targets conflict, or wait.
        self.conflicts = True
        # Raises, or not, for the items of a group.
        self.check: Callable[[Sequence[int]], None] = lambda items: None
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        options = {"size_max": 100, "wait_seconds": wait_seconds, "targets": target_of, **options}
        self.batcher: Any = (
            AsyncBatcher(self._perform, **options) if tasks else Batcher(self._perform_in_thread, **options)
        )

    def submit(self, item: int, seconds: float | None = None) -> asyncio.Future[Any]:
        """Begin a call, which may have a deadline."""
        if self._tasks:
            return asyncio.create_task(self._call(item, seconds))
        outcome = self._loop.create_future()

        def call() -> None:
            with pymongo.timeout(seconds):
                try:
                    settle = partial(outcome.set_result, self.batcher.submit(item))
                except KeyboardInterrupt:
                    return
                except Exception as error:
                    settle = partial(outcome.set_exception, error)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle)

        threading.Thread(target=call, daemon=True).start()
        return outcome

    async def _call(self, item: int, seconds: float | None) -> Any:
        with pymongo.timeout(seconds):
            return await self.batcher.submit(item)

    @asynccontextmanager
    async def queue(self, *items: int, seconds: float | None = None) -> AsyncGenerator[list[Any]]:
        """Calls that queue behind one that is under way until the block ends."""
        self.lock(0)
        first = self.submit(0)
        await self.until(lambda: [0] in self.groups)
        calls = [self.submit(item, seconds) for item in items]
        await self.until(lambda: len(self.batcher._queue) >= len(items))
        yield calls
        self.unlock(0)
        assert 0 == await first

    def lock(self, target: int) -> None:
        self.locked[target] = asyncio.Event()

    def unlock(self, target: int) -> None:
        self.locked.pop(target).set()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not met():
                await asyncio.sleep(0.001)

    async def _perform(self, items: Sequence[int], attempts_max: int | None) -> list[Any]:
        self.groups.append(list(items))
        self.since.append(call_context.Retries(0)._until)
        for event in [self.locked[each] for (each,) in map(target_of, items) if each in self.locked]:
            if attempts_max is not None and self.conflicts:
                raise Contended
            await event.wait()
        self.check(items)
        return [ALONE if item < 0 and len(items) > 1 else item for item in items]

    def _perform_in_thread(self, items: Sequence[int], attempts_max: int | None) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(self._perform(items, attempts_max), self._loop).result()


def target_of(item: int) -> frozenset[int]:
    return frozenset({item // 10 * 10})


async def results(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(SECONDS_MAX):
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture(params=[True, False], ids=["tasks", "threads"])
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Plays a scenario of a bench."""

    def play(scenario: Callable[[Bench], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            bench = Bench(request.param, **options)
            await asyncio.wait_for(scenario(bench), SECONDS_MAX)
            await bench.until(lambda: not bench.batcher._running and not bench.batcher._passed)
            assert not bench.batcher._queue

        asyncio.run(main())

    return play


# -- groups ----------------------------------------------------------------------------------------


def test_the_first_call_goes_alone_at_once_and_the_queue_goes_next(play):
    async def scenario(bench):
        async with bench.queue(11, 21, 22, 31) as calls:
            pass
        assert [11, 21, 22, 31] == await results(calls)
        assert [[0], [11, 21, 22, 31]] == [bench.groups[0], sorted(bench.groups[1:])[0]]

    play(scenario)


def test_full_groups_do_not_wait_where_several_may_be_under_way(play):
    """But only so many are at a time."""

    async def scenario(bench):
        bench.conflicts = False
        bench.lock(10)
        async with bench.queue() as _:
            full = [bench.submit(item) for item in (11, 12)]
            await bench.until(lambda: 2 == len(bench.groups))
            queued = [bench.submit(item) for item in (21, 22)]
            await bench.until(lambda: 2 == len(bench.batcher._queue))
            assert 2 == len(bench.groups) == len(bench.batcher._running)
            bench.unlock(10)
            assert [11, 12, 21, 22] == await results([*full, *queued])

    play(scenario, size_max=2, groups_max=2, targets=None)


def test_items_that_cannot_go_with_others_go_alone(play):
    async def scenario(bench):
        async with bench.queue(11, -1, 12) as calls:
            pass
        assert [11, -1, 12] == await results(calls)
        assert [-1] == bench.groups[-1]

    play(scenario)


def test_a_failed_outcome_is_the_error_of_its_call(play):
    async def scenario(bench):
        async with bench.queue(11, 12) as calls:
            bench.batcher._perform = failing if bench._tasks else failing_in_thread
        assert ["11", "12"] == sorted(map(str, await results(calls)))

    async def failing(items, attempts_max):
        return failing_in_thread(items, attempts_max)

    def failing_in_thread(items, attempts_max):
        return [Failed(ValueError(item)) for item in items]

    play(scenario)


# -- slow groups and conflicts -----------------------------------------------------------------------


def test_writers_of_other_documents_go_past_a_slow_group_and_those_of_its_own_wait(play):
    async def scenario(bench):
        bench.lock(10)
        stuck = bench.submit(11)
        await bench.until(lambda: [11] in bench.groups)
        same = [bench.submit(item) for item in (12, 13)]
        for item in (21, 31, 41):
            assert item == await bench.submit(item)
        assert [11] == [item for group in bench.groups for item in group if item < 20]
        assert not any(call.done() for call in (stuck, *same))
        bench.unlock(10)
        assert [11, 12, 13] == await results([stuck, *same])
        assert {12, 13} == set(bench.groups[-1])

    play(scenario, wait_seconds=0.01)


def test_no_call_goes_past_another_where_their_order_counts(play):
    async def scenario(bench):
        async with bench.queue(11, 12):
            await asyncio.sleep(0.3)
            assert [[0]] == bench.groups

    play(scenario, wait_seconds=NEVER)


def test_a_group_that_conflicts_is_split_by_target(play):
    """One contended document holds up its own writers alone, which go on as one group."""

    async def scenario(bench):
        bench.lock(10)
        async with bench.queue(11, 21, 12, 31, 41, 51, 13, 61) as calls:
            pass
        await bench.until(lambda: 5 == sum(call.done() for call in calls))
        assert {21, 31, 41, 51, 61} == {call.result() for call in calls if call.done()}
        await bench.until(lambda: 2 == bench.groups.count([11, 12, 13]))
        bench.unlock(10)
        assert [11, 21, 12, 31, 41, 51, 13, 61] == await results(calls)

    play(scenario)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (["x", "x", "y", "x", "z"], ["abd", "c", "e"]),
        # Linked by the second.
        (["x", "xy", "y", "z", "z"], ["abc", "de"]),
        (["xy", "x", "y"], ["abc"]),
        # Unknown ones go apart.
        (["", "", ""], ["a", "b", "c"]),
    ],
)
def test_the_parts_of_a_group_share_no_target(targets, parts):
    assert parts == ["".join(part) for part in split("abcde"[: len(targets)], list(map(frozenset, targets)))]


def test_a_group_is_split_into_a_few_parts_of_one_size():
    parts = split(range(100), [frozenset({number}) for number in range(100)])
    assert [12, 12, 12, 12, 13, 13, 13, 13] == sorted(map(len, parts))


def test_parts_by_sets_share_no_set_of_targets():
    targets = list(map(frozenset, ["xy", "xz", "xy"]))
    assert [["a", "b", "c"]] == split("abc", targets)
    assert [["a", "c"], ["b"]] == split("abc", targets, by_sets=True)


# -- errors --------------------------------------------------------------------------------------------


def test_a_bad_call_fails_alone(play):
    async def scenario(bench):
        def check(items):
            if 35 in items:
                raise DataError("bad", code="document-invalid")

        bench.check = check
        items = [11, 21, 31, 32, 33, 34, 35, 36]
        async with bench.queue(*items) as calls:
            pass
        *_, bad, last = outcomes = await results(calls)
        assert items[:6] == outcomes[:6]
        assert (True, 36) == (isinstance(bad, DataError), last)
        # The first, the group, and halves down to the bad one.
        assert 1 + 1 + 2 + 2 + 2 == len(bench.groups)

    play(scenario)


@pytest.mark.parametrize("way", ["may be committed", "no server"])
def test_what_may_be_committed_or_met_no_server_is_not_tried_again(play, way):
    error = OperationFailure("unknown") if way == "may be committed" else ServerSelectionTimeoutError("none")
    if way == "may be committed":
        error._add_error_label(OUTCOME_UNKNOWN)

    async def scenario(bench):
        def check(items):
            if 11 in items:
                raise error

        bench.check = check
        async with bench.queue(11, 12, 21) as calls:
            pass
        errors = await results(calls)
        assert {type(error)} == set(map(type, errors))
        # Raising one error adds to its traceback and notes, so each call has its own.
        assert 3 == len(set(map(id, errors)))
        assert 2 == len(bench.groups)

    play(scenario)


def test_the_parts_of_a_group_share_the_time_for_retries(play):
    async def scenario(bench):
        bench.lock(10)
        async with bench.queue(11, 21) as calls:
            pass
        await bench.until(lambda: len(bench.groups) > 3)
        bench.unlock(10)
        await results(calls)
        assert 1 == len(set(bench.since[1:]))

    play(scenario)


# -- deadlines and cancellation ------------------------------------------------------------------------


def test_a_deadline_bounds_the_wait_of_its_own_caller_alone(play):
    async def scenario(bench):
        bench.lock(10)
        async with bench.queue(11) as patient:
            hurried = bench.submit(12, 0.05)
            (late,) = await results([hurried])
            assert "deadline-passed" == late.code
            begun = bench.submit(13, 0.3)
            await bench.until(lambda: 2 == len([c for c in bench.batcher._queue if not c.done()]))
        await bench.until(lambda: len(bench.groups) > 2)
        (unknown,) = await results([begun])
        # Its group has the time of the other, which has no deadline.
        assert "write-outcome-unknown" == unknown.code
        bench.unlock(10)
        assert [11] == await results(patient)

    play(scenario)


def test_a_call_that_is_cancelled_leaves_the_others_alone():
    """Queued, under way in a group, or as the first."""

    async def main():
        bench = Bench(tasks=True)
        async with bench.queue(11, 12, 13) as calls:
            calls[1].cancel()
        first, cancelled, third = await results(calls)
        assert (11, asyncio.CancelledError, 13) == (first, type(cancelled), third)
        assert [11, 13] == bench.groups[-1]
        bench.lock(20)
        leader = bench.submit(21)
        await asyncio.sleep(0)
        following = bench.submit(31)
        await asyncio.sleep(0)
        leader.cancel()
        assert 31 == await following
        assert not bench.batcher._running

    asyncio.run(main())


def test_a_thread_that_is_interrupted_hands_its_group_over():
    async def main():
        bench = Bench(tasks=False)
        batcher = bench.batcher
        lead, interrupted = batcher._lead, []

        def interrupt_once(group: Any) -> None:
            if len(group.calls) > 1 and not interrupted:
                interrupted.append(group)
                raise KeyboardInterrupt
            lead(group)

        batcher._lead = interrupt_once
        async with bench.queue(11, 12, 13) as calls:
            pass
        await bench.until(lambda: 2 == sum(call.done() for call in calls))
        assert {11, 12, 13} > {call.result() for call in calls if call.done()}
        assert interrupted
        assert not batcher._running

    asyncio.run(main())


def test_a_forked_child_begins_with_an_empty_queue():
    held = threading.Event()

    def perform(items: Sequence[Any], attempts_max: int | None) -> list[Any]:
        if items[0] == "held":
            held.wait()
        return list(items)

    batcher = Batcher(perform, size_max=10, wait_seconds=NEVER)
    thread = threading.Thread(target=batcher.submit, args=("held",))
    thread.start()
    while not batcher._running:
        pass
    child = os.fork()
    if not child:
        os._exit(0 if batcher.submit("child") == "child" else 1)
    _, status = os.waitpid(child, 0)
    held.set()
    thread.join()
    assert 0 == status
