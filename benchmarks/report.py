"""Results as Markdown and JSON, with the machine and the versions that gave them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from benchmarks.harness import Result, Spread

PACKAGES = ("pymongo", "pydantic", "pydantic-core", "beanie", "odmantic", "mongoengine")
COLUMNS = (
    "contender", "median", "quartiles", "ratio", "ratio per round", "to", "rounds × operations", "goal",
    "met",
)  # fmt: skip


def surroundings(uri: str, *, quick: bool) -> dict[str, str]:
    """Where and with what the results were measured."""
    with MongoClient[Any](uri) as client:
        mongod = str(client.server_info()["version"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "mode": "quick" if quick else "full",
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "platform": platform.platform(),
        "python": platform.python_version(),
        "mongod": mongod,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def markdown(results: Sequence[Result], found: dict[str, str]) -> str:
    """The whole report."""
    lines = [
        "# Benchmark results",
        "",
        "Written by `python -m benchmarks`; do not edit.",
        "",
        "Contenders take turns in one process, in a new order each round. Times are per operation, and",
        "those of one machine at one moment: judge the ratios. *Ratio* is that of the medians to the",
        "contender named under *to*; *ratio per round* gives the quartiles of the ratios within a round.",
        "",
        *_table(("", ""), [[name, value] for name, value in found.items()]),
    ]
    for (group, work), rows in groupby(results, key=lambda result: (result.group, result.work)):
        lines += ["", f"## {group}: {work}", "", *_table(COLUMNS, [_row(result) for result in rows])]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _row(result: Result) -> list[str]:
    times, ratios = result.microseconds, result.round_ratios
    met = {True: "yes", False: "**no**", None: ""}[result.met]
    return [
        result.contender,
        _microseconds(times.median),
        f"{_microseconds(times.low)} – {_microseconds(times.high)}",
        "" if result.ratio is None else f"{result.ratio:.2f}",
        "" if ratios is None else _ratios(ratios),
        result.baseline or "",
        f"{result.rounds} × {result.operations:,}",
        "" if result.goal is None else str(result.goal),
        met,
    ]


def _microseconds(value: float) -> str:
    return f"{value:.1f} µs" if value < 100 else f"{value:.0f} µs"


def _ratios(ratios: Spread) -> str:
    return f"{ratios.low:.2f} – {ratios.high:.2f}"


def write(path: Path, results: Sequence[Result], found: dict[str, str]) -> None:
    """The report at `path`, and the numbers beside it as JSON."""
    path.write_text(markdown(results, found), encoding="utf-8")
    data = {"surroundings": found, "results": [{**asdict(result), "met": result.met} for result in results]}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
