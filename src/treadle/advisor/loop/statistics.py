"""Figures from rounds: medians, percentiles, and the interval in which another run is expected.

The interval of a ratio is one of prediction, not of the mean: it says where
the ratio of another run of as many rounds lies, on another server at another
time. Two things are in it: how far rounds are apart, by which the typical
ratio of a run is uncertain, and by how much runs differ beyond that
(`BETWEEN_RUNS`), which no single run can show. Whether something is quicker
at all is judged by the rounds alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from treadle.advisor.loop.results import Measured

# Student's t at 97.5 % by degrees of freedom, from 1 on.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
# Another server, with other contents of its cache and other work beside it, shifts a ratio by as much. Of 24
# ratios that were proven on the demo's shop and the examples' databases, on a very busy machine, 22 moved by
# less than this, and 18 by less than 1.5; scans moved most.
BETWEEN_RUNS = 1.75
# What is typical of a run goes by medians, which vary by this much more than means do.
_MEDIAN = 1.2533
# One run that the machine interrupted counts for at most this many times the usual one.
OUTLIER_FACTOR = 2.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that at least this share does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else 0.0


def predicted(values: Sequence[float]) -> Measured:
    """The geometric mean of positive figures of rounds, and where that of another run is expected."""
    logs = [math.log(max(each, 1e-12)) for each in values]
    mean, number = statistics.fmean(logs), len(logs)
    shown = math.log(BETWEEN_RUNS)
    if number > 1:
        t = _T[min(number - 2, len(_T) - 1)]
        # That of this run and of the other one.
        shown = t * _MEDIAN * statistics.stdev(logs) * math.sqrt(2 / number)
    half = math.hypot(math.log(BETWEEN_RUNS), shown)
    return Measured(math.exp(mean), math.exp(mean - half), math.exp(mean + half), math.exp(mean - shown))


def ranged(rounds: Sequence[float]) -> Measured:
    """The median of figures of rounds, from the lowest to the highest."""
    return Measured(statistics.median(rounds), min(rounds), max(rounds)) if rounds else Measured(0, 0, 0)


def typical(rounds: Sequence[Sequence[float]]) -> float:
    """What a unit takes, over all units: the mean of the median of each over the rounds."""
    return statistics.fmean(statistics.median(times) for times in zip(*rounds, strict=True))


def tamed(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Times by round and unit, each at most a few times what that unit usually takes."""
    usual = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return [
        [min(each, OUTLIER_FACTOR * most) for each, most in zip(times, usual, strict=True)]
        for times in rounds
    ]


def ratio(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Measured:
    """Time before over time after: what is typical, and how far rounds are apart."""
    pairs = zip(tamed(before), tamed(after), strict=True)
    spread = predicted([sum(first) / max(sum(second), 1e-9) for first, second in pairs])
    value = typical(before) / max(typical(after), 1e-9)
    scale = value / spread.value
    return Measured(value, scale * spread.low, scale * spread.high, scale * spread.sure)
