"""Outlier arrays: the names of all parts, and what is stored in which."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from bson.decimal128 import Decimal128
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.alias_generators import to_camel
from pymongo import IndexModel

from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.pattern import Entry, Models, Pattern, Place, Rule
from treadle.model.bson_types import RESERVED
from treadle.model.codec import codec_of
from treadle.model.document import Document
from treadle.patterns.outlier.item_bytes import cut
from treadle.plan import Raw
from treadle.query.keys import freeze
from treadle.query.paths import put, refuse_array_of_arrays, resolve, value_at

# The embedded part is the first page.
FIRST_PAGE = 2


class OutlierFields(Rule):
    """An outlier array at its place, with the names of all its parts."""

    pattern = "outlier"
    # The owner and its overflow change together.
    needs_transactions = True

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        self._check_field(place)
        self.limit: int = declared.limit
        self.page_size: int = declared.page_size
        self.layout = declared.layout
        self.unique = declared.unique
        self.python_path = ".".join([*(step.name for step in place.steps), place.field.name])
        self.flag_path = self._beside(declared.flag, "flag", ["has_overflow"], bool)
        counts = [f"{name}_count" for name in (singular(place.field.name), place.field.name)]
        declared_count = self._beside(declared.count, "count", counts, int)
        self.state = f"{RESERVED}.outlier.{self.path}"
        self.last_path = f"{self.state}.last"
        # Grows whenever items change their place, so that a reader can tell.
        self.moves_path = f"{self.state}.moves"
        self.count_path = declared_count or f"{self.state}.count"
        self.names_count = declared_count is not None
        self.field = place.field.stored
        self.collection = declared.overflow
        self.owner, self.item = self._names(place, declared)
        self.order = "page" if self.layout == "page" else "position"
        self._items = self._item_codec(place)
        self.side: Entry[Any] = graph.add_side(self._side_model(place), place.label)

    # -- the declaration --------------------------------------------------------------

    def _check_field(self, place: Place) -> None:
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; an outlier array belongs to the document itself "
                "or to a nested model",
                code="maintained-in-array",
            )
        shape = place.field.shape
        refuse_array_of_arrays(shape, place.label)
        if shape.kind != "list" or shape.optional:
            raise DeclarationError(
                f"{place.label} must be a list, and not None, to be an outlier array: list[…] = []",
                code="maintained-type",
            )

    def _beside(self, name: str | None, keyword: str, usual: Sequence[str], kind: type) -> str | None:
        """The stored path of a field that is maintained along; by its usual name if none is given."""
        place = self.place
        own = {each.name: each for each in place.owner.fields}
        prefix = [step.stored for step in place.steps]
        if name is None:
            for candidate in usual:
                field = own.get(candidate)
                if field is None or field.shape.python is not kind or field.shape.optional:
                    continue
                if not any(isinstance(mark, Pattern) for mark in field.shape.metadata):
                    return ".".join([*prefix, field.stored])
            return None
        if name in own:
            shape, stored = own[name].shape, ".".join([*prefix, own[name].stored])
        else:
            found = resolve(place.entry.codec, name, place.label, "source-field-missing")
            shape, stored = found.shape, found.stored
        if shape.python is not kind or shape.optional:
            raise DeclarationError(
                f"{place.label} has {keyword}={name!r}, which must be a field of type {kind.__name__}",
                code="maintained-type",
            )
        return stored

    def _names(self, place: Place, declared: Any) -> tuple[str, str]:
        owner = declared.owner or f"{snake(place.entry.model.__name__)}_id"
        item = declared.item
        if place.entry.settings.naming == "camel":
            owner, item = to_camel(owner), to_camel(item)
        taken = ["_id", RESERVED, "page", "count", self.field] if declared.layout == "page" else []
        taken += ["_id", RESERVED, "position", item] if declared.layout == "documents" else []
        if owner in taken or item in ("_id", RESERVED, "position"):
            raise DeclarationError(
                f"{place.label} would store two things in its overflow under one name; choose another owner= "
                "or item=",
                code="stored-name-clash",
            )
        return owner, item

    def _item_codec(self, place: Place) -> type[BaseModel]:
        annotation = place.field.info.annotation
        arguments = get_args(annotation)
        self._annotation: Any = arguments[0] if arguments else Any
        items: Any = list[self._annotation]  # type: ignore[name-defined]
        return create_model(f"{place.entry.model.__name__}_{place.field.name}", items=(items, ...))

    def _side_model(self, place: Place) -> type[Document]:
        """The model of an overflow document, for its collection, validator and indexes."""
        identity: Any = place.entry.model.__pydantic_fields__["id"].rebuild_annotation()
        annotations: dict[str, Any] = {"owner": Annotated[identity, Field(alias=self.owner)]}
        keys = [(self.owner, 1), (self.order, 1)]
        indexes = [IndexModel(keys, unique=True)]
        if self.layout == "page":
            many: Any = list[self._annotation]  # type: ignore[name-defined]
            annotations |= {"page": int, "items": Annotated[many, Field(alias=self.field)], "count": int}
        else:
            annotations |= {"position": int, "content": Annotated[self._annotation, Field(alias=self.item)]}
        if self.unique:
            indexes.append(IndexModel([(self.owner, 1), (self.content, 1)], unique=True))
        kind: Any = type(Document)
        made: type[Document] = kind(
            f"{place.entry.model.__name__}_{place.field.name}_overflow",
            (Document,),
            {"__annotations__": annotations, "__module__": __name__},
            collection=self.collection,
            validation=place.entry.settings.validation,
            indexes=indexes,
        )
        return made

    # -- items -----------------------------------------------------------------------------

    @property
    def content(self) -> str:
        """Where an overflow document holds its items, or its one item."""
        return self.field if self.layout == "page" else self.item

    def dump(self, items: Sequence[Any]) -> list[Any]:
        """The stored form of items that a caller gave."""
        try:
            held = self._items(items=list(items))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = "".join(f".{part}" for part in problem["loc"][2:])
            raise UsageError(
                f"this is no item of {self.place.label}{where}: {problem['msg']}", code="item-invalid"
            ) from None
        dumped: list[Any] = codec_of(self._items).dump(held, [])["items"]
        return dumped

    def load(self, items: Sequence[Any]) -> list[Any]:
        """The items as the model declares them."""
        try:
            loaded: Any = codec_of(self._items).load({"items": list(items)})
        except DataError as error:
            raise DataError(f"{self.place.label}: {error}", code=error.code) from None
        found: list[Any] = loaded.items
        return found

    # -- stored parts ----------------------------------------------------------------------------

    def embedded(self, owner: Raw) -> list[Any]:
        """The embedded items of a stored owner."""
        found = value_at(owner, self.path)
        return found if isinstance(found, list) else []

    def value(self, owner: Raw, path: str) -> Any:
        return value_at(owner, path)

    def flagged(self, owner: Raw) -> bool:
        """Whether an owner says that it has overflow."""
        marked = self.flag_path is not None and self.value(owner, self.flag_path) is True
        return marked or self.value(owner, self.last_path) is not None

    def settled(self, owner: Raw) -> bool:
        """Whether an owner has all that is maintained; older documents may not."""
        count = self.value(owner, self.count_path)
        if isinstance(count, bool) or not isinstance(count, int):
            return False
        embedded = value_at(owner, self.path)
        if not isinstance(embedded, list) or len(embedded) > self.limit:
            return False
        last = self.value(owner, self.last_path)
        if self.flag_path is not None and (self.value(owner, self.flag_path) is True) != (last is not None):
            return False
        return last is not None or len(embedded) == count

    def ordinary(self) -> Raw:
        """The condition that a document has no overflow, and all that is maintained."""
        condition: Raw = {self.last_path: {"$exists": False}, self.count_path: {"$type": "number"}}
        condition[self.path] = {"$type": "array"}
        if self.flag_path:
            condition[self.flag_path] = {"$ne": True}
        return condition

    def projection(self) -> Raw:
        """What of an owner concerns its array."""
        paths = [self.path, self.state, *([self.flag_path] if self.flag_path else [])]
        if self.names_count:
            paths.append(self.count_path)
        return dict.fromkeys(paths, 1)

    def owner_sets(self, count: int, last: int | None) -> tuple[Raw, Raw]:
        """What to `$set` and `$unset` in the owner."""
        sets: Raw = {self.count_path: count}
        if self.flag_path:
            sets[self.flag_path] = last is not None
        if last is None:
            return sets, {self.last_path: ""}
        return {**sets, self.last_path: last}, {}

    def contents(self, document: Raw) -> list[Any]:
        """The items of an overflow document."""
        if self.is_other_layout(document):
            raise self.other_layout()
        if self.layout == "documents":
            return [document[self.item]] if self.item in document else []
        found = document.get(self.field)
        return found if isinstance(found, list) else []

    def is_other_layout(self, document: Raw) -> bool:
        """Whether an overflow document was written under the other `layout=`."""
        if self.layout == "documents":
            return self.item not in document and "page" in document
        return self.field not in document and "position" in document

    def of_other_layout(self) -> Raw:
        """The condition that `is_other_layout` stands for."""
        content, order = (self.item, "page") if self.layout == "documents" else (self.field, "position")
        return {content: {"$exists": False}, order: {"$exists": True}}

    def in_other_layout(self) -> Raw:
        """The same as an expression."""
        missing, there = self.of_other_layout()
        is_missing = {"$eq": [{"$type": f"${missing}"}, "missing"]}
        return {"$and": [is_missing, {"$ne": [{"$type": f"${there}"}, "missing"]}]}

    def other_layout(self) -> DataError:
        stored = "page" if self.layout == "documents" else "documents"
        return DataError(
            f"{self.place.label} has layout={self.layout!r}, but {self.collection} holds overflow in the "
            f"layout {stored!r}; declare layout={stored!r} again, or read the items with it and insert the "
            "documents anew with another overflow=",
            code="overflow-layout",
        )

    def page(self, key: Any, number: int, items: Sequence[Any]) -> Raw:
        """A new overflow document; with its id left to whoever stores it."""
        if self.layout == "documents":
            (item,) = items
            return {self.owner: key, "position": number, self.item: item}
        return {self.owner: key, "page": number, self.field: list(items), "count": len(items)}

    def pages(self, key: Any, items: Sequence[Any], last: int | None) -> tuple[list[Raw], int | None]:
        """New overflow documents for items, and the number of the last."""
        size = 1 if self.layout == "documents" else self.page_size
        number = last if last is not None else self.before_first
        made = []
        for part in cut(items, size, self.target.limits.array_bytes_max):
            number += 1
            made.append(self.page(key, number, part))
        return made, number if made else last

    @property
    def before_first(self) -> int:
        return FIRST_PAGE - 1 if self.layout == "page" else 0

    def split(self, raw: Raw) -> tuple[list[Raw], int]:
        """Cut the array of a new document to its embedded part.

        Returns the overflow documents, and how many duplicates were ignored.
        """
        given = self.embedded(raw)
        items = distinct(given) if self.unique else given
        made, last = self.pages(raw["_id"], items[self.limit :], None)
        put(raw, self.path, items[: self.limit])
        sets, _ = self.owner_sets(len(items), last)
        for path, value in sets.items():
            put(raw, path, value)
        return made, len(given) - len(items)

    @property
    def low(self) -> int:
        """With no more embedded than this, items come back from the overflow."""
        return (self.limit - 1) // 2

    @property
    def refilled(self) -> int:
        """How many are embedded after items came back; less than the limit, so that it does not swing."""
        return max(1, self.limit * 3 // 4)


def distinct(items: Sequence[Any], known: Sequence[Any] = ()) -> list[Any]:
    """Items without those that occurred before, as the server compares."""
    seen = {comparable(item) for item in known}
    kept = []
    for item in items:
        mark = comparable(item)
        if mark not in seen:
            seen.add(mark)
            kept.append(item)
    return kept


def comparable(item: Any) -> Any:
    """What is equal for two items if and only if they are equal on the server."""
    if isinstance(item, bool):
        return (bool, item)
    if isinstance(item, dict):
        return tuple((key, comparable(value)) for key, value in item.items())
    if isinstance(item, list):
        return (list, tuple(comparable(value) for value in item))
    return _number(item)


def _number(item: Any) -> Any:
    return item.to_decimal() if isinstance(item, Decimal128) else freeze(item)


def snake(name: str) -> str:
    """`BlogPost` as `blog_post`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def singular(name: str) -> str:
    """The usual singular of a field's name, for the usual name of its count."""
    if name.endswith("ies"):
        return f"{name[:-3]}y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name
