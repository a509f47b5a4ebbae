"""What progress says, as a line and as a bar."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from treadle.advisor import scan
from treadle.cli.progress import describe
from treadle.cli.scan import scan_bar
from treadle.graph.outcomes import Progress


def test_progress_tells_rate_and_time_left():
    assert "User: 250 of 1,000, 125/s, 6 s left" == describe(Progress("User", 250, 1000), 2.0)
    assert "User: 0 of 10" == describe(Progress("User", 0, 10), 1.0)


def test_the_progress_names_what_is_looked_at(database: Any) -> None:
    database["a"].insert_one({})
    database["b[bold]"].insert_one({})
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with scan_bar(console) as progress:
        steps = []

        def both(step: Any) -> None:
            steps.append((step.what, step.done, step.total))
            progress(step)

        scan(database, progress=both)
    assert [("a", 0, 3), ("b[bold]", 1, 3)] == steps[:2]
    assert ("done", 3, 3) == steps[-1]
