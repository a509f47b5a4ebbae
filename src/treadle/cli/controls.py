"""`treadle pause`, `treadle resume` and `treadle set-aside`: what an operator asks of single rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.application import open_store
from treadle.cli.options import FINDINGS, LIMIT_DEFAULT, AppOption, JsonOption, LimitOption
from treadle.cli.output import counted, print_extended_json, print_table, say, shortened
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.upkeep.quarantine import SetAsideDocument

REASON_LENGTH_MAX = 80

RuleArgument = Annotated[
    str, typer.Argument(metavar="RULE", help="As status names it: Product.review_count.")
]
ItemsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="As list names them.", show_default=False)
]
RuleOption = Annotated[str | None, typer.Option("--rule", help="All of this rule.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only list which ones that would be.")]

HOW_IT_GOES_ON = {
    "following": "It is followed again; nothing was missed.",
    "behind": "It catches up from where it was paused.",
    "building": "The server's history no longer reaches back to where it was paused, so it is rebuilt.",
}


def pause(app_name: AppOption, rule: RuleArgument) -> None:
    """Stop maintaining one rule, in all processes, until it is resumed. No change is lost.

    To undo, use resume.

    \b
    Example:
      treadle pause --app shop.models:store Product.review_count
    """
    with open_store(app_name) as (store, call):
        new = call(store.pause, rule)
    say(f"{rule} is paused." if new else f"{rule} was paused already.")


def resume(app_name: AppOption, rule: RuleArgument) -> None:
    """Let a rule that was paused go on; it catches up with what it missed.

    \b
    Example:
      treadle resume --app shop.models:store Product.review_count
    """
    with open_store(app_name) as (store, call):
        how = call(store.resume, rule)
    say(f"{rule} is resumed. {HOW_IT_GOES_ON[how]}")


def list_(
    app_name: AppOption,
    rule: RuleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """List the documents that could not be processed, and why. Exits with 1 when there are any.

    \b
    Example:
      treadle set-aside list --app shop.models:store
    """
    with open_store(app_name) as (store, call):
        items = call(store.set_aside, rule)
    if as_json:
        print_extended_json([_plain(each) for each in items])
    elif not items:
        say("Nothing is set aside.")
    else:
        _show(items[:limit])
        if len(items) > limit:
            say(f"{counted(len(items), 'document')}, {len(items) - limit:,} of them not shown; see --limit.")
    if items:
        raise typer.Exit(FINDINGS)


def retry(
    app_name: AppOption,
    names: ItemsArgument = None,
    rule: RuleOption = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Try once more to bring documents right that were set aside. Exits with 1 when some still fail.

    \b
    Example:
      treadle set-aside retry --app shop.models:store --rule Product.review_count
    """
    with open_store(app_name) as (store, call):
        items = _chosen(call(store.set_aside, rule), names, rule, everything)
        if dry_run:
            _show(items)
            return
        failed = _each(items, lambda item: call(store.retry, item))
    say(f"{counted(len(items) - failed, 'document')} settled, {failed} still set aside.")
    if failed:
        raise typer.Exit(FINDINGS)


def discard(
    app_name: AppOption,
    names: ItemsArgument = None,
    rule: RuleOption = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Forget documents that were set aside, and leave them as they are; verify still names them.

    \b
    Example:
      treadle set-aside discard --app shop.models:store 9f86d081884c7d65
    """
    with open_store(app_name) as (store, call):
        items = _chosen(call(store.set_aside, rule), names, rule, everything)
        if dry_run:
            _show(items)
            return
        for item in items:
            call(store.discard, item)
    say(f"Discarded {counted(len(items), 'document')}. Run repair to process them after all.")


def _each(items: list[SetAsideDocument], attempt: Callable[[SetAsideDocument], bool]) -> int:
    """How many of these could not be settled; one that cannot be retried here is named."""
    failed = 0
    for item in items:
        try:
            failed += not attempt(item)
        except UsageError as error:
            failed += 1
            say(str(error), err=True)
    return failed


def _chosen(
    items: list[SetAsideDocument], names: list[str] | None, rule: str | None, everything: bool
) -> list[SetAsideDocument]:
    if names:
        known = {each.token: each for each in items}
        for name in names:
            if name not in known:
                raise UsageError(
                    f"nothing that was set aside is called {name!r}; see treadle set-aside list",
                    code="set-aside-unknown",
                )
        return [known[name] for name in names]
    if rule is None and not everything:
        raise UsageError("name what is meant, or give --rule or --all", code="set-aside-unknown")
    return items


def _show(items: list[SetAsideDocument]) -> None:
    rows = [
        (
            each.token,
            each.rule,
            f"{each.collection} {each.document_id}",
            "" if each.since is None else f"{each.since:%Y-%m-%d %H:%M:%S}",
            str(each.attempts),
            shortened(each.reason, REASON_LENGTH_MAX),
        )
        for each in items
    ]
    print_table(("name", "rule", "document", "since", "attempts", "reason"), rows)


def _plain(item: SetAsideDocument) -> dict[str, Any]:
    from dataclasses import asdict

    return {"name": item.token, **asdict(item)}
