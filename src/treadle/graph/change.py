"""A source document was written: what it was, what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.plan import Raw


@dataclass(frozen=True, slots=True)
class Change:
    """Before and after of one document, as stored; None where there was or is none.

    An empty `before` says that there was one, but nobody looked.

    `fresh` says that the document was inserted under an id that nobody else
    can know yet, so that nothing can refer to it.
    """

    collection: str
    id: Any
    before: Raw | None
    after: Raw | None
    fresh: bool = False
