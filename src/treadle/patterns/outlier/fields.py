"""Outlier arrays: the names of all parts, and what is stored in which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.alias_generators import to_camel
from pymongo import IndexModel

from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.binding import sibling, snake
from treadle.graph.calls import ArrayRule
from treadle.graph.rule import SNAPSHOTS, Models, Pattern, Place
from treadle.graph.scope import Scope
from treadle.model.bson_types import RESERVED
from treadle.model.codec import codec_of
from treadle.model.document import Document
from treadle.patterns.outlier.item_bytes import SMALL_BYTES, SMALL_TYPES, cut
from treadle.plan import Raw
from treadle.query.keys import freeze
from treadle.query.paths import drop, put, refuse_array_of_arrays, resolve, value_at


class OutlierFields(ArrayRule):
    """An outlier array at its place, with the names of all its parts."""

    pattern = "outlier"
    across_shards = False
    # The owner and its overflow change together.
    needs = SNAPSHOTS

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        shape = place.field.shape
        refuse_array_of_arrays(shape, place.label)
        if shape.kind != "list" or shape.optional:
            raise DeclarationError(
                f"{place.label} must be a list, and not None, to be an outlier array: list[…] = []",
                code="maintained-type",
            )
        self.limit: int = declared.limit
        self.page_projection = {self.path: {"$slice": self.limit + 1}}
        # With no more embedded than `low`, items come back from the overflow until `refilled` are embedded:
        # less than the limit, so that it does not swing.
        self.low = (self.limit - 1) // 2
        self.refilled = max(1, self.limit * 3 // 4)
        self.page_size: int = declared.page_size
        self.form = declared.layout
        self.unique = declared.unique
        item = shape.items[0] if shape.items else None
        # Whether no page of such items takes more bytes than it may.
        self.small = (
            item is not None
            and item.kind == "scalar"
            and item.python in SMALL_TYPES
            and self.page_size * SMALL_BYTES <= self.limits.array_bytes_max
        )
        self.flag_path = self._beside(declared.flag, "flag", ["has_overflow"], bool)
        counts = [f"{name}_count" for name in (singular(place.field.name), place.field.name)]
        count_path = self._beside(declared.count, "count", counts, int)
        # The declared fields that are maintained along, with their first values.
        self.beside = {path: value for path, value in ((count_path, 0), (self.flag_path, False)) if path}
        self.state = f"{RESERVED}.outlier.{self.path}"
        self.last_path = f"{self.state}.last"
        # Grows whenever items change their place, so that a reader can tell.
        self.moves_path = f"{self.state}.moves"
        self.count_path = count_path or f"{self.state}.count"
        self.field = place.field.stored
        self.overflow_collection = declared.overflow
        self.owner, self.item = self._names(place, declared)
        # Of an overflow document: the field of its items, or its one item; of its number; and of that in the
        # other layout.
        names = (self.field, "page", "position") if self.form == "page" else (self.item, "position", "page")
        self.content, self.order, self.other_order = names
        # The embedded part is the first page.
        self.before_first = 1 if self.form == "page" else 0
        arguments = get_args(place.field.info.annotation)
        self._item_type: Any = arguments[0] if arguments else Any
        self._list_type: Any = list[self._item_type]  # type: ignore[name-defined]
        self._items: type[BaseModel] = create_model(
            f"{place.entry.model.__name__}_{place.field.name}", items=(self._list_type, ...)
        )
        graph.add_side(self._side_model(place), place.label)

    def _beside(self, name: str | None, keyword: str, usual: Sequence[str], kind: type) -> str | None:
        """The stored path of a field that is maintained along; by its usual name if none is given."""
        place, own = self.place, self.place.owner.by_name
        if name is None:
            for field in filter(None, map(own.get, usual)):
                fits = field.shape.python is kind and not field.shape.optional
                if fits and not any(isinstance(mark, Pattern) for mark in field.shape.metadata):
                    return sibling(place, field.name, keyword)
            return None
        if name in own:
            shape, stored = own[name].shape, sibling(place, name, keyword)
        else:
            path = resolve(place.entry.codec, name, place.label, "source-field-missing")
            shape, stored = path.shape, path.stored
        if shape.python is not kind or shape.optional:
            raise DeclarationError(
                f"{place.label} has {keyword}={name!r}, which must be a field of type {kind.__name__}",
                code="maintained-type",
            )
        return stored

    def _names(self, place: Place, declared: Any) -> tuple[str, str]:
        owner = declared.owner or f"{snake(place.entry.model.__name__)}_id"
        item = declared.item
        if place.entry.model.__treadle__.naming == "camel":
            owner, item = to_camel(owner), to_camel(item)
        others = ("page", "count", self.field) if declared.layout == "page" else ("position", item)
        if owner in ("_id", RESERVED, *others) or item in ("_id", RESERVED, "position"):
            raise DeclarationError(
                f"{place.label} would store two things in its overflow under one name; choose another owner= "
                "or item=",
                code="stored-name-clash",
            )
        return owner, item

    def _side_model(self, place: Place) -> type[Document]:
        """The model of an overflow document, for its collection, validator and indexes."""
        identity: Any = place.entry.model.__pydantic_fields__["id"].rebuild_annotation()
        annotations: dict[str, Any] = {"owner": Annotated[identity, Field(alias=self.owner)], self.order: int}
        indexes = [IndexModel([(self.owner, 1), (self.order, 1)], unique=True)]
        if self.form == "page":
            annotations |= {"items": Annotated[self._list_type, Field(alias=self.field)], "count": int}
        else:
            annotations["content"] = Annotated[self._item_type, Field(alias=self.item)]
        if self.unique:
            indexes.append(IndexModel([(self.owner, 1), (self.content, 1)], unique=True))
        kind: Any = type(Document)
        made: type[Document] = kind(
            f"{place.entry.model.__name__}_{place.field.name}_overflow",
            (Document,),
            {"__annotations__": annotations, "__module__": __name__},
            collection=self.overflow_collection,
            validation=place.entry.model.__treadle__.validation,
            indexes=indexes,
        )
        return made

    # -- items -----------------------------------------------------------------------------

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
            raise DataError(f"{self.place.label}: {error.message}", code=error.code) from None
        values: list[Any] = loaded.items
        return values

    # -- stored parts ----------------------------------------------------------------------------

    def value(self, owner: Raw, path: str) -> Any:
        return value_at(owner, path)

    def embedded(self, owner: Raw) -> list[Any]:
        """The embedded items of a stored owner."""
        items = self.value(owner, self.path)
        return items if isinstance(items, list) else []

    def flagged(self, owner: Raw) -> bool:
        """Whether an owner says that it has overflow."""
        marked = self.flag_path is not None and self.value(owner, self.flag_path) is True
        return marked or self.value(owner, self.last_path) is not None

    def settled(self, owner: Raw) -> bool:
        """Whether an owner has all that is maintained; older documents may not."""
        paths = (self.path, self.count_path, self.last_path)
        embedded, count, last = (self.value(owner, path) for path in paths)
        if isinstance(count, bool) or not isinstance(count, int):
            return False
        if not isinstance(embedded, list) or len(embedded) > self.limit:
            return False
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

    @property
    def owners(self) -> Scope:
        """The documents that have the array."""
        return self.target.targets.with_deleted

    def projection(self) -> Raw:
        """What of an owner concerns its array."""
        return dict.fromkeys([self.path, self.state, *self.beside], 1)

    def owner_sets(self, count: int, last: int | None) -> tuple[Raw, Raw]:
        """What to `$set` and `$unset` in the owner."""
        sets: Raw = {self.count_path: count}
        if self.flag_path:
            sets[self.flag_path] = last is not None
        if last is None:
            return sets, {self.last_path: ""}
        return {**sets, self.last_path: last}, {}

    def owned(self, key: Any) -> Raw:
        """The condition on overflow documents of one owner; an id never becomes an operator."""
        return {self.owner: {"$eq": key}}

    def missing(self, key: Any) -> DataError:
        return DataError(
            f"{self.target.model.__name__} {key!r} is not stored (any more), so it has no {self.name}; "
            "insert it first",
            code="array-owner-missing",
        )

    def contents(self, document: Raw) -> list[Any]:
        """The items of an overflow document."""
        if self.content not in document and self.other_order in document:
            raise self.other_layout()
        items = document.get(self.content)
        if self.form == "documents":
            return [items] if self.item in document else []
        return items if isinstance(items, list) else []

    def other_layout(self) -> DataError:
        stored = "page" if self.form == "documents" else "documents"
        return DataError(
            f"{self.place.label} has layout={self.form!r}, but {self.overflow_collection} holds overflow in "
            f"the layout {stored!r}; declare layout={stored!r} again, or read the items with it and "
            "insert the documents again with another overflow=",
            code="overflow-layout",
        )

    def pages(self, key: Any, items: Sequence[Any], last: int | None) -> tuple[list[Raw], int | None]:
        """New overflow documents for items, without ids, and the number of the last."""
        number = self.before_first if last is None else last
        made: list[Raw] = []
        size = self.page_size if self.form == "page" else 1
        for part in cut(items, size, self.limits.array_bytes_max):
            number += 1
            held = {self.field: part, "count": len(part)} if self.form == "page" else {self.item: part[0]}
            made.append({self.owner: key, self.order: number, **held})
        return made, number if made else last

    def split(self, raw: Raw) -> list[Raw]:
        """Cut the array of a new document to its embedded part; the overflow documents."""
        items = self.embedded(raw)
        # A document that was of another kind may hold what is left of another array's state.
        drop(raw, self.state)
        if self.unique:
            items = distinct(items)
        made, last = self.pages(raw["_id"], items[self.limit :], None)
        sets, _ = self.owner_sets(len(items), last)
        for path, value in {self.path: items[: self.limit], **sets}.items():
            put(raw, path, value)
        return made


def first_of_each(items: Sequence[Any], known: Sequence[Any] = ()) -> list[bool]:
    """Per item whether it is neither known nor a repetition, as the server compares."""
    seen = {freeze(item) for item in known}
    new = []
    for item in map(freeze, items):
        new.append(item not in seen)
        seen.add(item)
    return new


def distinct(items: Sequence[Any]) -> list[Any]:
    """Items without repetitions."""
    return list(compress(items, first_of_each(items)))


def singular(name: str) -> str:
    """The usual singular of a field's name, for the usual name of its count."""
    if name.endswith("ies"):
        return f"{name[:-3]}y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name
