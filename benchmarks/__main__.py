"""Run the benchmarks; keep what they gave, and write the report and the plots from it.

Examples:
  python -m benchmarks                     everything, into benchmarks/RESULTS.md
  python -m benchmarks buckets trees       these families again; the others are kept
  python -m benchmarks long                what takes half an hour by itself, and is otherwise left out
  python -m benchmarks --quick             does it run?
  python -m benchmarks --report            only write the report again
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import pkgutil
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

import benchmarks
from benchmarks import report, stored
from benchmarks.harness import Context, Group, Result, measure, single
from benchmarks.machine import surroundings
from benchmarks.stored import LONG, Entry, Stored

RESULTS = Path(__file__).with_name("RESULTS.md")
# A work that takes so long hangs; the others shall have their turn.
WORK_SECONDS_MAX = 600
FAILURE_LENGTH_MAX = 200
# How a line of a script begins that holds a figure with a goal.
GOAL = '{"goal":'


@dataclass(frozen=True, slots=True)
class Script:
    """A module that measures by itself and prints lines, which are reported as they are; Markdown tables too."""

    name: str
    work: str
    module: str
    quick: tuple[str, ...]
    arguments: tuple[str, ...] = ()


LONG_SECONDS_MAX = 2_400
LOOP_QUICK = ("--scale", "0.5", "--seconds", "2", "--finding", "computed")
SCRIPTS = [
    Script(
        "contention",
        "many writers of few documents: calls completed, p95 and the longest call",
        "benchmarks.contention",
        ("--seconds", "0.5", "--rounds", "1"),
    ),
    Script(
        "million",
        "migrate 100,000 documents, killed ten times on the way",
        "benchmarks.million",
        ("--count", "12000"),
    ),
    Script(
        "loop",
        "what trials said beside what was proven, on two of the examples' databases",
        "benchmarks.loop",
        ("--only", "catalogue", "--scale", "0.3", "--seconds", "1"),
    ),
    Script(
        "loop",
        "all verbs on a shop of 1,000,000 documents",
        "benchmarks.loop_million",
        LOOP_QUICK,
    ),
    Script(
        LONG,
        "migrate 1,000,000 documents, killed ten times on the way",
        "benchmarks.million",
        ("--count", "12000"),
        ("--count", "1000000"),
    ),
    Script(
        LONG,
        "what trials said beside what was proven, on the demo's shop and the examples' databases",
        "benchmarks.loop",
        ("--only", "catalogue", "--scale", "0.3", "--seconds", "1"),
        ("--all",),
    ),
    Script(
        LONG,
        "all verbs on a shop of 1,000,000 documents, of which trials copy 100,000",
        "benchmarks.loop_million",
        LOOP_QUICK,
        ("--documents", "100000", "--seconds", "25"),
    ),
]
Job = Group | Script


@dataclass(slots=True)
class Catalogue:
    """What can be measured, and which modules could not be loaded."""

    jobs: list[Job] = field(default_factory=list)
    broken: dict[str, Exception] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*(job.name for job in self.jobs), *self.broken]))

    @property
    def order(self) -> list[tuple[str, str]]:
        return [(job.name, job.work) for job in self.jobs]


def discover() -> Catalogue:
    """The groups of every module here that has a `groups` function, and the scripts."""
    found = Catalogue()
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name == "__main__":
            continue
        try:
            make = getattr(importlib.import_module(f"benchmarks.{module.name}"), "groups", None)
            found.jobs += [] if make is None else make()
        except Exception as error:
            traceback.print_exc()
            found.broken[module.name] = error
    found.jobs += [script for script in SCRIPTS if script.name not in found.broken]
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", help="names of families; all if none is given")
    parser.add_argument("--quick", action="store_true", help="few rounds and documents: does it run?")
    parser.add_argument("--rounds", type=int, help="at most so many rounds, with all documents")
    parser.add_argument("--uri", help="a replica set to use instead of private local servers")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the report again")
    parser.add_argument(
        "--output",
        type=Path,
        help="the Markdown file, with JSON and plots beside it "
        "(default: benchmarks/RESULTS.md, and none with --quick or --rounds)",
    )
    return parser.parse_args(arguments)


# -- one work ------------------------------------------------------------------------


class TookTooLong(Exception):
    """A work did not end in its time."""


@contextlib.contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise in the main thread when the time is over, and again every minute should that be swallowed."""

    def over(*_: Any) -> None:
        raise TookTooLong(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 60.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def perform(job: Job, context: Context, found: dict[str, str]) -> Entry:
    """Measure one work. What goes wrong is an entry too, so that the others are not lost."""
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    start = monotonic()
    entry = Entry(job.name, job.work, date, 0.0, found)
    try:
        with _limited(LONG_SECONDS_MAX if job.name == LONG else WORK_SECONDS_MAX):
            if isinstance(job, Script):
                lines, goals = _run_script(job, context)
                entry = replace(entry, lines=lines, results=goals)
            else:
                entry = replace(entry, results=measure(job, context))
    except Exception as error:
        traceback.print_exc()
        entry = replace(entry, failure=_reason(error))
    return replace(entry, seconds=round(monotonic() - start, 1))


def _run_script(script: Script, context: Context) -> tuple[list[str], list[Result]]:
    """The lines that it printed, and of those that are `{"goal": …}` the figures."""
    command = [sys.executable, "-m", script.module, "--uri", context.uri]
    command += script.quick if context.quick else script.arguments
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.splitlines()
    figures = [json.loads(line)["goal"] for line in lines if line.startswith(GOAL)]
    return [line for line in lines if not line.startswith(GOAL)], [
        single(script.name, script.work, **figure) for figure in figures
    ]


def _reason(error: BaseException) -> str:
    """One line about an error, without paths and addresses: the report is published."""
    first = (str(error).splitlines() or [""])[0][:FAILURE_LENGTH_MAX]
    hidden = re.sub(r"(\w+://\S+)|((/[\w.+-]+){2,}/?)|([\w.-]+:\d{2,5}\b)", "…", first)
    return f"{type(error).__name__}: {hidden}".rstrip(": ")


# -- all of them ----------------------------------------------------------------------


def run(jobs: Sequence[Job], options: argparse.Namespace, keep: Callable[[Entry], None]) -> bool:
    """Measure the jobs, family by family, each on a server of its own; whether none failed."""
    well = True
    for name, family in groupby(jobs, key=lambda job: job.name):
        with ExitStack() as stack:
            uri = options.uri
            if uri is None:
                from treadle.server import local as server

                uri = stack.enter_context(server.start()).uri
            found = surroundings(uri, quick=options.quick)
            context = Context(uri, options.quick, stack.enter_context(asyncio.Runner()), stack)
            for job in family:
                if options.rounds and isinstance(job, Group):
                    job = replace(job, rounds=min(job.rounds, options.rounds))
                entry = perform(job, context, found)
                keep(entry)
                well = well and entry.failure is None
                ended = "done" if entry.failure is None else "FAILED"
                print(f"{ended}: {name}: {job.work}: {entry.seconds:.1f} s", file=sys.stderr)
    return well


def _output(options: argparse.Namespace) -> Path | None:
    if options.output is None and not options.quick and not options.rounds:
        return RESULTS
    return options.output  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    catalogue = discover()
    unknown = sorted(set(options.groups) - set(catalogue.names))
    if unknown:
        print(
            f"no such family: {', '.join(unknown)}; there are {', '.join(catalogue.names)}", file=sys.stderr
        )
        return 2
    output = _output(options)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    kept = Stored() if output is None else stored.load(output.with_suffix(".json"))
    kept.drop_unknown(catalogue.order, catalogue.broken)

    def write() -> None:
        if output is not None:
            stored.save(output.with_suffix(".json"), kept)
            report.write(output, kept)

    def keep(entry: Entry) -> None:
        kept.put(entry, catalogue.order)
        write()

    if options.report:
        write()
        return 0
    chosen = [
        job for job in catalogue.jobs if (job.name in options.groups if options.groups else job.name != LONG)
    ]
    broken = {
        name: error for name, error in catalogue.broken.items() if name in (options.groups or catalogue.names)
    }
    for name, error in broken.items():
        date = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        keep(Entry(name, "loading", date, 0.0, {}, failure=_reason(error)))
    began = monotonic()
    well = run(chosen, options, keep)
    print(f"{len(chosen)} works took {(monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    if output is None:
        print(report.markdown(kept, {}, {}))
    return 0 if well and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
