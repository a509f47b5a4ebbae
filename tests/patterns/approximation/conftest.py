"""Counters end with their test; fields with counters, one by one."""

from __future__ import annotations

import pytest

from tests.patterns.approximation.products import KINDS
from treadle.store import counter_exit


@pytest.fixture(autouse=True)
def no_counter_outlives_its_test():
    """What a test leaves pending is not flushed at the end of the whole run, to a server that is gone."""
    yield
    counter_exit._LIVE.clear()


@pytest.fixture(params=KINDS)
def field(request):
    return request.param
