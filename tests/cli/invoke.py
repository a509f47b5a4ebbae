"""Ways to run the command line: in this process, which takes a tenth of the time, or in one of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from treadle import cli

# Longer than any command should take, on a busy machine.
RUN_SECONDS_MAX = 60


def invoke(
    folder: Path, *arguments: str, columns: int = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process; the application in the folder is loaded afresh."""
    output, errors = io.StringIO(), io.StringIO()
    modules, path = set(sys.modules), list(sys.path)
    importlib.invalidate_caches()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns), **environment}),
        # A file that is written again within a second would be taken for the one before.
        mock.patch.object(sys, "dont_write_bytecode", True),
    ):
        try:
            code = cli.main(list(arguments))
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                    del sys.modules[name]
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def start(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
    return subprocess.Popen(
        [sys.executable, "-m", "treadle.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**inherited, **environment},
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command in this process, without an address from outside; its exit code, output and error output."""
    with mock.patch.dict(os.environ):
        os.environ.pop("MONGODB_URI", None)
        done = invoke(Path(), *arguments, **environment)
    return done.returncode, done.stdout, done.stderr


def run_verb(*arguments: str) -> Any:
    """Run a verb in this process; its errors are exceptions."""
    return CliRunner().invoke(cli.app, list(arguments))


def assert_one_sentence(text: str) -> None:
    assert 1 == len(text.strip().splitlines()), text
    sentence = re.sub(r" — [a-z0-9-]+$", "", text.strip())
    assert sentence[-1] in ".?", text
