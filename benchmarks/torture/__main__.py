"""`python -m benchmarks.torture`: the command line of the torture."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from pymongo import MongoClient

from benchmarks.torture.replica_set import Cluster
from benchmarks.torture.rounds import FAULTS, Remote, Result, run
from treadle.store import common

# The faults of one slice, after which everything is compared and the next begins with an empty database.
SLICE = 10


class NotEmpty(Exception):
    """The database that was named holds collections."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    results: list[Result] = []
    try:
        for result in slices(options.uri, options.failovers, options.seed, options.step_down):
            results.append(result)
            done = sum(each.failovers for each in results)
            if options.report is not None:
                options.report.parent.mkdir(parents=True, exist_ok=True)
                options.report.write_text(report(results) + "\n", encoding="utf-8")
            _say(f"{done} failovers, {result.shell}: {_line(result)}")
    except NotEmpty as error:
        _say(str(error))
        return 2
    sys.stdout.write(report(results) + "\n")
    return 0 if all(result.clean for result in results) else 1


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torture",
        description="Write by every pattern while primaries fail, and account for each write afterwards.",
        epilog="Example: python -m benchmarks.torture mongodb://staging/torture --step-down --failovers 20",
    )
    parser.add_argument("uri", nargs="?", help="an empty database of a replica set; else three local servers")
    parser.add_argument("--failovers", type=int, default=20, help="how many; 20 unless told")
    parser.add_argument("--seed", type=int, default=1, help="what the writers do follows from it")
    parser.add_argument(
        "--step-down",
        action="store_true",
        help="with a URI: let its primary step down; without this you cause the faults",
    )
    parser.add_argument("--report", type=Path, help="a file for the table, written after every slice")
    return parser


def slices(uri: str | None, failovers: int, seed: int, step_down: bool) -> Iterator[Result]:
    """The results of slices with so many failovers in all, sync and async in turn."""
    if uri is None:
        with Cluster() as cluster:
            yield from _local(cluster, failovers, seed)
        return
    require_empty(uri)
    remote, name = Remote(uri), common.database_name(uri)
    faults = [FAULTS["step down"] if step_down else FAULTS["wait"]] * failovers
    for number, start in enumerate(range(0, len(faults), SLICE)):
        mode = "async" if number % 2 else "sync"
        yield run(remote, name, mode, seed + number, faults[start : start + SLICE])  # type: ignore[arg-type]
        _clear(uri)


def _local(cluster: Cluster, failovers: int, seed: int) -> Iterator[Result]:
    every = [fault for fault in FAULTS.values() if fault.name != "wait"]
    done = number = 0
    while done < failovers:
        name = f"torture_{uuid.uuid4().hex[:8]}"
        # Another order of the faults each time.
        faults = [every[(number + each * (1 + number % 3)) % len(every)] for each in range(SLICE)]
        result = run(cluster, name, "async" if number % 2 else "sync", seed + number, faults)
        cluster.client.drop_database(name)
        done += result.failovers
        number += 1
        yield result


def require_empty(uri: str) -> None:
    """Refuse a database that holds anything: what is in it would be written to, and in the end dropped."""
    name = common.database_name(uri)
    with MongoClient[dict[str, object]](uri, serverSelectionTimeoutMS=10_000) as client:
        names = client[name].list_collection_names()
    if names:
        raise NotEmpty(
            f"the database {name!r} is not empty ({', '.join(sorted(names)[:5])}); name one that does not "
            "exist yet: the torture fills it, and drops it in the end"
        )


def _clear(uri: str) -> None:
    with MongoClient[dict[str, object]](uri) as client:
        client.drop_database(common.database_name(uri))


# -- the table -------------------------------------------------------------------------------------


def _line(result: Result) -> str:
    outcomes, account = result.journal.outcomes, result.account
    bad = [*account.examples, *map(str, result.findings[:5]), *map(repr, result.journal.unexpected[:5])]
    return (
        f"{outcomes['acknowledged']} acknowledged, {outcomes['unknown']} unknown, "
        f"{outcomes['refused']} refused, {account.lost} lost, {account.doubled} doubled, "
        f"{account.untrue} untrue, {account.drift + len(result.findings)} drift"
        + "".join(f"\n  {each}" for each in bad)
    )


def report(results: Sequence[Result]) -> str:
    """The whole as text: what became of the writes, and the stall of each kind of fault."""
    rows = [
        ("shell", "failovers", "acknowledged", "unknown", "refused", "lost", "doubled", "untrue", "drift")
    ]
    for mode in ("sync", "async"):
        some = [each for each in results if each.shell == mode]
        outcomes = [each.journal.outcomes for each in some]
        accounts = [each.account for each in some]
        figures = [
            sum(each.failovers for each in some),
            *(sum(each[name] for each in outcomes) for name in ("acknowledged", "unknown", "refused")),
            *(sum(getattr(each, name) for each in accounts) for name in ("lost", "doubled", "untrue")),
            sum(each.account.drift + len(each.findings) for each in some),
        ]
        rows.append((mode, *(f"{each:,}" for each in figures)))  # type: ignore[arg-type]
    stalls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        for name, writers, worker in result.stalls:
            stalls[name].append((writers, worker))
    table = [
        (name, str(len(each)), *(_spread([pair[place] for pair in each]) for place in (0, 1)))
        for name, each in stalls.items()
    ]
    heading = ("fault", "times", "writers stall: median, longest", "worker stalls: median, longest")
    return "\n".join([*_columns(rows), "", *_columns([heading, *table])])


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.1f} s, {ordered[-1]:.1f} s"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
