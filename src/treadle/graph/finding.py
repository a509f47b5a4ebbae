"""What `verify` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Something stored is not what it should be."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any
