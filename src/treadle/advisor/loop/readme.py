"""A plan for people: the README.md of its folder."""

from __future__ import annotations

from treadle.advisor.loop.plan import READS, AdoptionPlan, ByApplication
from treadle.advisor.loop.results import TrialResult
from treadle.advisor.wording import duration

_FOLLOWING = (
    "`treadle apply` leaves every value right. From then on a worker must follow the change stream, "
    "so that writers which do not use Treadle are covered:\n\n"
    "```console\n$ MONGODB_URI=URI treadle watch --app models:store\n```\n\n"
    "While it does not run, values are late, and it catches up when it starts, as long as the server's "
    "history reaches back. Readers find the new fields in the documents, with or without Treadle."
)


def readme(plan: AdoptionPlan) -> str:
    """What the plan does, why, how long it takes, and how to take it back."""
    lines = [
        f"# Plan for {_plain(plan.database)}",
        "",
        f"Made {plan.made} from a trial of {plan.trial.workload.operations:,} recorded requests on a copy of "
        f"{plan.trial.documents:,} documents. `models.py` is what was tried.",
        "",
        "```console",
        "$ treadle apply . URI --dry-run",
        "$ treadle apply . URI",
        "$ treadle prove . URI",
        "$ treadle undo . URI",
        "```",
        "",
        "## What it gains",
        "",
        "| finding | reads | quicker by | saves per day | costs per day | pays back after |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_row, plan.results),
        "",
    ]
    lines += ["## Steps", ""]
    for number, step in enumerate(plan.steps, 1):
        lines += [f"{number}. **{_plain(step.name)}** {_plain(step.what)}"]
        if step.seconds:
            took = duration(max(1.0, step.seconds))
            lines += [f"   - Takes about {took}: {step.documents:,} documents are read and written once."]
        lines += [f"   - To undo: {_plain(step.undo)}"]
    lines += ["", "## Keeping it right", "", _FOLLOWING]
    if plan.left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- `{_plain(each.key)}`: {_plain(each.reason)}" for each in plan.left_out]
    if plan.by_application:
        lines += ["", "## For the application", ""]
        lines += ["`treadle apply` does none of these, because programs must change with them.", ""]
        for found in plan.by_application:
            lines += _for_application(found)
    lines += ["", f"`{READS}` holds recorded reads with their values; share the folder without it.", ""]
    return "\n".join(lines)


def _for_application(found: ByApplication) -> list[str]:
    return [
        f"### `{_plain(found.key)}`",
        "",
        f"Not applied: {_plain(found.why)}",
        "",
        *(f"{number}. {_plain(step)}" for number, step in enumerate(found.steps, 1)),
        "",
        "```python",
        found.declaration,
        "```",
        "",
    ]


def _row(result: TrialResult) -> str:
    ratio = result.ratio
    gain = "no figure" if ratio is None else f"{ratio.value:.1f} ({ratio.low:.1f} to {ratio.high:.1f}) times"
    reads = sum(each.recorded for each in result.requests if each.kind == "read")
    days = result.break_even_days
    back = "at once" if days is not None and days < 1 else "never" if days is None else f"{days:,.0f} days"
    saves, costs = (f"{each:,.1f} s" for each in (result.gain_seconds_per_day, result.cost_seconds_per_day))
    return f"| `{_plain(result.key)}` | {reads:,} | {gain} | {saves} | {costs} | {back} |"


def _plain(text: str) -> str:
    """Names from a database as part of Markdown."""
    return text.replace("|", "\\|").replace("\n", " ")
