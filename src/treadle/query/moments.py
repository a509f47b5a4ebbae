"""Moments that callers give."""

from __future__ import annotations

import datetime as dt
from typing import Any

from treadle.errors import UsageError


def as_moment(moment: Any) -> dt.datetime:
    """A time that a caller gave, in UTC and as precise as the server's."""
    if not isinstance(moment, dt.datetime):
        raise UsageError(f"{moment!r} is no datetime; a moment is one", code="moment-invalid")
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    aware = aware.astimezone(dt.UTC)
    return aware.replace(microsecond=aware.microsecond // 1000 * 1000)
