"""The class keywords of a document: where and how it is stored, its kind, its version, its patterns.

They are checked when the class is made. A kind and a version become stamps:
fields that Treadle writes into each stored document, and callers do not.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from pymongo import IndexModel

from treadle.errors import DeclarationError
from treadle.model.bson_types import RESERVED

Naming = Literal["snake", "camel"]
Validation = Literal["strict", "moderate", "off"]
ValidationAction = Literal["error", "warn"]
MigrateOnRead = Literal["memory", "store"]

_CHOICES = {
    "naming": Naming,
    "validation": Validation,
    "validation_action": ValidationAction,
    "migrate_on_read": MigrateOnRead,
}


@dataclass(frozen=True)
class Settings:
    """The class keywords of a document, with those that it inherits."""

    collection: str | None = None
    naming: Naming = "snake"
    validation: Validation = "moderate"
    indexes: tuple[IndexModel, ...] = ()
    validation_action: ValidationAction = "error"
    # Polymorphic: the stored field that names the kind, and the kind of this very class.
    discriminator: str | None = None
    kind: Any = None
    # The kind of documents that have no discriminator, from before there were kinds.
    default_kind: Any = None
    # Schema versioning: the version that this class describes.
    version: int | None = None
    version_field: str = "schema_version"
    migrate_on_read: MigrateOnRead = "memory"
    # Python names of the fields that hold a document's revision, and the date of its deletion.
    revision: str | None = None
    soft_delete: str | None = None
    # Python names of the fields by which a sharded cluster spreads the documents.
    shard_key: tuple[str, ...] | None = None
    # The patterns of the whole model, by their class keywords; of one keyword there may be several.
    patterns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def settings_of(cls: type, inherited: Settings, keywords: Mapping[str, Any]) -> Settings:
    """The settings of a class that is being made; refuses keywords and values that are not allowed."""
    known = [each.name for each in fields(Settings) if each.name != "patterns"]
    values = {key: value for key, value in keywords.items() if value is not None}
    patterns = dict(inherited.patterns)
    for keyword in list(keywords):
        if keyword not in known:
            declared = values.pop(keyword, ())
            listed = list(declared) if isinstance(declared, (list, tuple)) else [declared]
            misspelt = not listed and difflib.get_close_matches(keyword, known, n=1)
            if misspelt or not all(hasattr(each, "bind") for each in listed):
                raise _unknown_keyword(cls, keyword, declared, known)
            patterns[keyword] = listed
    if "indexes" in values:
        values["indexes"] = (*inherited.indexes, *values["indexes"])
    # A kind belongs to one class; a class that inherits from it is another kind, or none.
    kind = values.pop("kind", None)
    kind = kind.value if isinstance(kind, enum.Enum) else kind
    default = values.get("default_kind")
    if isinstance(default, enum.Enum):
        values["default_kind"] = default.value
    settings = replace(inherited, **{**values, "kind": kind, "patterns": patterns})
    _check_shape(cls.__name__, inherited, settings)
    _check_storage(cls.__name__, settings)
    return settings


def _unknown_keyword(cls: type, keyword: str, value: Any, known: Sequence[str]) -> DeclarationError:
    near = difflib.get_close_matches(keyword, known, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"the keywords are {', '.join(known)}, and those of patterns"
    )
    return DeclarationError(
        f"{cls.__name__} has the class keyword {keyword}={value!r}, which is neither a setting nor a pattern "
        f"of a whole model, such as bucket=Bucket(…); {hint}",
        code="keyword-unknown",
    )


def _check_shape(name: str, inherited: Settings, settings: Settings) -> None:
    """Refuse kinds and versions that are not allowed."""
    kind = settings.kind
    for keyword in ("discriminator", "version_field"):
        _check_stored_name(name, keyword, getattr(settings, keyword))
    same_collection = inherited.collection == settings.collection
    if inherited.discriminator not in (None, settings.discriminator) and same_collection:
        raise DeclarationError(
            f"{name} has discriminator={settings.discriminator!r}, but the class that it inherits from has "
            f"{inherited.discriminator!r}; one collection has one discriminator: leave it out",
            code="kind-invalid",
        )
    if kind is not None:
        if settings.discriminator is None:
            raise DeclarationError(
                f"{name} has kind={kind!r}, but no class above it says where kinds are stored; give the base "
                'discriminator="type"',
                code="kind-invalid",
            )
        if isinstance(kind, bool) or not isinstance(kind, (str, int)) or kind == "":
            raise DeclarationError(
                f"{name} has kind={kind!r}; a kind is text that is not empty, or a whole number",
                code="kind-invalid",
            )
    if settings.default_kind is not None and settings.discriminator is None:
        raise DeclarationError(
            f"{name} has default_kind={settings.default_kind!r}, but does not say where kinds are stored; "
            'give it discriminator="type"',
            code="kind-invalid",
        )
    if settings.version is not None:
        _check_version(name, settings)


def _check_stored_name(name: str, keyword: str, value: Any) -> None:
    if value is None:
        return
    fits = isinstance(value, str) and value and "." not in value and "\0" not in value
    if not fits or value.startswith("$") or value in ("_id", RESERVED):
        raise DeclarationError(
            f"{name} has {keyword}={value!r}; it is the stored name of a field of the document itself: not "
            f"empty, without '.', not beginning with '$', and neither '_id' nor {RESERVED!r}",
            code="stored-name-invalid",
        )


def _check_version(name: str, settings: Settings) -> None:
    version = settings.version
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DeclarationError(
            f"{name} has version={version!r}; versions are whole numbers from 1", code="version-invalid"
        )
    if settings.discriminator == settings.version_field:
        raise DeclarationError(
            f"{name} stores its kind and its version in the same field {settings.version_field!r}; "
            "give one of them another name",
            code="stored-name-clash",
        )


def _check_storage(cls: str, settings: Settings) -> None:
    name = settings.collection
    if name is not None and (not name or "$" in name or "\0" in name or name.startswith("system.")):
        raise DeclarationError(
            f"{cls} names the collection {name!r}; a collection's name may not be empty, "
            "contain '$' or NUL, or begin with 'system.'",
            code="collection-name-invalid",
        )
    if name is not None and name.startswith("treadle."):
        raise DeclarationError(
            f"{cls} names the collection {name!r}; names that begin with 'treadle.' are "
            "kept for Treadle's own state: choose another",
            code="collection-name-invalid",
        )
    key = settings.shard_key
    if key is not None and not (
        isinstance(key, tuple) and key and all(isinstance(each, str) for each in key)
    ):
        raise DeclarationError(
            f'{cls} has shard_key={key!r}; it takes a tuple of field names, such as shard_key=("region",)',
            code="shard-key-invalid",
        )
    for index in settings.indexes:
        if not isinstance(index, IndexModel):
            raise DeclarationError(
                f"{cls} has {index!r} in indexes=; it takes PyMongo's IndexModel, such as "
                "IndexModel([('name', 1)])",
                code="keyword-unknown",
            )
    for keyword, choice in _CHOICES.items():
        value, allowed = getattr(settings, keyword), get_args(choice)
        if value not in allowed:
            raise DeclarationError(
                f"{cls} has {keyword}={value!r}; it takes {' or '.join(map(repr, allowed))}",
                code="keyword-unknown",
            )


def stamps_of(model: type) -> dict[str, Any]:
    """What Treadle itself writes into each document of a model: stored names and values."""
    settings: Settings | None = getattr(model, "__treadle__", None)
    if settings is None:
        return {}
    stamps: dict[str, Any] = {}
    if settings.discriminator is not None and settings.kind is not None:
        stamps[settings.discriminator] = settings.kind
    if settings.version is not None:
        stamps[settings.version_field] = settings.version
    return stamps


def stamped_names(model: type) -> list[str]:
    """The stored names of kind and version, whether or not this very class has one."""
    settings: Settings | None = getattr(model, "__treadle__", None)
    if settings is None:
        return []
    named = [settings.discriminator, settings.version_field if settings.version is not None else None]
    return [name for name in named if name is not None]
