"""`treadle record`: what clients ask of a database, with its values, in a local file."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import INTERRUPTED, JsonOption, UriArgument, UriOption
from treadle.cli.output import counted, print_json, say
from treadle.cli.progress import step_bar

if TYPE_CHECKING:
    from treadle.advisor.loop.recorder import Recorded


def record(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="Where the workload goes.")
    ] = "treadle.workload",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=86_400, help="How long to record.")
    ] = 60.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    megabytes: Annotated[
        int, typer.Option("--megabytes", min=1, help="Stop when the file has this size.")
    ] = 1_000,
    as_json: JsonOption = False,
) -> None:
    """Record the requests of a database, with their values, into a local file.

    The server's profiler records everything in that time, and is set back
    afterwards, also after Ctrl-C; if this process is killed, it ends by itself.
    The file holds values of your documents; only you may read it (mode 0600).

    \b
    Example:
      treadle record mongodb://localhost:27017/shop -o shop.workload --seconds 60
    """
    from treadle.advisor.loop.recorder import record as record_database
    from treadle.cli.connection import connected_database

    target = Path(output)
    with _stoppable(), connected_database(uri, uri_option) as database, step_bar() as report:
        restore_profiler_of(database)
        recorded = record_database(
            database,
            target,
            seconds=seconds,
            force=force,
            bytes_max=megabytes * 1_000_000,
            progress=lambda elapsed, operations: report(
                counted(operations, "request"), min(int(elapsed), int(seconds)), int(seconds)
            ),
        )
    if as_json:
        print_json({**_facts(recorded), "path": str(recorded.path)})
    else:
        _print(recorded)
    if not recorded.complete:
        raise typer.Exit(INTERRUPTED)


def restore_profiler_of(database: Any) -> None:
    """Set the profiler back where a recording was killed, and say so; a login that may not is passed over."""
    from treadle.advisor.loop.profiler_level import restore_profiler
    from treadle.advisor.reading import Lost, Refused

    try:
        text = restore_profiler(database)
    except (Lost, Refused):
        return
    if text:
        say(text, err=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end a recording as Ctrl-C does; outside of the main thread they are left alone."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    former: dict[int, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            former[number] = signal.signal(number, stop)
    except ValueError:
        pass
    try:
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _facts(recorded: Recorded) -> dict[str, Any]:
    names = (
        "seconds",
        "operations",
        "reads",
        "writes",
        "truncated",
        "lost",
        "bytes",
        "complete",
    )
    return {name: getattr(recorded, name) for name in (*names, "former_level")}


def _print(recorded: Recorded) -> None:
    say(
        f"Recorded {counted(recorded.reads, 'read')} and {counted(recorded.writes, 'write')} in "
        f"{recorded.seconds:.1f} s into {recorded.path}."
    )
    say("It holds values of your documents, and only you may read it (mode 0600).")
    if recorded.truncated:
        say(f"Left out: {counted(recorded.truncated, 'request')} too long for the profiler.")
    if recorded.lost:
        say("Not everything is in it: the profiler's memory, or the file, was too small.")
    say(f"The profiler is back at level {recorded.former_level}.")
