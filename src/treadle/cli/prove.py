"""`treadle prove`: whether an applied plan holds what its trial said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.apply import FolderArgument, opened
from treadle.cli.options import FINDINGS, JsonOption, UriArgument, UriOption
from treadle.cli.output import counted, print_json, print_table, say
from treadle.cli.progress import model_bars

if TYPE_CHECKING:
    from treadle.advisor.loop.prove import Proof
    from treadle.advisor.loop.results import Measured


def prove(
    folder: FolderArgument,
    uri: UriArgument = None,
    uri_option: UriOption = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", metavar="FILE", help="Other recorded reads than those of the plan."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify an applied plan, and measure its reads on the real database in both ways.

    Exits with 1 where a value is wrong, an answer differs, or a read is not as
    much quicker as the trial said, and names it.

    \b
    Example:
      treadle prove plan/ mongodb://localhost:27017/shop
    """
    from treadle.advisor.loop.plan import READS
    from treadle.advisor.loop.prove import prove as prove_plan

    path = Path(workload) if workload is not None else Path(folder) / READS
    with opened(folder, uri, uri_option) as (plan, database), model_bars() as bars:
        proof = prove_plan(database, plan, path, log=lambda text: say(text, err=True), progress=bars)
    if as_json:
        print_json(_json(proof))
    else:
        _print(proof, bool(plan.draft.derived))
    if not proof.holds:
        raise typer.Exit(FINDINGS)


def _print(proof: Proof, streamed: bool) -> None:
    if streamed and not proof.followed:
        behind = f" {counted(proof.behind, 'change')} had not been followed." if proof.behind else ""
        say(f"No worker follows this database.{behind} Run treadle watch --app models:store in the folder.")
    say(f"verify: {counted(len(proof.findings), 'finding')}.")
    for each in proof.findings[:10]:
        say(f"  {each.model} {each.document_id!r} {each.path}: not what it should be")
    rows = [
        [
            each.request,
            "not tried" if each.tried is None else _times(each.tried),
            _times(each.proven),
            _verdict(each),
        ]
        for each in proof.reads
    ]
    if rows:
        print_table(["read", "trial", "proven", ""], rows, wrapped=["read"])
    for note in proof.notes:
        say(f"Not compared: {note}.")
    if not proof.reads:
        say("None of the recorded reads could be measured here.")
    say("Proven." if proof.holds else "Not proven.")


def _times(measured: Measured) -> str:
    return f"{measured.value:.1f} ({measured.low:.1f} to {measured.high:.1f})"


def _verdict(each: Any) -> str:
    if each.different:
        return f"{each.different} of {each.compared} answers differ"
    if not each.holds:
        return "not as quick as the trial said"
    if each.within or each.tried is None:
        return "holds"
    return "quicker" if each.proven.value > each.tried.high else "below the trial's interval, but near it"


def _json(proof: Proof) -> dict[str, Any]:
    return {
        "holds": proof.holds,
        "findings": [
            {"model": each.model, "document_id": str(each.document_id), "path": each.path}
            for each in proof.findings
        ],
        "reads": [
            {
                "request": each.request,
                "after": each.after,
                "trial": each.tried,
                "proven": each.proven,
                "within": each.within,
                "holds": each.holds,
                "compared": each.compared,
                "different": each.different,
            }
            for each in proof.reads
        ],
        "notes": list(proof.notes),
        "behind": proof.behind,
        "followed": proof.followed,
    }
