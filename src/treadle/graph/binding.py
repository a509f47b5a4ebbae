"""Checks that declarations share when they are bound to their places."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from treadle.errors import DeclarationError
from treadle.graph.rule import Place


def check_choice(place: Place, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a keyword's value that is not one of those allowed."""
    if value not in allowed:
        raise DeclarationError(
            f"{place.label} has {name}={value!r}; it takes {' or '.join(map(repr, allowed))}",
            code="pattern-keyword",
        )


def check_whole_number(place: Place, name: str, value: Any, most: int) -> None:
    """Refuse a keyword's value that is not a whole number from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise DeclarationError(
            f"{place.label} has {name}={value!r}; it takes a whole number from 1 to {most:,}",
            code="pattern-keyword",
        )


def check_maintenance(place: Place, maintain: Any, every: Any) -> None:
    """Refuse an unknown way of maintenance, and a schedule without a period."""
    check_choice(place, "maintain", maintain, ("write", "stream", "schedule"))
    if maintain == "schedule" and not (isinstance(every, timedelta) and every > timedelta(0)):
        raise DeclarationError(
            f"{place.label} has maintain='schedule' and every={every!r}; say how often, such as "
            "every=timedelta(hours=1)",
            code="pattern-keyword",
        )
    if maintain != "schedule" and every is not None:
        raise DeclarationError(
            f"{place.label} has every={every!r}, which goes with maintain='schedule'", code="pattern-keyword"
        )


def sibling(place: Place, name: str, keyword: str) -> str:
    """Return the stored path of a field beside the declaring one."""
    field = place.owner.by_name.get(name)
    if field is None:
        raise DeclarationError(
            f"{place.label} has {keyword}={name!r}, but {place.owner.model.__name__} has no such field",
            code="source-field-missing",
        )
    return ".".join([*(step.stored for step in place.steps), field.stored])


def snake(name: str) -> str:
    """Return `BlogPost` as `blog_post`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
