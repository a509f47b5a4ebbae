"""Paths of nodes: `,company,engineering,` with the node's own segment last.

A path begins and ends with the separator, so that no segment is taken for the
beginning of another. Everything below a node is one range of the index: from
the node's path up to the same path with the separator's successor at its end.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from treadle.errors import UsageError
from treadle.plan import Raw

SEPARATOR = ","
# The character after the separator: no path that begins with ",a," sorts at or beyond ",a-".
_AFTER_SEPARATOR = chr(ord(SEPARATOR) + 1)
SEGMENT_BYTES_MAX = 1024


def check_segment(value: Any, where: str) -> str:
    """The segment, or an error that says what is wrong with it."""
    wrong = None
    if not isinstance(value, str):
        wrong = "is not text"
    elif not value.strip():
        wrong = "is empty"
    elif SEPARATOR in value:
        wrong = f"contains {SEPARATOR!r}, which separates the segments of a path"
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        wrong = "contains a control character"
    elif len(value.encode()) > SEGMENT_BYTES_MAX:
        wrong = f"is longer than {SEGMENT_BYTES_MAX:,} bytes"
    if wrong is not None:
        text = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "…"
        raise UsageError(
            f"{where} is {text}, which cannot be a segment of a path: it {wrong}; give it another value, "
            "or let segment= name another field",
            code="tree-segment-invalid",
        )
    return str(value)


def join(above: str | None, segment: str) -> str:
    """The path of a node below the one with the path `above`, or of a root."""
    return f"{above or SEPARATOR}{segment}{SEPARATOR}"


def split(path: Any) -> list[str] | None:
    """The segments of a path, root first; None if this is no path."""
    if not isinstance(path, str) or len(path) < 3 or path[0] != SEPARATOR or path[-1] != SEPARATOR:
        return None
    segments = path[1:-1].split(SEPARATOR)
    return segments if all(segments) else None


def path_above(path: str) -> str | None:
    """The path of the parent; None for a root."""
    segments = split(path)
    if segments is None or len(segments) == 1:
        return None
    return SEPARATOR + SEPARATOR.join(segments[:-1]) + SEPARATOR


def prefixes(path: str) -> list[str]:
    """The paths of all ancestors, root first."""
    segments = split(path) or []
    return [SEPARATOR + SEPARATOR.join(segments[: n + 1]) + SEPARATOR for n in range(len(segments) - 1)]


def below(path: str) -> Raw:
    """The condition on a path that everything below a node meets, and nothing else."""
    return {"$gt": path, "$lt": path[:-1] + _AFTER_SEPARATOR}


def at_most(segments: int) -> Raw:
    """The condition that a path has no more than so many segments; true of any path without end."""
    return {"$regex": f"^{SEPARATOR}([^{SEPARATOR}]+{SEPARATOR}){{1,{segments}}}$"}
