"""`treadle explain`: what a finding of scan means."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from treadle.cli.options import JsonOption
from treadle.cli.output import print_json, stdout
from treadle.errors import UsageError


def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a finding of scan means, what it costs and when it does not matter.

    \b
    Example:
      treadle explain outlier
      treadle explain
    """
    from rich.text import Text

    from treadle.advisor.rules import load

    rules = {known: rule for known, (rule, _) in load().items()}
    console = stdout()
    if code is None:
        if as_json:
            print_json(list(rules.values()))
            return
        for rule in rules.values():
            console.print(Text(f"{rule.code:26} {rule.title}"))
        return
    if code not in rules:
        near = difflib.get_close_matches(code, rules, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(rules))}"
        raise UsageError(f"there is no finding with the code {code!r}; {hint}", code="code-unknown")
    rule = rules[code]
    if as_json:
        print_json(rule)
        return
    console.print(Text(f"{rule.code}: {rule.title}", style="bold"))
    for heading in ("pattern", "symptom", "remedy", "costs", "gains", "when_not"):
        console.print(Text(f"{heading.capitalize().replace('_', ' ')}: {getattr(rule, heading)}"))
