"""`treadle run-due`: the scheduled work that is due."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.commands.app import call
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store
from treadle.upkeep.schedule import Ran


def run_due(store: Store | AsyncStore, dry_run: bool) -> list[Ran]:
    """Do what is due, or say what is."""
    done: list[Ran] = call(store, "run_due", dry_run=dry_run)
    return done


def as_json(ran: list[Ran]) -> str:
    """One object per run."""
    return json.dumps([{**asdict(each), "at": each.at.isoformat()} for each in ran], indent=2)


def show(ran: list[Ran], console: Console, dry_run: bool) -> None:
    """A table of what was done, or what is due."""
    if not ran:
        console.print("Nothing is due.")
        return
    if dry_run:
        for each in ran:
            console.print(f"{each.name} is due.")
        return
    table = Table("what", "computed", "written", "removed", "seconds", "outcome")
    for each in ran:
        computed = f"everything: {each.why}" if each.why else "everything" if each.whole else "what changed"
        outcome = each.error or "done"
        table.add_row(
            each.name, computed, str(each.written), str(each.removed), f"{each.seconds:.3f}", Text(outcome)
        )
    console.print(table)
