"""Increments that a counter collects: one by one, against sums that are written now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from treadle.advisor.trials.declared import Counter
from treadle.advisor.trials.workload_file import Request


def counter_of(request: Request, counters: Sequence[Counter]) -> tuple[Counter, Any, Any] | None:
    """The counter that an update raises, the key, and by how much; None where it does anything else."""
    update, condition = request.body.get("u"), request.body.get("q")
    if request.operation != "update" or not isinstance(update, Mapping) or not isinstance(condition, Mapping):
        return None
    amounts = update.get("$inc")
    stamps = update.get("$set", {})
    others = set(update) - {"$inc", "$set", "$currentDate"}
    if others or not isinstance(amounts, Mapping) or len(amounts) != 1:
        return None
    if not all(isinstance(each, datetime) for each in stamps.values()):
        return None
    ((path, amount),) = amounts.items()
    for counter in counters:
        if (
            counter.collection == request.collection
            and counter.place == path
            and set(condition) == {counter.by}
        ):
            key = condition[counter.by]
            return None if isinstance(key, Mapping) else (counter, key, amount)
    return None
