"""Run the benchmarks and write what they gave.

Example: python -m benchmarks foundation --quick --output /tmp/RESULTS.md
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import benchmarks
from benchmarks import report
from benchmarks.harness import Context, Group, Result, measure

RESULTS = Path(__file__).with_name("RESULTS.md")


def discover() -> list[Group]:
    """The groups of every module here that has a `groups` function."""
    found: list[Group] = []
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            make = getattr(importlib.import_module(f"benchmarks.{module.name}"), "groups", None)
            found += [] if make is None else make()
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=description, epilog=example)
    parser.add_argument("groups", nargs="*", help="names of groups; all if none is given")
    parser.add_argument("--quick", action="store_true", help="few rounds and documents: does it run?")
    parser.add_argument("--uri", help="a replica set to use instead of a private local server")
    parser.add_argument(
        "--output",
        type=Path,
        help="the Markdown file to write, with JSON beside it "
        "(default: benchmarks/RESULTS.md for a full run of all groups, else none)",
    )
    return parser.parse_args(arguments)


def run(groups: Sequence[Group], uri: str, *, quick: bool) -> list[Result]:
    """The results of the groups, one after the other, in one event loop."""
    results: list[Result] = []
    with asyncio.Runner() as runner, ExitStack() as stack:
        context = Context(uri, quick, runner, stack)
        for group in groups:
            results += measure(group, context)
            print(f"done: {group.name}: {group.work}", file=sys.stderr)
    return results


def main() -> int:
    options = parse()
    groups = discover()
    unknown = set(options.groups) - {group.name for group in groups}
    if unknown:
        names = ", ".join(sorted({group.name for group in groups}))
        print(f"no such group: {', '.join(sorted(unknown))}; there are {names}", file=sys.stderr)
        return 2
    chosen = [group for group in groups if not options.groups or group.name in options.groups]
    output = options.output
    if output is None and not options.quick and not options.groups:
        output = RESULTS
    with ExitStack() as stack:
        uri = options.uri
        if uri is None:
            from treadle import server

            uri = stack.enter_context(server.start()).uri
        results = run(chosen, uri, quick=options.quick)
        found = report.surroundings(uri, quick=options.quick)
    print(report.markdown(results, found))
    if output is not None:
        report.write(output, results, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
