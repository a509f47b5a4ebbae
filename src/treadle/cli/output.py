"""What verbs print: tables, JSON, and files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from treadle.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def stdout() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console()


def stderr() -> Console:
    """The console for progress."""
    from rich.console import Console

    return Console(stderr=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "") -> None:
    """Print a table. Its text is never taken for markup: documents may contain anything."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, title=Text(title) if title else None, title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    stdout().print(table)


def print_json(value: Any, **options: Any) -> None:
    """Print JSON; dataclasses become objects, and dates ISO 8601."""
    typer.echo(json.dumps(value, indent=2, default=_plain, **options))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def print_extended_json(value: Any) -> None:
    """Print relaxed Extended JSON, in which ids keep their type."""
    from bson import json_util

    typer.echo(json_util.dumps(value, json_options=json_util.RELAXED_JSON_OPTIONS, indent=2))


def counted(number: int, noun: str) -> str:
    """1 document, 2 documents."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shortened(text: str, length: int) -> str:
    """The text, cut to this length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def write_html(path: Path, text: str) -> None:
    """Write the file that `--html` names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written: {error.strerror}.", code="output-invalid"
        ) from None
