"""What setup records, while several processes set up.

Covers: upkeep/setup_record
"""

from __future__ import annotations

from typing import Any

import pytest

from treadle.upkeep.setup_record import FORMAT, VERSION, is_known_format

ROWS: list[dict[str, Any]] = [{"_id": FORMAT, "version": VERSION}, {"_id": "collection users"}]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["before", "between", "after"])
def test_a_setup_that_begins_at_the_same_time_has_a_known_format(at):
    """Its rows appear between any two reads of this one."""
    plan, answer = is_known_format(), None
    for turn in range(3):
        rows = ROWS if turn >= at else []
        try:
            condition = plan.send(answer).arguments[0]
        except StopIteration as stop:
            assert stop.value is True
            return
        is_format = condition.get("_id") == FORMAT
        answer = next((row for row in rows if (row["_id"] == FORMAT) is is_format), None)
    raise AssertionError("more reads than expected")
