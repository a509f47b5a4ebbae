"""Document: a Pydantic model that is stored in a collection.

Class keywords say where and how: `class Order(Document, collection="orders")`.
Every document has an `id`, stored as `_id`. It is an ObjectId that the client
makes when it is first asked for, unless the model declares another type.
Fields keep their Pydantic aliases as stored names; `naming="camel"` makes
camelCase names for the rest.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pymongo import IndexModel

from treadle.errors import DeclarationError
from treadle.model.bson_types import Id
from treadle.model.keywords import check_shape
from treadle.model.lazy_id import IdAttribute, LazyObjectId

Naming = Literal["snake", "camel"]
Validation = Literal["strict", "moderate", "off"]
ValidationAction = Literal["error", "warn"]
MigrateOnRead = Literal["memory", "store"]
UnknownKinds = Literal["refuse", "base"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the class keywords of a document said."""

    collection: str | None = None
    naming: Naming = "snake"
    validation: Validation = "moderate"
    indexes: tuple[IndexModel, ...] = ()
    validation_action: ValidationAction = "error"
    # Polymorphic: the stored field that names the kind, and the kind of this very class.
    discriminator: str | None = None
    kind: Any = None
    unknown_kinds: UnknownKinds = "refuse"
    # Schema versioning: the version that this class describes.
    version: int | None = None
    version_field: str = "schema_version"
    migrate_on_read: MigrateOnRead = "memory"
    # The patterns of the whole model, by their class keywords; of one keyword there may be several.
    patterns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Document(BaseModel):
    """A model with an `id` that the Store can write and read."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    if TYPE_CHECKING:
        # For type checkers, so that a model may declare another type.
        id: Any = None
    else:
        id: Id = Field(default_factory=LazyObjectId, validation_alias="_id")

    __treadle__: ClassVar[Settings] = Settings()

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
        cls.__treadle__ = _settings(cls, keywords)
        cls.__treadle_complete__(raise_errors=False)
        type.__setattr__(cls, "id", IdAttribute())

    @classmethod
    def __treadle_complete__(cls, *, raise_errors: bool = True) -> None:
        """Give the fields their stored names; again where forward references were resolved since."""
        if _apply_stored_names(cls):
            cls.model_rebuild(force=True, raise_errors=raise_errors)


def _settings(cls: type[Document], keywords: Mapping[str, Any]) -> Settings:
    known = [each.name for each in fields(Settings) if each.name != "patterns"]
    inherited = cls.__treadle__
    given = {key: value for key, value in keywords.items() if value is not None}
    patterns = dict(inherited.patterns)
    for keyword in list(keywords):
        if keyword not in known:
            declared = given.pop(keyword, ())
            listed = list(declared) if isinstance(declared, (list, tuple)) else [declared]
            if not all(hasattr(each, "bind") for each in listed):
                raise _unknown_keyword(cls, keyword, declared, known)
            patterns[keyword] = listed
    given["patterns"] = patterns
    if "indexes" in given:
        given["indexes"] = (*inherited.indexes, *given["indexes"])
    # A kind is one class's own; whoever inherits from it is another kind, or none.
    settings = check_shape(cls, replace(inherited, **{"kind": None, **given}))
    _check_settings(cls, settings)
    return settings


def _unknown_keyword(cls: type, keyword: str, value: Any, known: Sequence[str]) -> DeclarationError:
    near = difflib.get_close_matches(keyword, known, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"the keywords are {', '.join(known)}, and those of patterns"
    )
    return DeclarationError(
        f"{cls.__name__} has the class keyword {keyword}={value!r}, which is no pattern of a whole model, "
        f"such as bucket=Bucket(…), and nothing else that Treadle knows; {hint}",
        code="keyword-unknown",
    )


def _check_settings(cls: type[Document], settings: Settings) -> None:
    name = settings.collection
    if name is not None and (not name or "$" in name or "\0" in name or name.startswith("system.")):
        raise DeclarationError(
            f"{cls.__name__} names the collection {name!r}; a collection's name may not be empty, "
            "contain '$' or NUL, or begin with 'system.'",
            code="collection-name-invalid",
        )
    if name is not None and name.startswith("treadle."):
        raise DeclarationError(
            f"{cls.__name__} names the collection {name!r}; names that begin with 'treadle.' are "
            "kept for Treadle's own state: choose another",
            code="collection-name-invalid",
        )
    for index in settings.indexes:
        if not isinstance(index, IndexModel):
            raise DeclarationError(
                f"{cls.__name__} has {index!r} in indexes=; it takes PyMongo's IndexModel, such as "
                "IndexModel([('name', 1)])",
                code="keyword-unknown",
            )
    choices = {
        "naming": ("snake", "camel"),
        "validation": ("strict", "moderate", "off"),
        "validation_action": ("error", "warn"),
        "migrate_on_read": ("memory", "store"),
        "unknown_kinds": ("refuse", "base"),
    }
    for keyword, allowed in choices.items():
        value = getattr(settings, keyword)
        if value not in allowed:
            raise DeclarationError(
                f"{cls.__name__} has {keyword}={value!r}; it takes {' or '.join(map(repr, allowed))}",
                code="keyword-unknown",
            )


def _apply_stored_names(cls: type[Document]) -> bool:
    """Give `id` and the fields under `naming="camel"` their stored names."""
    changed = False
    for name, info in cls.__pydantic_fields__.items():
        if name == "id":
            wanted = "_id"
        elif cls.__treadle__.naming == "camel" and info.alias_priority in (None, 1):
            wanted = to_camel(name)
            if info.validation_alias is not None or wanted == name:
                continue
        else:
            continue
        if info.validation_alias != wanted:
            info.validation_alias = wanted
            info.alias = info.serialization_alias = None
            info.alias_priority = 2
            changed = True
    return changed
