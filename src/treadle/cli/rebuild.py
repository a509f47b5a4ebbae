"""`treadle rebuild`: recompute every maintained value."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.cli.application import call_with_progress, pace
from treadle.cli.options import (
    LIMIT_DEFAULT,
    AppOption,
    JsonOption,
    LimitOption,
    ModelsArgument,
    ThrottleOption,
)
from treadle.cli.output import counted, say
from treadle.cli.verify import verify


def rebuild(
    app_name: AppOption,
    models: ModelsArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    throttle: ThrottleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Recompute every maintained value, as after declaring a pattern on old data.

    Only maintained fields change; remove them from the documents to undo.

    \b
    Example:
      treadle rebuild --app shop.models:store Product
    """
    if dry_run:
        verify(app_name, models, limit=limit, as_json=as_json)
        return
    rebuilt = call_with_progress(app_name, "rebuild", models, throttle=pace(throttle))
    say(f'{{"rebuilt": {rebuilt}}}' if as_json else f"Rebuilt {counted(rebuilt, 'document')}.")
