"""From the copy to the whole database: a request that examines more documents there takes longer.

A copy holds whole families, so that most requests do on it what they do on
the database. Those that go through a collection do not: the recording says
how many documents they examined there, and the copy how many here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from treadle.advisor.trials.results import Measured
from treadle.advisor.wording import number

# Below this, the difference is one of the moment.
FACTOR_MIN = 1.2
# How many times as much as its collection a request may grow, as where one family is much larger.
SKEW_MAX = 3.0
# A way that examines fewer documents than this part of the other does not go through the collection.
THROUGH = 0.5
# How much of what is reckoned is uncertain: at ten times the documents, 1.4 times in each direction.
UNCERTAIN = 0.15


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times as many documents each way examines on the whole database."""

    before: float = 1.0
    after: float = 1.0

    @property
    def note(self) -> str:
        if self.before == 1.0:
            return ""
        return (
            f"The recorded requests examined {number(round(self.before, 1))} times as many documents as on "
            "the copy; times are reckoned for that."
        )

    def widened(self, ratio: Measured) -> Measured:
        """The interval, wider by what is uncertain about reckoning."""
        spread = max(self.before, self.after) ** UNCERTAIN
        sure = None if ratio.measured_low is None else ratio.measured_low / spread
        return Measured(ratio.value, ratio.low / spread, ratio.high * spread, sure)


def growth(recorded: float, before: float, after: float, largest: float = inf) -> Growth:
    """From documents examined: as recorded, and on the copy in both ways.

    Where that is far more than the `largest` ratio of a collection to its copy,
    the request took another way when it was recorded: there is an index since.
    """
    if before <= 0 or recorded < FACTOR_MIN * before or recorded > SKEW_MAX * largest * before:
        return Growth()
    factor = recorded / before
    return Growth(factor, factor if after >= THROUGH * before else 1.0)


def grown(times: Sequence[Sequence[float]], factor: float, fixed: float) -> list[list[float]]:
    """Seconds by round and unit with so many times the work; `fixed` is what a unit takes without any."""
    return [[each + max(0.0, each - fixed) * (factor - 1) for each in unit_times] for unit_times in times]
