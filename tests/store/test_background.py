"""What runs beside the work of the asyncio shell ends with it."""

from __future__ import annotations

import asyncio

import pytest

from treadle.store.background import repeating_async

PATIENCE_SECONDS = 30


def test_a_call_that_swallows_its_cancellation_is_the_last() -> None:
    """As `asyncio.wait_for` of Python 3.11 does, when what it waits for is just done."""

    async def scenario() -> None:
        begun = asyncio.Event()

        async def call() -> None:
            begun.set()
            calls.append(True)
            try:
                await asyncio.sleep(0.001 if ended else PATIENCE_SECONDS)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed.append(True)

        with pytest.raises(ZeroDivisionError):
            async with repeating_async(0.001, call):
                await begun.wait()
                ended.append(True)
                raise ZeroDivisionError

    calls: list[bool] = []
    ended: list[bool] = []
    swallowed: list[bool] = []
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))
    assert [True] == calls
