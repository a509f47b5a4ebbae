"""The recorded reads that a plan changes, in a workload file of its own beside it.

`prove` runs them on the real database. They hold values, so that only their
owner may read the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from treadle.advisor.plans.folder import MODE_PRIVATE, READS, ChangePlan
from treadle.advisor.plans.models import load_models
from treadle.advisor.trials.declared import Patterns, patterns_of
from treadle.advisor.trials.rewrite import Rewritten, unchanged
from treadle.advisor.trials.units import Group, Unit, chosen, grouped
from treadle.advisor.trials.workload_file import Request, Workload, end_line, header_line, read
from treadle.errors import UsageError

# The way that a read took before there was an index for it.
_NATURAL = [("$natural", 1)]


def write_reads(plan: ChangePlan, workload: Workload, folder: Path) -> int:
    """Copy the reads that the plan changes; how many."""
    groups = [*chosen(workload, patterns(plan)), *_scanning(plan, workload)]
    requests = [each for group in groups for unit in group.units for each in unit]
    requests.sort(key=lambda each: each.at)
    path = folder / READS
    path.unlink(missing_ok=True)
    path.touch(mode=MODE_PRIVATE)
    lines = [header_line(workload.database, workload.started, workload.redacted)]
    lines += [each.as_line() for each in requests]
    lines.append(end_line(seconds=workload.summary().seconds, operations=len(requests)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(requests)


def patterns(plan: ChangePlan) -> Patterns:
    return patterns_of(load_models(plan.models))


def recorded(plan: ChangePlan, path: Path) -> tuple[list[Group], list[Group], float]:
    """The reads that the plan's fields answer, those that its indexes do, and the recording's seconds."""
    workload = read(path)
    if workload.redacted:
        raise UsageError(
            f"{path} holds tokens in the place of values, by which nothing is found on the real database; "
            "record without --redact, and give it as --workload.",
            code="workload-redacted",
        )
    by_index = _scanning(plan, workload)
    for group in by_index:
        group.units = [_without_index(unit) for unit in group.units]
    return chosen(workload, patterns(plan)), by_index, workload.summary().seconds


def _scanning(plan: ChangePlan, requests: Iterable[Request]) -> list[Group]:
    """The reads that scanned a collection for which the plan makes an index."""
    places = [key.partition("@")[2] for key in plan.findings if key.startswith("query-without-index@")]

    def wanted(unit: Unit) -> bool:
        request = unit[0]
        about = any(place.startswith(f"{request.collection}.") for place in places)
        return about and request.operation in ("find", "aggregate") and request.plan == "COLLSCAN"

    return grouped(requests, Patterns({}), wanted)


def _without_index(unit: Unit) -> Unit:
    return tuple(replace(each, body={**each.body, "hint": _NATURAL}) for each in unit)


def by_index(unit: Unit) -> Rewritten | None:
    """The same reads, for which the server may use any index."""
    bodies = [{name: value for name, value in each.body.items() if name != "hint"} for each in unit]
    return unchanged([replace(each, body=body) for each, body in zip(unit, bodies, strict=True)])
