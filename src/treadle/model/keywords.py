"""The class keywords of a document: where and how it is stored, its kind, its version, its patterns.

They are checked when the class is made. A kind and a version become stamps:
fields that Treadle writes into each stored document, and callers do not.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from pymongo import IndexModel

from treadle.errors import DeclarationError
from treadle.model.bson_types import RESERVED

Naming = Literal["snake", "camel"]
Validation = Literal["strict", "moderate", "off"]
ValidationAction = Literal["error", "warn"]
MigrateOnRead = Literal["memory", "store"]
# The value of a discriminator.
KindValue: TypeAlias = str | int


@dataclass(frozen=True)
class Settings:
    """The class keywords of a document, with those that it inherits."""

    collection: str | None = None
    naming: Naming = "snake"
    validation: Validation = "moderate"
    indexes: tuple[IndexModel, ...] = ()
    validation_action: ValidationAction = "error"
    # Polymorphic: the stored field that holds the kind, and the kind of this class alone.
    discriminator: str | None = None
    kind: KindValue | None = None
    # The kind of documents without a discriminator, stored before there were kinds.
    default_kind: KindValue | None = None
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


_KEYWORDS = [each.name for each in fields(Settings) if each.name != "patterns"]


def settings_of(cls: type, inherited: Settings, keywords: Mapping[str, Any]) -> Settings:
    """Return the settings of a new class; refuses keywords and values that are not allowed."""
    values = {key: value for key, value in keywords.items() if key in _KEYWORDS and value is not None}
    declared = {key: _patterns(cls, key, value) for key, value in keywords.items() if key not in _KEYWORDS}
    if "indexes" in values:
        values["indexes"] = (*inherited.indexes, *values["indexes"])
    # A kind belongs to one class; a class that inherits from it is another kind, or has none.
    values["kind"] = _kind_value(values.get("kind"))
    values["default_kind"] = _kind_value(values.get("default_kind", inherited.default_kind))
    settings = replace(inherited, **values, patterns={**inherited.patterns, **declared})
    _check(cls.__name__, settings, inherited)
    return settings


def _kind_value(kind: Any) -> Any:
    return kind.value if isinstance(kind, enum.Enum) else kind


def _patterns(cls: type, keyword: str, value: Any) -> list[Any]:
    """Return the patterns that a class keyword declares; refuses a keyword that is not one of a pattern."""
    value = () if value is None else value
    patterns = list(value) if isinstance(value, (list, tuple)) else [value]
    near = difflib.get_close_matches(keyword, _KEYWORDS, n=1)
    if all(hasattr(each, "bind") for each in patterns) and (patterns or not near):
        return patterns
    listed = f"the keywords are {', '.join(_KEYWORDS)}, and those of patterns"
    hint = f"did you mean {near[0]!r}?" if near else listed
    raise DeclarationError(
        f"{cls.__name__} has the class keyword {keyword}={value!r}, which is neither a setting nor a pattern "
        f"of a whole model, such as bucket=Bucket(…); {hint}",
        code="keyword-unknown",
    )


_CHOICES = {
    "naming": get_args(Naming), "validation": get_args(Validation),
    "validation_action": get_args(ValidationAction), "migrate_on_read": get_args(MigrateOnRead),
}  # fmt: skip


def _check(name: str, now: Settings, inherited: Settings) -> None:
    for keyword, (fits, reason, code) in _CHECKS.items():
        value = getattr(now, keyword)
        if value is not None and not fits(value):
            raise DeclarationError(f"{name} has {keyword}={value!r}; {reason}", code=code)
    _check_kind(name, now, inherited)
    if now.version is not None and now.version_field == now.discriminator:
        reason = f"kind and version in the same field {now.version_field!r}; rename one of them"
        raise DeclarationError(f"{name} stores {reason}", code="stored-name-clash")


def _check_kind(name: str, now: Settings, inherited: Settings) -> None:
    former, kind = inherited.discriminator, now.kind if now.default_kind is None else now.default_kind
    if former not in (None, now.discriminator) and inherited.collection == now.collection:
        reason = f"but the class that it inherits from has {former!r}; one collection has one: leave it out"
        raise DeclarationError(
            f"{name} has discriminator={now.discriminator!r}, {reason}", code="kind-invalid"
        )
    if kind is not None and now.discriminator is None:
        reason = 'no class says where kinds are stored; give the base discriminator="type"'
        raise DeclarationError(f"{name} has the kind {kind!r}, but {reason}", code="kind-invalid")


class _Check(NamedTuple):
    """What a keyword's value must be, what to say where it is not, and the code."""

    fits: Callable[[Any], object]
    reason: str
    code: str


def _is_text(pattern: str) -> Callable[[Any], object]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_STORED_NAME = _Check(
    _is_text(rf"(?!\$|_id\Z|{RESERVED}\Z)[^.\0]+"),
    "it is the stored name of a field of the document itself: not empty, without '.', not beginning with "
    f"'$', and neither '_id' nor {RESERVED!r}",
    code="stored-name-invalid",
)
_CHECKS = {
    "discriminator": _STORED_NAME,
    "version_field": _STORED_NAME,
    "kind": _Check(lambda kind: _is_whole(kind) or _is_text("(?s).+")(kind),
        "a kind is text that is not empty, or a whole number", code="kind-invalid"),
    "version": _Check(lambda version: _is_whole(version) and version >= 1,
        "versions are whole numbers from 1", code="version-invalid"),
    "collection": _Check(_is_text(r"(?!system\.|treadle\.)[^$\0]+"),
        "a collection's name is not empty, contains neither '$' nor NUL, and does not begin with 'system.' "
        "or with 'treadle.', which is Treadle's own", code="collection-name-invalid"),
    "shard_key": _Check(lambda key: isinstance(key, tuple) and key and all(isinstance(e, str) for e in key),
        'it takes a tuple of field names, such as shard_key=("region",)', code="shard-key-invalid"),
    "indexes": _Check(lambda indexes: all(isinstance(each, IndexModel) for each in indexes),
        "it takes PyMongo's IndexModel, such as IndexModel([('name', 1)])", code="keyword-unknown"),
    **{keyword: _Check(choices.__contains__, f"it takes {' or '.join(map(repr, choices))}",
        code="keyword-unknown") for keyword, choices in _CHOICES.items()},
}  # fmt: skip


def stamps_of(model: type) -> dict[str, KindValue]:
    """Return the stored names and values of kind and version, which Treadle writes into each document."""
    now: Settings = getattr(model, "__treadle__", None) or Settings()
    stamps = {now.discriminator: now.kind, now.version_field: now.version}
    return {name: value for name, value in stamps.items() if name is not None and value is not None}


def stamped_names(model: type) -> list[str]:
    """Return the stored names of kind and version, whether or not this class has a kind of its own."""
    now: Settings = getattr(model, "__treadle__", None) or Settings()
    names = [now.discriminator, now.version_field if now.version is not None else None]
    return [name for name in names if name is not None]
