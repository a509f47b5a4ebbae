"""An outlier array at its place in a model: the stored names of its parts, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.alias_generators import to_camel
from pymongo import IndexModel

from treadle.engine.documents import auto_fields, stamping
from treadle.engine.updates import concerns
from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.binding import sibling, snake
from treadle.graph.calls import ArrayRule
from treadle.graph.rule import REVISION, SNAPSHOTS, Models, Pattern, Place
from treadle.graph.scope import Scope
from treadle.model.bson_types import RESERVED
from treadle.model.codec import codec_of
from treadle.model.document import Document
from treadle.patterns.outlier.overflow_format import ItemPages, OverflowFormat, SingleItems
from treadle.plan import Plan, Raw, by_id, update_one
from treadle.query.keys import freeze
from treadle.query.paths import drop, put, refuse_array_of_arrays, resolve, value_at


class StoredArray(ArrayRule):
    """Where the parts of an outlier array are stored, and what they hold."""

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
        self.unique: bool = declared.unique
        self.page_projection = {self.path: {"$slice": self.limit + 1}}
        # Treadle's own state of the array in its owner.
        self.state_path = f"{RESERVED}.outlier.{self.path}"
        # The number of the last page; there if and only if there is overflow.
        self.last_path = f"{self.state_path}.last"
        self.flag_path = self._maintained(declared.flag, "flag", ["has_overflow"], bool)
        names = [f"{name}_count" for name in (singular(place.field.name), place.field.name)]
        count_path = self._maintained(declared.count, "count", names, int)
        self.count_path = count_path or f"{self.state_path}.count"
        # The declared fields that are maintained with the array, with their first values.
        self.beside = {path: value for path, value in ((count_path, 0), (self.flag_path, False)) if path}
        (item_type, *_) = get_args(place.field.info.annotation) or (Any,)
        self.overflow = self._format(declared)
        self._items: type[BaseModel] = create_model(
            f"{place.entry.model.__name__}_{place.field.name}",
            items=(list[item_type], ...),  # type: ignore[valid-type]
        )
        graph.add_side(self._page_model(item_type), place.label)

    # -- declaration ---------------------------------------------------------------------------

    def _maintained(self, name: str | None, keyword: str, usual: Sequence[str], kind: type) -> str | None:
        """Return the stored path of a flag or count; one with a usual name is taken where none is given."""
        place, own = self.place, self.place.owner.by_name
        if name is None:
            fields = [own[each] for each in usual if each in own]
            free = (each.name for each in fields if _may_be_taken(each, kind))
            taken = next(free, None)
            return None if taken is None else sibling(place, taken, keyword)
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

    def _format(self, declared: Any) -> OverflowFormat:
        """Return how the overflow is stored; refuses names that it would use twice."""
        place, field = self.place, self.place.field.stored
        owner = declared.owner or f"{snake(place.entry.model.__name__)}_id"
        item = declared.item
        if place.entry.model.__treadle__.naming == "camel":
            owner, item = to_camel(owner), to_camel(item)
        paged = declared.layout == "page"
        others = ("page", "count", field) if paged else ("position", item)
        if owner in ("_id", RESERVED, *others) or item in ("_id", RESERVED, "position"):
            raise DeclarationError(
                f"{place.label} would store two things in its overflow under one name; choose another owner= "
                "or item=",
                code="stored-name-clash",
            )
        bytes_max = self.limits.array_bytes_max
        if paged:
            return ItemPages(place.label, declared.overflow, owner, field, declared.page_size, bytes_max)
        return SingleItems(place.label, declared.overflow, owner, item, 1, bytes_max)

    def _page_model(self, item_type: Any) -> type[Document]:
        """Return the model of a page, for its collection, validator and indexes."""
        entry, overflow = self.place.entry, self.overflow
        identity: Any = entry.model.__pydantic_fields__["id"].rebuild_annotation()
        annotations: dict[str, Any] = {
            "owner": Annotated[identity, Field(alias=overflow.owner)],
            overflow.order: int,
            **overflow.annotations(item_type),
        }
        indexes = [IndexModel([(overflow.owner, 1), (overflow.order, 1)], unique=True)]
        if self.unique:
            indexes.append(IndexModel([(overflow.owner, 1), (overflow.content, 1)], unique=True))
        kind: Any = type(Document)
        model: type[Document] = kind(
            f"{entry.model.__name__}_{self.place.field.name}_overflow",
            (Document,),
            {"__annotations__": annotations, "__module__": __name__},
            collection=overflow.collection_name,
            validation=entry.model.__treadle__.validation,
            indexes=indexes,
        )
        return model

    # -- items -----------------------------------------------------------------------------------

    def dump(self, items: Sequence[Any]) -> list[Any]:
        """Return a caller's items as they are stored; raises `UsageError` for one that is invalid."""
        try:
            valid = self._items(items=list(items))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = "".join(f".{part}" for part in problem["loc"][2:])
            raise UsageError(
                f"this is no item of {self.place.label}{where}: {problem['msg']}", code="item-invalid"
            ) from None
        stored: list[Any] = codec_of(self._items).dump(valid, [])["items"]
        return stored

    def load(self, items: Sequence[Any]) -> list[Any]:
        """Return stored items as the model declares them."""
        try:
            loaded: Any = codec_of(self._items).load({"items": list(items)})
        except DataError as error:
            raise DataError(f"{self.place.label}: {error.message}", code=error.code) from None
        values: list[Any] = loaded.items
        return values

    # -- the owner -------------------------------------------------------------------------------

    @property
    def owners(self) -> Scope:
        """The documents that have the array."""
        return self.target.targets.with_deleted

    @cached_property
    def is_followed(self) -> bool:
        """Whether formulas or other documents follow the array, its count or its flag."""
        written = {self.path, *self.beside, *auto_fields(self.target, new=False)}
        return concerns(self.target, written)

    def projection(self) -> Raw:
        """Return what of an owner concerns its array."""
        return dict.fromkeys([self.path, self.state_path, *self.beside], 1)

    def short_projection(self) -> Raw:
        """Return the same with one item beyond the limit at most, which tells that there are too many."""
        return {**self.projection(), self.path: {"$slice": self.limit + 1}}

    def embedded(self, owner: Raw) -> list[Any]:
        """Return the embedded items of an owner."""
        items = value_at(owner, self.path)
        return items if isinstance(items, list) else []

    def has_overflow(self, owner: Raw) -> bool:
        """Whether an owner says that it has overflow."""
        is_flagged = self.flag_path is not None and value_at(owner, self.flag_path) is True
        return is_flagged or value_at(owner, self.last_path) is not None

    def no_overflow_filter(self) -> Raw:
        """Return the condition that an owner has no overflow, and all that is maintained."""
        condition: Raw = {
            self.last_path: {"$exists": False},
            self.count_path: {"$type": "number"},
            self.path: {"$type": "array"},
        }
        if self.flag_path:
            condition[self.flag_path] = {"$ne": True}
        return condition

    def bookkeeping(self, count: int, last: int | None) -> Raw:
        """Return what an owner holds beside its items; None for what it must not have."""
        flag = {self.flag_path: last is not None} if self.flag_path else {}
        return {self.count_path: count, **flag, self.last_path: last}

    def store_owner(
        self, key: Any, embedded: list[Any] | None, count: int, last: int | None, *, stamped: bool = False
    ) -> Plan[None]:
        """Store the embedded part, unless it is None, and the bookkeeping.

        `stamped` sets the auto fields, as a caller's own write does.
        """
        values = self.bookkeeping(count, last)
        update: Raw = {
            "$set": {path: value for path, value in values.items() if value is not None},
            "$inc": {REVISION: 1},
        }
        if embedded is not None:
            update["$set"][self.path] = embedded
        if last is None:
            update["$unset"] = {self.last_path: ""}
        sent = stamping(self.target, update) if stamped else update
        yield from update_one(self.target.collection, by_id(key), sent)

    def missing(self, key: Any) -> DataError:
        return DataError(
            f"{self.target.model.__name__} {key!r} is not stored (any more), so it has no {self.name}; "
            "insert it first",
            code="array-owner-missing",
        )

    def split(self, raw: Raw) -> list[Raw]:
        """Cut the array of a new document to its embedded part. Returns the pages of the others."""
        items = self.embedded(raw)
        # A document that was of another kind may hold the state of another array.
        drop(raw, self.state_path)
        if self.unique:
            items = distinct(items)
        pages, last = self.overflow.pages(raw["_id"], items[self.limit :], None)
        values = {self.path: items[: self.limit], **self.bookkeeping(len(items), last)}
        for path, value in values.items():
            if value is not None:
                put(raw, path, value)
        return pages


def _may_be_taken(field: Any, kind: type) -> bool:
    """Whether a field can be a flag or count although the declaration does not name it."""
    declared = any(isinstance(mark, Pattern) for mark in field.shape.metadata)
    return field.shape.python is kind and not field.shape.optional and not declared


def is_first_occurrence(items: Sequence[Any], stored: Sequence[Any] = ()) -> list[bool]:
    """Return for each item whether it is neither stored nor a repetition, as the server compares."""
    seen = {freeze(item) for item in stored}
    first = []
    for item in map(freeze, items):
        first.append(item not in seen)
        seen.add(item)
    return first


def distinct(items: Sequence[Any]) -> list[Any]:
    """Return items without repetitions."""
    return [item for item, first in zip(items, is_first_occurrence(items), strict=True) if first]


def singular(name: str) -> str:
    """Return the usual singular of a field's name."""
    if name.endswith("ies"):
        return f"{name[:-3]}y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name
