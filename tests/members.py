"""Models with outlier arrays, and what must be true of everything they store."""

from __future__ import annotations

from typing import Annotated, Any

from treadle import Document, Outlier

LIMIT = 4
PAGE = 3


class Plain(Document, collection="plain"):
    id: int
    members: Annotated[list[int], Outlier(limit=LIMIT, overflow="plain_overflow", page_size=PAGE)] = []
    member_count: int = 0
    has_overflow: bool = False


class Unique(Document, collection="unique"):
    id: int
    members: Annotated[
        list[int], Outlier(limit=LIMIT, overflow="unique_overflow", page_size=PAGE, unique=True)
    ] = []
    member_count: int = 0
    has_overflow: bool = False


class Rows(Document, collection="rows"):
    id: int
    members: Annotated[list[int], Outlier(limit=LIMIT, overflow="rows_overflow", layout="documents")] = []
    member_count: int = 0
    has_overflow: bool = False


class UniqueRows(Document, collection="unique_rows"):
    id: int
    members: Annotated[
        list[int], Outlier(limit=LIMIT, overflow="unique_rows_overflow", layout="documents", unique=True)
    ] = []
    member_count: int = 0
    has_overflow: bool = False


MODELS: list[Any] = [Plain, Unique, Rows, UniqueRows]


def overflow_of(model: Any) -> str:
    return f"{model.__treadle__.collection}_overflow"


def owner_of(model: Any) -> str:
    return {"UniqueRows": "unique_rows_id"}.get(model.__name__, f"{model.__name__.lower()}_id")


def stored(database: Any, model: Any, key: Any) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """An owner and its overflow documents in order, as anybody reads them."""
    order = "position" if model in (Rows, UniqueRows) else "page"
    owner = database[model.__treadle__.collection].find_one({"_id": key})
    pages = list(database[overflow_of(model)].find({owner_of(model): key}).sort(order))
    return owner, pages


def items(database: Any, model: Any, key: Any) -> list[Any]:
    """All items in their order, read without Treadle."""
    owner, pages = stored(database, model, key)
    if owner is None:
        return []
    overflow = [item for page in pages for item in ([page["item"]] if "item" in page else page["members"])]
    return [*owner["members"], *overflow]


def wrong(database: Any, model: Any, key: Any) -> list[str]:
    """Every invariant of one array that does not hold."""
    owner, pages = stored(database, model, key)
    if owner is None:
        return ["overflow without an owner"] if pages else []
    found = []
    every = items(database, model, key)
    if len(owner["members"]) > LIMIT:
        found.append(f"{len(owner['members'])} embedded")
    if owner["member_count"] != len(every):
        found.append(f"count {owner['member_count']} for {len(every)} items")
    if owner["has_overflow"] is not bool(pages):
        found.append(f"flag {owner['has_overflow']} with {len(pages)} overflow documents")
    if model in (Unique, UniqueRows) and len(set(every)) < len(every):
        found.append("an item twice")
    for page in pages:
        if "members" in page and (page["count"] != len(page["members"]) or not 1 <= page["count"] <= PAGE):
            found.append(f"page {page['page']} says {page['count']} of {len(page['members'])}")
    if (owner.get("_treadle") or {}).get("outlier", {}).get("members", {}).get("open"):
        found.append("an operation is open")
    return found
