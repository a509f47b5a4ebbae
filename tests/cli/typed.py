"""`treadle …` as it is typed in a folder, but inside this process: a process each would take ten times as long.

That the installed command is the same is shown in `tests/cli/test_cli.py`, and by the commands here that are
interrupted or go on beside the test.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from treadle import cli


def typed(folder: Path, *arguments: str, columns: int = 200, **environment: str) -> CompletedProcess[str]:
    """What a command printed, and how it ended. The application in the folder is loaded afresh."""
    written, said = io.StringIO(), io.StringIO()
    known, found = set(sys.modules), list(sys.path)
    importlib.invalidate_caches()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(said),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns), **environment}),
        # A file that is written again within a second would be taken for the one before.
        mock.patch.object(sys, "dont_write_bytecode", True),
    ):
        try:
            code = cli.main(list(arguments))
        finally:
            sys.path[:] = found
            for name in set(sys.modules) - known:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                    del sys.modules[name]
    return CompletedProcess(arguments, code, written.getvalue(), said.getvalue())
