"""Whether a pattern pays: gain times rate, less cost times rate, less what the change itself costs.

All in seconds of work per day of the recorded workload. A pattern that gives
other answers, that makes reads no quicker beyond doubt, or that does not earn
its own cost within a year, is advised against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.advisor.loop.results import Measured, RequestResult, Storage, TrialResult, Verdict
from treadle.advisor.wording import number

DAY_SECONDS = 86_400.0
BREAK_EVEN_DAYS_MAX = 365.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured of one finding."""

    code: str
    place: str
    declaration: str
    requests: Sequence[RequestResult]
    storage: Storage | None
    change_seconds: float
    # Recorded requests that could not be tried, in words.
    untried: Sequence[str] = ()
    # Values on the copy that were wrong when the worker had followed the writes.
    wrong: int = 0


def judge(trial: Trial) -> TrialResult:
    reads = [each for each in trial.requests if each.kind == "read"]
    writes = [each for each in trial.requests if each.kind == "write"]
    gain = sum(map(_saved_per_day, reads))
    cost = -sum(map(_saved_per_day, writes))
    ratio = overall(reads) if reads else None
    net = gain - cost
    days = trial.change_seconds / net if net > 0 else None
    verdict, reason = _verdict(reads, writes, ratio, net, days)
    if trial.wrong and ratio is not None:
        verdict, reason = "do not", f"{trial.wrong:,} values on the copy were wrong after the writes."
    if verdict == "do" and trial.untried:
        reason += f" Not tried: {number(len(trial.untried))} other shapes of requests."
    return TrialResult(
        trial.code, trial.place, trial.declaration, verdict, reason, tuple(trial.requests), ratio,
        trial.storage, gain, cost, trial.change_seconds, net - trial.change_seconds / BREAK_EVEN_DAYS_MAX,
        days if verdict == "do" else None,
    )  # fmt: skip


def _verdict(
    reads: Sequence[RequestResult],
    writes: Sequence[RequestResult],
    ratio: Measured | None,
    net: float,
    days: float | None,
) -> tuple[Verdict, str]:
    if ratio is None:
        return "no evidence", "No recorded request is changed by it."
    compared = sum(each.compared for each in reads)
    different = sum(each.different for each in reads)
    if different:
        return "do not", f"{different:,} of {compared:,} answers differ from those before."
    if ratio.sure <= 1:
        return "do not", f"Requests are not quicker beyond doubt ({times(ratio)})."
    if days is None:
        return "do not", (
            f"Requests are {times(ratio)} as fast, but writes cost more than these save."
            if writes
            else "It saves nothing."
        )
    if days > BREAK_EVEN_DAYS_MAX:
        return "do not", f"It would take {days:,.0f} days to earn what the change costs."
    return "do", f"{compared:,} answers are the same, and requests are {times(ratio)} as fast."


def _saved_per_day(result: RequestResult) -> float:
    """Seconds of work that these requests save per day; negative where they cost more."""
    saved = result.costs_before.mean_ms - result.costs_after.mean_ms
    if result.upkeep_ms is not None:
        # The same write on both copies: that it is quicker on one is chance.
        saved = min(saved, 0.0) - result.upkeep_ms
    return saved / 1000 * result.per_second * DAY_SECONDS


def overall(results: Sequence[RequestResult]) -> Measured:
    """One ratio for requests of several shapes, each as often as it was recorded."""
    before = sum(each.recorded * each.costs_before.mean_ms for each in results)
    after = sum(each.recorded * each.costs_after.mean_ms for each in results)
    if len(results) == 1:
        return results[0].ratio
    value = before / max(after, 1e-9)
    weights = [each.recorded * each.costs_before.mean_ms / max(before, 1e-9) for each in results]
    pairs = list(zip(weights, (each.ratio for each in results), strict=True))
    spread = math.exp(sum(weight * math.log(each.high / each.low) / 2 for weight, each in pairs))
    shown = math.exp(sum(weight * math.log(each.value / each.sure) for weight, each in pairs))
    return Measured(value, value / spread, value * spread, value / shown)


def times(ratio: Measured) -> str:
    """A ratio in words: "3.1 times (2.4 to 4.0)"."""
    return f"{digits(ratio.value)} times ({digits(ratio.low)} to {digits(ratio.high)})"


def digits(value: float) -> str:
    """A ratio with as many digits as it has."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
