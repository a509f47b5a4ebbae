"""`treadle explain`: what a finding of scan, or the code of an error, means."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.options import JsonOption
from treadle.cli.output import print_json, stdout
from treadle.errors import UsageError


def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a finding of scan or an error means, and what to do about it.

    \b
    Example:
      treadle explain outlier
      treadle explain document-changed
      treadle explain
    """
    from rich.text import Text

    from treadle.advisor.rules import load

    rules = {known: rule for known, (rule, _) in load().items()}
    errors = described_errors()
    console = stdout()
    if code is None:
        if as_json:
            print_json(list(rules.values()))
            return
        for rule in rules.values():
            console.print(Text(f"{rule.code:26} {rule.title}"))
        console.print(Text(f"Besides, the {len(errors)} codes that error messages end with."))
        return
    if code in rules:
        rule = rules[code]
        if as_json:
            print_json(rule)
            return
        console.print(Text(f"{rule.code}: {rule.title}", style="bold"))
        for heading in ("pattern", "symptom", "remedy", "costs", "gains", "when_not"):
            console.print(Text(f"{heading.capitalize().replace('_', ' ')}: {getattr(rule, heading)}"))
    if code in errors and not (as_json and code in rules):
        if as_json:
            print_json({"code": code, "error": errors[code]})
            return
        console.print(Text(f"{code}: an error", style="bold"))
        console.print(Text(errors[code]))
    elif code not in rules:
        known = [*rules, *errors]
        near = difflib.get_close_matches(code, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise UsageError(f"there is no finding or error with the code {code!r}; {hint}", code="code-unknown")


def described_errors() -> dict[str, str]:
    """What docs/errors.md says of each code; the page comes with the package."""
    here = Path(__file__).parent
    places = [here / "errors.md", here.parent.parent.parent / "docs" / "errors.md"]
    text = next((place.read_text(encoding="utf-8") for place in places if place.exists()), "")
    _, *parts = re.split(r"^## `([a-z0-9-]+)`$", text, flags=re.MULTILINE)
    return {code: said.strip() for code, said in zip(parts[::2], parts[1::2], strict=True)}
