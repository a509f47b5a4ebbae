"""`treadle decide`: embed or reference?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import JsonOption, UriArgument, UriOption
from treadle.cli.output import print_json, stdout
from treadle.cli.scan import scan_database
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.advisor import Decision, Relationship


def decide(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    children_max: Annotated[
        int | None, typer.Option("--children-max", min=0, help="Children of the largest parent.")
    ] = None,
    children_typical: Annotated[
        int | None, typer.Option("--children-typical", min=0, help="Children of a typical parent.")
    ] = None,
    child_bytes: Annotated[
        int | None, typer.Option("--child-bytes", min=0, help="Approximate size of a child, in bytes.")
    ] = None,
    many_to_many: Annotated[
        bool, typer.Option("--many-to-many", help="A child belongs to several parents.")
    ] = False,
    read_together: Annotated[
        bool | None,
        typer.Option("--read-together/--read-apart", help="Are children always read with their parent?"),
    ] = None,
    atomic: Annotated[
        bool, typer.Option("--atomic", help="Children change together with their parent, in one write.")
    ] = False,
    change_often: Annotated[
        bool | None, typer.Option("--change-often/--change-seldom", help="Do children change often?")
    ] = None,
    grows: Annotated[bool, typer.Option("--grows", help="The number of children keeps growing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Embed or reference? By options, or for each relation of a live database.

    \b
    Example:
      treadle decide --children-max 500 --child-bytes 300 --read-apart --grows
      treadle decide mongodb://localhost:27017/shop
    """
    options = {
        "children_max": children_max,
        "children_typical": children_typical,
        "child_bytes": child_bytes,
        "many_to_many": many_to_many or None,
        "read_together": read_together,
        "atomic": atomic or None,
        "children_change_often": change_often,
        "grows": grows or None,
    }
    relationship = {name: value for name, value in options.items() if value is not None}
    if not relationship:
        _decide_relations(uri, uri_option, as_json)
    elif uri is not None or uri_option is not None:
        raise UsageError(
            "decide takes a URI or options about one relationship, not both", code="relationship-invalid"
        )
    else:
        _show(_from_options(relationship), as_json)


def _decide_relations(uri: str | None, uri_option: str | None, as_json: bool) -> None:
    """Print the decision for each relation of a live database."""
    from treadle.advisor.text import show_decisions

    report = scan_database(uri, uri_option)
    if not as_json:
        show_decisions(report, stdout())
        return
    print_json(
        [
            {"child": relation.child, "path": relation.path, "parent": relation.parent, **_as_json(decision)}
            for relation, decision in report.decisions
        ]
    )


def _from_options(relationship: dict[str, Any]) -> Relationship:
    from treadle.advisor import Relationship

    if "children_max" not in relationship and "many_to_many" not in relationship:
        raise UsageError(
            "say how many children the largest parent has: --children-max, or --many-to-many",
            code="relationship-invalid",
        )
    return Relationship(**{"children_max": 0, **relationship})


def _show(relationship: Relationship, as_json: bool) -> None:
    """Print one decision, and the answers that led to it."""
    from rich.text import Text

    from treadle.advisor import decide

    decision = decide(relationship)
    if as_json:
        print_json(_as_json(decision))
        return
    console = stdout()
    console.print(Text(decision.advice, style="bold"))
    for answer in decision.path:
        console.print(Text(f"  {answer.question} {answer.answer}"))
    for factor in decision.factors:
        console.print(Text(f"  {factor}"))


def _as_json(decision: Decision) -> dict[str, Any]:
    return {
        "choice": decision.choice,
        "advice": decision.advice,
        "answers": [asdict(answer) for answer in decision.path],
        "factors": list(decision.factors),
    }
