"""Collections of equal documents, written as tables: the names of the columns once, then the values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pymongo.database import Database


def rows(columns: str, values: Iterable[tuple[Any, ...]], **constant: Any) -> list[dict[str, Any]]:
    """Documents with these columns; what is the same in each of them is given by name."""
    names = columns.split()
    return [dict(zip(names, row, strict=True)) | constant for row in values]


def table(
    database: Database[Any], name: str, columns: str, values: Iterable[tuple[Any, ...]], **constant: Any
) -> None:
    """A collection of such documents."""
    database[name].insert_many(rows(columns, values, **constant))
