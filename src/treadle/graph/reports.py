"""What set-up, proof and long runs tell their callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that set-up did, or would do."""

    what: str
    collection: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.collection}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something stored is not what it should be."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long run has come with one model."""

    model: str
    done: int
    total: int


Report = Callable[[Progress], None]
