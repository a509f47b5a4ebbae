"""What verbs print: tables, JSON, and files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from treadle.errors import UsageError
from treadle.model.text import escape_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Wider than any row: the text in it is bounded.
TABLE_WIDTH_MAX = 1_000_000


def stdout() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console()


def stderr() -> Console:
    """The console for progress."""
    from rich.console import Console

    return Console(stderr=True)


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines, as results or beside them; what comes from data steers no terminal."""
    typer.echo(escape_lines(text), err=err)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    title: str = "",
    wrapped: Collection[str] | None = None,
) -> None:
    """Print a table. Its text is never taken for markup: documents may contain anything.

    Nothing is cut. On a terminal the columns named in `wrapped`, else the last
    one, take several lines where there is no room; all others can be copied
    whole. Where the output is no terminal, each row is one line.
    """
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(escape_lines(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    table = Table(title=Text(title, no_wrap=True) if title else None, title_justify="left")
    for number, heading in enumerate(headings):
        if heading in (headings[-1:] if wrapped is None else wrapped):
            table.add_column(heading, overflow="fold")
        else:
            width = max((row[number].cell_len for row in cells), default=0)
            table.add_column(heading, no_wrap=True, min_width=max(width, len(heading)))
    for row in cells:
        table.add_row(*row)
    console = stdout()
    unbounded = console.options.update(max_width=TABLE_WIDTH_MAX)
    measured = Measurement.get(console, unbounded, table)
    # Where even the columns that stay whole do not fit, the terminal breaks the lines.
    console.width = max(console.width, measured.minimum) if console.is_terminal else measured.maximum
    console.print(table)


def print_json(value: Any, **options: Any) -> None:
    """Print JSON; dataclasses become objects, and dates ISO 8601."""
    typer.echo(escape_json(json.dumps(value, indent=2, default=_plain, **options)))


def escape_json(text: str) -> str:
    """Escape what is not printable in JSON, so that it means the same, and keep its line breaks."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each == "\n" or each.isprintable() else _escape_in_json(each) for each in text)


def _escape_in_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def print_extended_json(value: Any) -> None:
    """Print relaxed Extended JSON, in which ids keep their type."""
    from bson import json_util

    typer.echo(escape_json(json_util.dumps(value, json_options=json_util.RELAXED_JSON_OPTIONS, indent=2)))


def counted(number: int, noun: str) -> str:
    """1 document, 2 documents."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shortened(text: str, length: int) -> str:
    """The text, cut to this length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def require_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written, before the work whose result goes there."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(place, os.W_OK):
        reason = errno.EACCES
    else:
        return
    raise UsageError(f"{option} {folder} cannot be written: {os.strerror(reason)}.", code="output-invalid")


def write_html(path: Path, text: str) -> None:
    """Write the file that `--html` names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written: {error.strerror}.", code="output-invalid"
        ) from None
