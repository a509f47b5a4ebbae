"""`treadle status`: how each pattern is maintained, and how far behind it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.cli.application import open_store
from treadle.cli.options import AppOption, JsonOption
from treadle.cli.output import counted, print_json, print_table, say

if TYPE_CHECKING:
    from datetime import datetime

    from treadle.upkeep.quarantine import SetAsideDocument
    from treadle.upkeep.status import RuleStatus, Status


def status(app_name: AppOption, as_json: JsonOption = False) -> None:
    """Show per pattern how it is maintained, how far behind it is, and what verify found last.

    \b
    Example:
      treadle status --app shop.models:store
      treadle status --app shop.models:store --json
    """
    with open_store(app_name) as (store, call):
        current = call(store.status)
    if as_json:
        print_json(current)
    elif not current.rules:
        say("No model maintains anything.")
    else:
        show(current)


def show(status: Status) -> None:
    """A table of the rules, then a line about the worker."""
    headings = ("field", "pattern", "maintained", "state", "behind", "dirty", "last run", "last verify")
    print_table(headings, map(_row, status.rules), wrapped=headings[2:])
    worker = status.worker
    if worker is not None:
        who = f"active ({worker.owner})" if worker.active else "NOT RUNNING: start treadle watch"
        owed = f", {worker.owed} collections to recheck" if worker.owed else ""
        say(f"Worker {who}; {worker.lag_seconds:.1f} s and {worker.events} events behind{owed}.")
        if worker.headroom is not None:
            low = ": TOO LITTLE, find out why the worker is behind" if worker.headroom_low else ""
            say(f"The server's history reaches back {worker.headroom:.0f} s from there{low}.")
        if worker.error is not None:
            say(f"The worker fails: {worker.error}")
    for rule in status.rules:
        if rule.rebuild_needed:
            say(f"rebuild needed: {rule.rule}; its declaration has changed: run treadle rebuild")
    if status.set_aside:
        say(f"{counted(status.set_aside, 'document')} set aside; see treadle set-aside list:")
        print_table(("rule", "collection", "document", "code", "since", "reason"), map(_aside, status.aside))
    if status.intents:
        say(f"{status.intents} intents are under way or left over from a crash.")


def _row(rule: RuleStatus) -> list[str]:
    findings = "never" if rule.findings is None else counted(rule.findings, "finding")
    every = "" if rule.every_seconds is None else f", every {rule.every_seconds:g} s"
    return [
        rule.rule,
        rule.pattern,
        rule.maintain + every,
        rule.state,
        "" if rule.lag_seconds is None else f"{rule.lag_seconds:.1f} s",
        "" if rule.dirty is None else str(rule.dirty),
        "" if rule.last_run is None else f"{_when(rule.last_run)}, {rule.last_seconds or 0.0:.1f} s",
        findings + (f", {_when(rule.verified_at)}" if rule.verified_at else ""),
    ]


def _aside(each: SetAsideDocument) -> list[str]:
    document = repr(each.document_id)
    return [
        each.rule,
        each.collection,
        document,
        str(each.code),
        _when(each.since) if each.since else "",
        each.reason,
    ]


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"
