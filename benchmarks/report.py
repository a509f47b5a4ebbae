"""The stored results as Markdown, with a plot per family beside it; nothing in them by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks import plot
from benchmarks.harness import Result, Spread, time_text
from benchmarks.stored import LONG, Entry, Stored, load

PLOTS = "plots"
# The results before the redesign, which no run writes.
BASELINE = "BASELINE.json"
# What `make torture` came to, which takes longer than all families together.
TORTURE = "TORTURE.md"
COLUMNS = (
    "contender",
    "median",
    "quartiles",
    "ratio",
    "ratio per round",
    "before",
    "to",
    "rounds × operations",
    "goal",
    "",
)
INTRODUCTION = """\
# Benchmark results

Written by `make bench` (`python -m benchmarks`); do not edit. `python -m benchmarks buckets trees`
measures these families again and keeps the others.

Contenders of a table take turns in one process, in a new order each round. Times are per operation, and
those of one machine at one moment: judge the ratios. *Median* and *quartiles* are over the rounds. *Ratio*
is that of the medians to the contender named under *to*; *ratio per round* gives the quartiles of the
ratios within a round. *Before* is the ratio, or without one the median, in `BASELINE.json`: the state
before the redesign."""

# Family, work and contender.
Key = tuple[str, str, str]
Baseline = dict[Key, Result]


def write(path: Path, stored: Stored) -> None:
    """The report at `path`, and its plots in a folder beside it."""
    folder = path.parent / PLOTS
    folder.mkdir(exist_ok=True)
    plots = {}
    for name, entries in families(stored):
        drawn = plot.svg(name, entries)
        if drawn is not None:
            plots[name] = f"{PLOTS}/{name}.svg"
            (path.parent / plots[name]).write_text(drawn, encoding="utf-8")
    for old in folder.glob("*.svg"):
        if old.stem not in plots:
            old.unlink()
    torture = path.parent / TORTURE
    lines = [torture.read_text(encoding="utf-8")] if torture.exists() else []
    before = baseline(load(path.parent / BASELINE))
    path.write_text("\n".join([markdown(stored, plots, before), *lines]), encoding="utf-8")


def baseline(stored: Stored) -> Baseline:
    """The results of an earlier state, by family, work and contender."""
    return {_key(result): result for entry in stored.entries for result in entry.results}


def _key(result: Result) -> Key:
    return (result.group, result.work, result.contender)


def families(stored: Stored) -> Iterable[tuple[str, list[Entry]]]:
    """The entries of each group, in order."""
    for name, entries in groupby(stored.entries, key=lambda entry: entry.group):
        yield name, list(entries)


def markdown(stored: Stored, plots: dict[str, str], before: Baseline) -> str:
    """The whole report; `plots` says which family has which picture."""
    lines = [INTRODUCTION, "", *_failures(stored), *_goals(stored), *_machines(stored), *_durations(stored)]
    for name, entries in families(stored):
        lines += ["", f"## {name}"]
        if name in plots:
            lines += ["", f"![{name}: medians and quartiles]({plots[name]})"]
        for entry in entries:
            lines += ["", f"### {entry.work}", "", *_body(entry, before)]
    return "\n".join(lines) + "\n"


def _body(entry: Entry, before: Baseline) -> list[str]:
    if entry.failure is not None:
        return [f"**Failed**: {entry.failure}"]
    lines = [line for group in _blocks(entry.lines) for line in ("", *group)][1:]
    if entry.results:
        lines += ["", *_table(COLUMNS, [_row(result, before.get(_key(result))) for result in entry.results])]
    return lines if entry.lines else lines[1:]


def _blocks(lines: Iterable[str]) -> Iterable[list[str]]:
    """The lines of a script: Markdown tables as they are, everything else as text."""
    for is_table, block in groupby(lines, key=lambda line: line.startswith("|")):
        kept = list(block)
        yield kept if is_table else ["```text", *kept, "```"]


# -- what comes first ----------------------------------------------------------


def _failures(stored: Stored) -> list[str]:
    failed = [entry for entry in stored.entries if entry.failure is not None]
    if not failed:
        return []
    named = [f"- **{entry.group}: {entry.work}** failed: {entry.failure}" for entry in failed]
    return ["## Failed", "", *named, ""]


def _goals(stored: Stored) -> list[str]:
    results = [result for entry in stored.entries for result in entry.results if result.goal is not None]
    missed = [result for result in results if not result.met]
    lines = ["## Goals", "", f"{len(results) - len(missed)} of {len(results)} goals are met."]
    if missed:
        lines += [f"Missed are these {len(missed)}:" if len(missed) > 1 else "Missed is this one:", ""]
        columns = ("family", "work", "contender", "measured", "goal", "limit")
        beside = {id(each): entry.results for entry in stored.entries for each in entry.results}
        lines += _table(columns, [[*_goal(each), _limit(each, beside[id(each)])] for each in missed])
    met = [result for result in results if result.met]
    if met:
        lines += ["", "Met:", ""]
        lines += _table(("family", "work", "contender", "measured", "goal"), [_goal(each) for each in met])
    return [*lines, ""]


def _goal(result: Result) -> list[str]:
    assert result.goal is not None
    if result.goal.kind == "ratio":
        measured = f"{_ratio(result.ratio)} times {result.baseline}"
        if result.round_ratios is not None:
            measured += f" ({_ratios(result.round_ratios)})"
    else:
        measured = _amount(result.microseconds.median, result)
    return [result.group, result.work, result.contender, measured, str(result.goal)]


def _limit(result: Result, beside: Sequence[Result]) -> str:
    """What bounds a contender, with the figure of the one beside it that shows it."""
    assert result.goal is not None
    medians = {each.contender: each.microseconds.median for each in beside}
    bound = medians.get(result.goal.limit)
    if bound is None:
        return result.goal.limit
    ratio = result.goal.kind == "ratio" and result.baseline is not None
    figure = _ratio(bound / medians[result.baseline or ""]) if ratio else _amount(bound, result)
    return f"{figure}: {result.goal.limit}"


def _machines(stored: Stored) -> list[str]:
    """The machine and the versions; one column per combination, should the entries differ."""
    found: dict[str, dict[str, str]] = {}
    where: dict[str, list[Entry]] = {}
    for entry in stored.entries:
        key = repr(sorted(entry.surroundings.items()))
        found[key] = entry.surroundings
        where.setdefault(key, []).append(entry)
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    rows = [[name, *(each.get(name, "") for each in found.values())] for name in names]
    dates = [sorted(entry.date for entry in entries) for entries in where.values()]
    rows.append(["measured", *(f"{each[0]} to {each[-1]} UTC" for each in dates)])
    if len(found) > 1:
        groups = [", ".join(dict.fromkeys(entry.group for entry in entries)) for entries in where.values()]
        rows.append(["families", *groups])
    return ["## Machine and versions", "", *_table(["", *[""] * len(found)], rows)]


def _durations(stored: Stored) -> list[str]:
    """What each family took, with everything that it had to store first."""
    rows = [
        [name, str(len(entries)), f"{sum(entry.seconds for entry in entries):,.0f} s", entries[-1].date]
        for name, entries in families(stored)
    ]
    total = sum(entry.seconds for entry in stored.entries)
    rows.append(["together", str(len(stored.entries)), f"{total:,.0f} s", ""])
    apart = sum(entry.seconds for entry in stored.entries if entry.group == LONG)
    whole = f"All works, as they are stored here, took {(total - apart) / 60:.1f} minutes."
    if apart:
        whole += f" `{LONG}`, which is measured only where it is named, took {apart / 60:.1f} more."
    return ["", "## Time taken", "", whole, "", *_table(("family", "works", "took", "measured (UTC)"), rows)]


# -- tables ----------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]


def _row(result: Result, before: Result | None) -> list[str]:
    amounts, ratios = result.microseconds, result.round_ratios
    return [
        result.contender,
        _amount(amounts.median, result),
        f"{_amount(amounts.low, result)} – {_amount(amounts.high, result)}" if result.rounds > 1 else "",
        "" if result.ratio is None else _ratio(result.ratio),
        "" if ratios is None or result.rounds == 1 else _ratios(ratios),
        _before(before),
        result.baseline or "",
        f"{result.rounds} × {result.operations:,}",
        "" if result.goal is None else str(result.goal),
        {True: "met", False: "**missed**", None: ""}[result.met],
    ]


def _before(result: Result | None) -> str:
    """The ratio of an earlier state, or its median where it has no ratio."""
    if result is None:
        return ""
    return _amount(result.microseconds.median, result) if result.ratio is None else _ratio(result.ratio)


def _amount(value: float, result: Result) -> str:
    return f"{value:,.3g} {result.unit}" if result.unit else time_text(value)


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _ratios(ratios: Spread) -> str:
    return f"{_ratio(ratios.low)} – {_ratio(ratios.high)}"
