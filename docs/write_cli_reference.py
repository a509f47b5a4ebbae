"""Write `docs/cli-reference.md` from the command line's own help.

Example: python docs/write_cli_reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from treadle.cli import app

PAGE = Path(__file__).with_name("cli-reference.md")
WIDTH = 96
HEAD = """# Command line reference

Written by `make docs` from the command's own help; do not edit.
[Command line](cli.md) says more about each verb, about exit codes and about JSON.
"""


def page() -> str:
    """The whole page."""
    command = typer.main.get_command(app)
    return HEAD + "".join(_sections(command, None, "treadle", 2))


def _sections(command: Any, parent: Any, name: str, level: int) -> list[str]:
    """A section of the command, then one per verb below it, by name."""
    context = command.make_context(
        name, [], parent=parent, resilient_parsing=True, max_content_width=WIDTH, terminal_width=WIDTH
    )
    told = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    path = context.command_path
    made = [f"\n{'#' * level} {path}\n\n```text\n{told.strip()}\n```\n"]
    for below in sorted(getattr(command, "commands", {})):
        made += _sections(command.commands[below], context, below, min(level + 1, 3))
    return made


if __name__ == "__main__":
    PAGE.write_text(page())
