"""The two formats in which items beyond the limit are stored: pages of many, or one document per item.

A document of either format is called a page; `layout="documents"` has pages of
one item. All functions that write run in a transaction that has written the
owner already, so that two writers of one array conflict there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pymongo import DeleteOne, ReplaceOne

from treadle.engine.sizes import bson_size_bound, count_fitting, cut
from treadle.errors import DataError
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    find,
    find_one,
    insert_many,
    update_one,
)
from treadle.query.keys import freeze

# Pages of many items that are read at a time.
PAGES_READ = 4
# Pages of one item that are read at a time.
ITEMS_READ = 1_000


@dataclass(frozen=True)
class OverflowFormat:
    """How the overflow of one array is stored."""

    label: str
    collection_name: str
    # The field of the owner's id.
    owner: str
    # The field of the items, or of the one item.
    content: str
    page_size: int
    bytes_max: int
    layout: ClassVar[str]
    # The field of a page's number, and that of the other format.
    order: ClassVar[str]
    other_order: ClassVar[str]
    first_number: ClassVar[int]
    # Pages that are read at a time.
    pages_read: ClassVar[int]
    # What a page says that it holds, as an expression.
    stored_count: ClassVar[Any]

    def page(self, key: Any, number: int, items: Sequence[Any]) -> Raw:
        """Return a page without an id."""
        raise NotImplementedError  # pragma: no cover

    def annotations(self, item_type: Any) -> dict[str, Any]:
        """Return the fields of a page's model, beside owner and number."""
        raise NotImplementedError  # pragma: no cover

    @property
    def items_expression(self) -> Raw:
        """The items of a page, as an expression; always an array."""
        raise NotImplementedError  # pragma: no cover

    def items_of(self, page: Raw) -> list[Any]:
        """Return the items of a page; raises `DataError` if it is of the other format."""
        if self.content in page:
            return self._as_list(page[self.content])
        if self.other_order in page:
            raise self.other_layout()
        return []

    def _as_list(self, content: Any) -> list[Any]:
        raise NotImplementedError  # pragma: no cover

    def other_layout(self) -> DataError:
        stored = "page" if self.layout == "documents" else "documents"
        return DataError(
            f"{self.label} has layout={self.layout!r}, but {self.collection_name} holds overflow in the "
            f"layout {stored!r}; declare layout={stored!r} again, or read the items with it and insert the "
            "documents again with another overflow=",
            code="overflow-layout",
        )

    def pages(self, key: Any, items: Sequence[Any], last: int | None) -> tuple[list[Raw], int | None]:
        """Return new pages for items, after the page with the number `last`, and the new last number."""
        first = self.first_number if last is None else last + 1
        parts = enumerate(cut(items, self.page_size, self.bytes_max), first)
        made = [self.page(key, number, part) for number, part in parts]
        return made, made[-1][self.order] if made else last

    # -- reads -----------------------------------------------------------------------------------

    def filter(self, key: Any) -> Raw:
        """Return the condition on the pages of one owner; an id never becomes an operator."""
        return {self.owner: {"$eq": key}}

    def read(self, key: Any, after: int | None = None, limit: int = 0) -> Plan[list[Raw]]:
        """Return the pages of one owner in their order, those after a number if one is given."""
        condition = self.filter(key) if after is None else {**self.filter(key), self.order: {"$gt": after}}
        return find(self.collection_name, condition, sort=[(self.order, 1)], limit=limit)

    def read_slice(self, key: Any, skip: int, size: int) -> Plan[list[Any]]:
        """Return at most `size` items of one owner, after `skip` of them."""
        raise NotImplementedError  # pragma: no cover

    def contains(self, key: Any, item: Any) -> Plan[bool]:
        """Whether the pages of one owner hold an item."""
        condition = {**self.filter(key), self.content: {"$eq": item}}
        return (yield from find_one(self.collection_name, condition, {"_id": 1})) is not None

    def find_items(self, key: Any, items: Sequence[Any]) -> Plan[list[Any]]:
        """Return those of the items that the pages of one owner hold."""
        asked = {"$in": ["$$this", {"$literal": list(items)}]}
        among = {"$filter": {"input": self.items_expression, "cond": asked}}
        condition = {**self.filter(key), self.content: {"$in": list(items)}}
        rows = yield from aggregate(
            self.collection_name, [{"$match": condition}, {"$project": {"items": among}}]
        )
        return [item for row in rows for item in row["items"]]

    # -- writes ----------------------------------------------------------------------------------

    def append(self, key: Any, items: Sequence[Any], last: int | None) -> Plan[int | None]:
        """Store items at the end. Returns the number of the last page, which was `last` before."""
        pages, last = self.pages(key, items, last)
        if pages:
            yield from insert_many(self.collection_name, pages)
        return last

    def remove(self, key: Any, item: Any) -> Plan[int]:
        """Remove every occurrence of an item. Returns their number."""
        pages = yield from find(self.collection_name, {**self.filter(key), self.content: {"$eq": item}})
        removed = 0
        operations: list[Any] = []
        for page in pages:
            items = self.items_of(page)
            others = without(items, item)
            removed += len(items) - len(others)
            same = {"_id": page["_id"]}
            smaller = {**page, **self.page(key, page[self.order], others)} if others else None
            operations.append(DeleteOne(same) if smaller is None else ReplaceOne(same, smaller))
        if operations:
            yield from bulk_write(self.collection_name, operations)
        return removed


class ItemPages(OverflowFormat):
    """Pages of many items, numbered from 2: the embedded part is the first page."""

    layout = "page"
    order = "page"
    other_order = "position"
    first_number = 2
    pages_read = PAGES_READ
    stored_count = "$count"

    def page(self, key: Any, number: int, items: Sequence[Any]) -> Raw:
        return {self.owner: key, "page": number, self.content: list(items), "count": len(items)}

    def annotations(self, item_type: Any) -> dict[str, Any]:
        return {"items": Annotated[list[item_type], Field(alias=self.content)], "count": int}

    @property
    def items_expression(self) -> Raw:
        return array_expression(self.content)

    def _as_list(self, content: Any) -> list[Any]:
        return content if isinstance(content, list) else []

    def read_slice(self, key: Any, skip: int, size: int) -> Plan[list[Any]]:
        order = [(self.order, 1)]
        rows = yield from find(self.collection_name, self.filter(key), {"page": 1, "count": 1}, sort=order)
        chosen: list[Any] = []
        start = passed = 0
        # Pages may be short, so that only their counts tell where an item is.
        for row in rows:
            count = row.get("count", 0)
            if passed + count > skip and passed < skip + size:
                start = start if chosen else skip - passed
                chosen.append(row["_id"])
            passed += count
        pages = yield from find(self.collection_name, {"_id": {"$in": chosen}}, sort=order)
        items = [item for page in pages for item in self.items_of(page)]
        return items[start : start + size]

    def append(self, key: Any, items: Sequence[Any], last: int | None) -> Plan[int | None]:
        if last is not None:
            if (yield from self._push(key, items, last)):
                return last
            items = items[(yield from self._fill(key, items, last)) :]
        return (yield from super().append(key, items, last))

    def _push(self, key: Any, items: Sequence[Any], last: int) -> Plan[bool]:
        """Add all items to the last page, if it has room for them."""
        if len(items) > self.page_size:
            return False
        # A page that became too large would be an error, which ends the transaction.
        room = self.bytes_max - sum(map(bson_size_bound, items))
        condition = {
            **self.filter(key),
            "page": last,
            "count": {"$lte": self.page_size - len(items)},
            "$expr": {"$lte": [{"$bsonSize": "$$ROOT"}, room]},
        }
        result = yield from update_one(self.collection_name, condition, self._addition(items))
        return bool(result.matched_count)

    def _fill(self, key: Any, items: Sequence[Any], last: int) -> Plan[int]:
        """Add to the last page the items for which it has room. Returns their number."""
        projection = {"count": 1, "bytes": {"$bsonSize": "$$ROOT"}}
        stages = [{"$match": {**self.filter(key), "page": last}}, {"$project": projection}]
        for page in (yield from aggregate(self.collection_name, stages)):
            room = max(0, self.page_size - page.get("count", self.page_size))
            count = count_fitting(items, room, self.bytes_max - page["bytes"])
            if count:
                added = self._addition(items[:count])
                yield from update_one(self.collection_name, {"_id": page["_id"]}, added)
            return count
        return 0

    def _addition(self, items: Sequence[Any]) -> Raw:
        return {"$push": {self.content: {"$each": list(items)}}, "$inc": {"count": len(items)}}


class SingleItems(OverflowFormat):
    """One document per item, numbered from 1."""

    layout = "documents"
    order = "position"
    other_order = "page"
    first_number = 1
    pages_read = ITEMS_READ
    stored_count = 1

    def page(self, key: Any, number: int, items: Sequence[Any]) -> Raw:
        return {self.owner: key, "position": number, self.content: items[0]}

    def annotations(self, item_type: Any) -> dict[str, Any]:
        return {"content": Annotated[item_type, Field(alias=self.content)]}

    @property
    def items_expression(self) -> Raw:
        is_missing = {"$eq": [{"$type": f"${self.content}"}, "missing"]}
        return {"$cond": [is_missing, [], [f"${self.content}"]]}

    def _as_list(self, content: Any) -> list[Any]:
        return [content]

    def read_slice(self, key: Any, skip: int, size: int) -> Plan[list[Any]]:
        order = [(self.order, 1)]
        pages = yield from find(self.collection_name, self.filter(key), sort=order, skip=skip, limit=size)
        return [item for page in pages for item in self.items_of(page)]


def array_expression(path: str) -> Raw:
    """Return the array at a path as an expression; empty where there is something else."""
    return {"$cond": [{"$isArray": f"${path}"}, f"${path}", []]}


def without(items: Sequence[Any], item: Any) -> list[Any]:
    """Return all items but one, as the server compares."""
    removed = freeze(item)
    return [each for each in items if freeze(each) != removed]
