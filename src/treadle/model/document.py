"""Document: a Pydantic model that is stored in a collection.

Class keywords say where and how: `class Order(Document, collection="orders")`.
Every document has an `id`, stored as `_id`: an ObjectId that is made when it
is first read, unless the model declares another type. Pydantic aliases are
stored names; `naming="camel"` makes camelCase names for the other fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pymongo import IndexModel

from treadle.model.bson_types import Id
from treadle.model.keywords import Naming, Settings, Validation, settings_of
from treadle.model.lazy_id import GeneratedId, IdAttribute, LazyObjectId


@dataclass(frozen=True)
class Indexed:
    """Marks a field as indexed: `email: Annotated[str, Indexed(unique=True)]`.

    A unique index on a field that may be None is partial: documents without a
    value do not collide. `descending`, `sparse`, `expire_after` (TTL, on a
    date) and `name` mean what they mean to the server. On a field of one kind,
    the index is partial: it holds only documents of that kind. `text=True` puts
    the field into the collection's one text index, which `search` uses; a
    number is its weight there. In a model with `soft_delete=` a unique index
    leaves deleted documents out, unless `deleted=True`.
    """

    unique: bool = False
    descending: bool = False
    sparse: bool = False
    expire_after: timedelta | None = None
    name: str | None = None
    text: bool | int = False
    deleted: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)


class Document(BaseModel):
    """A model with an `id` that the Store can write and read."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    if TYPE_CHECKING:
        id = GeneratedId()  # type: ignore[pydantic-field]
    else:
        id: Id = Field(default_factory=LazyObjectId, validation_alias="_id")

    __treadle__: ClassVar[Settings] = Settings()
    # The fields that rules maintain, known once a Store is made of the model.
    __treadle_maintained__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(
        cls,
        *,
        collection: str | None = None,
        naming: Naming | None = None,
        validation: Validation | None = None,
        indexes: Sequence[IndexModel] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__()
        cls.__treadle__ = settings_of(cls, cls.__treadle__, keywords)
        cls.__treadle_complete__(raise_errors=False)
        type.__setattr__(cls, "id", IdAttribute())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Use Python names both ways, and mark the fields that Treadle maintains as `readOnly`."""
        reference = handler(schema)
        described = handler.resolve_ref_schema(reference)
        names = {
            info.validation_alias: name
            for name, info in cls.__pydantic_fields__.items()
            if isinstance(info.validation_alias, str) and info.serialization_alias is None
        }
        properties = {names.get(key, key): each for key, each in described.get("properties", {}).items()}
        for name in cls.__treadle_maintained__ & properties.keys():
            properties[name] = {**properties[name], "readOnly": True}
        described["properties"] = properties
        if "required" in described:
            described["required"] = [names.get(name, name) for name in described["required"]]
        return reference

    @classmethod
    def __treadle_complete__(cls, *, raise_errors: bool = True) -> None:
        """Give the fields their stored names; called again when forward references are resolved."""
        if _apply_stored_names(cls):
            cls.model_rebuild(force=True, raise_errors=raise_errors)


def _apply_stored_names(cls: type[Document]) -> bool:
    """Give `id`, and with `naming="camel"` the other fields, their stored names; False if all had them."""
    changed = False
    for name, info in cls.__pydantic_fields__.items():
        unnamed = info.alias_priority in (None, 1) and info.validation_alias is None
        camel = cls.__treadle__.naming == "camel" and unnamed
        stored = "_id" if name == "id" else to_camel(name) if camel else name
        if stored not in (name, info.validation_alias):
            info.validation_alias = stored
            info.alias = info.serialization_alias = None
            info.alias_priority = 2
            changed = True
    return changed
