"""The class keywords that say what a document may look like: its kind and its version.

Checked when the class is made. What they come to in a stored document are
stamps: fields that Treadle writes and callers do not.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from treadle.errors import DeclarationError
from treadle.model.bson_types import RESERVED

if TYPE_CHECKING:
    from treadle.model.document import Settings


def check_shape(cls: type, settings: Settings) -> Settings:
    """Refuse kinds and versions that cannot be; the settings with the kind as it is stored."""
    name = cls.__name__
    inherited: Settings = cls.__treadle__  # type: ignore[attr-defined]
    for keyword in ("discriminator", "version_field"):
        _check_stored_name(name, keyword, getattr(settings, keyword))
    same_collection = inherited.collection == settings.collection
    if inherited.discriminator not in (None, settings.discriminator) and same_collection:
        raise DeclarationError(
            f"{name} has discriminator={settings.discriminator!r}, but the class that it inherits from has "
            f"{inherited.discriminator!r}; one collection has one discriminator: leave it out",
            code="kind-invalid",
        )
    kind = settings.kind.value if isinstance(settings.kind, enum.Enum) else settings.kind
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
    if settings.version is not None:
        _check_version(name, settings)
    return dataclasses.replace(settings, kind=kind)


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
