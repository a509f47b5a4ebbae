"""`treadle repair`: correct what verify finds."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.cli.application import call_with_progress, pace
from treadle.cli.options import (
    LIMIT_DEFAULT,
    AppOption,
    FieldsOption,
    JsonOption,
    LimitOption,
    ModelsArgument,
    ThrottleOption,
)
from treadle.cli.output import counted, say
from treadle.cli.verify import verify


def repair(
    app_name: AppOption,
    models: ModelsArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be repaired.")] = False,
    fields: FieldsOption = None,
    throttle: ThrottleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Correct what verify finds, while writers continue.

    What was wrong is overwritten; run with --dry-run --json first to keep it.

    \b
    Example:
      treadle repair --app shop.models:store
      treadle repair --app shop.models:store Product --field review_count
    """
    if dry_run:
        verify(app_name, models, fields=fields, limit=limit, as_json=as_json)
        return
    repaired = call_with_progress(app_name, "repair", models, fields=fields, throttle=pace(throttle))
    say(f'{{"repaired": {repaired}}}' if as_json else f"Repaired {counted(repaired, 'document')}.")
