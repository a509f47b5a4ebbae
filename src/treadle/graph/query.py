"""What a caller asks of `find` and its like, on its way from the Store to the layout that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from treadle.errors import DataError, UsageError
from treadle.model.codec import Codec
from treadle.model.text import get_logger, quote
from treadle.plan import Raw
from treadle.query.filters import Sort

log = get_logger(__name__)

# In the place of a document that could not be read.
SKIPPED: Any = object()


class ReadAs(Protocol):
    """What documents are read as in place of their model: a `Card`."""

    projection: dict[str, Any]
    paths: Any
    load: Callable[[Raw], Any]


class Query(NamedTuple):
    """A query in the caller's terms; layouts parse its filter and its sort."""

    filter: Any = None
    sort: Sort | None = None
    skip: int = 0
    limit: int | None = None
    # What documents are read as, where that is not their model.
    card: ReadAs | None = None
    # Whether it asks for the soft-deleted documents alone.
    deleted: bool = False
    # Documents that do not fit their model are skipped, and their errors added here; None raises these.
    errors: list[DataError] | None = None

    @property
    def projection(self) -> Raw | None:
        """What is requested of each document; None for all of it."""
        return None if self.card is None else self.card.projection

    def require_window(self) -> None:
        """Refuse a skip or a limit that is not a number of documents."""
        for name, value, least in (("skip", self.skip, 0), ("limit", self.limit, 1)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and least <= value < 2**63):
                # The server takes a limit of 0 for no limit.
                raise UsageError(
                    f"{name}={quote(value)} is not a whole number from {least}", code="filter-invalid"
                )

    def loader(self, codec: Codec[Any]) -> Callable[[Raw], Any]:
        """Return what makes of a document what the caller asked for; it may return SKIPPED."""
        load, errors = codec.load if self.card is None else self.card.load, self.errors
        if errors is None:
            return load

        def load_or_skip(raw: Raw) -> Any:
            try:
                return load(raw)
            except DataError as error:
                log.warning("%s", error)
                errors.append(error)
                return SKIPPED

        return load_or_skip
