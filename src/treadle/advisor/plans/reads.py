"""The recorded reads that a plan changes, in a workload file of its own beside it.

`prove` runs them on the real database. They hold values, so that only their
owner may read the file.
"""

from __future__ import annotations

from pathlib import Path

from treadle.advisor.plans.folder import MODE_PRIVATE, READS, ChangePlan
from treadle.advisor.plans.models import load_models
from treadle.advisor.trials.declared import Patterns, patterns_of
from treadle.advisor.trials.units import Group, chosen
from treadle.advisor.trials.workload_file import Workload, end_line, header_line, read
from treadle.errors import UsageError


def write_reads(plan: ChangePlan, workload: Workload, folder: Path) -> int:
    """Copy the reads that the plan changes; how many."""
    groups = chosen(workload, patterns(plan))
    requests = sorted(
        (each for group in groups for unit in group.units for each in unit), key=lambda each: each.at
    )
    path = folder / READS
    path.unlink(missing_ok=True)
    path.touch(mode=MODE_PRIVATE)
    seconds = workload.summary().seconds
    lines = [header_line(workload.database, workload.started, workload.redacted)]
    lines += [each.as_line() for each in requests]
    path.write_text(
        "\n".join([*lines, end_line(seconds=seconds, operations=len(requests))]) + "\n", encoding="utf-8"
    )
    return len(requests)


def patterns(plan: ChangePlan) -> Patterns:
    return patterns_of(load_models(plan.models))


def recorded(plan: ChangePlan, path: Path) -> tuple[list[Group], float]:
    """The reads of a workload that the plan changes, by shape, and the seconds of the recording."""
    workload = read(path)
    if workload.redacted:
        raise UsageError(
            f"{path} holds tokens in the place of values, by which nothing is found on the real database; "
            "record without --redact, and give it as --workload.",
            code="workload-redacted",
        )
    return chosen(workload, patterns(plan)), workload.summary().seconds
