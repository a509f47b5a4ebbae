"""What runs beside the work of the asyncio shell ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from treadle.store.background import alongside_async, repeating_async

PATIENCE_SECONDS = 30


@pytest.mark.parametrize(
    "beside", [alongside_async, partial(repeating_async, 0.001)], ids=["again", "repeat"]
)
def test_a_call_that_swallows_its_cancellation_is_the_last(
    beside: Callable[[Any], AbstractAsyncContextManager[None]],
) -> None:
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
            async with beside(call):
                await begun.wait()
                ended.append(True)
                raise ZeroDivisionError

    calls: list[bool] = []
    ended: list[bool] = []
    swallowed: list[bool] = []
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))
    assert [True] == calls
