"""`treadle demo`: the advisor, six patterns, verify and repair on a naive shop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.output import say


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    html: Annotated[
        str, typer.Option("--html", metavar="FILE", help="Where the report goes.")
    ] = "treadle-demo.html",
    scale: Annotated[
        float, typer.Option("--scale", min=0.01, max=20, help="How much data; 1 is about 45,000 documents.")
    ] = 1.0,
) -> None:
    """Show the advisor, six patterns, verify and repair on a naive shop.

    On a private server. Takes about a minute. Leaves an HTML report, and nothing else.

    \b
    Example:
      treadle demo
      treadle demo --keep
    """
    from treadle.demo.narration import narrate

    narrate(Path(html), scale, _wait_for_interrupt if keep else None)


def _wait_for_interrupt() -> None:
    import threading

    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        say()
