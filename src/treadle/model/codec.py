"""Models to stored documents and back, compiled once per model.

`dump` reads a model's `__dict__` and returns what is stored, under stored
names. `load` takes a document as the driver decoded it and returns a fully
validated model. Both are generated from the fields' shapes, because a generic
walk costs more than the network for small documents.

`Field(exclude=True)` speaks of JSON answers and is not heeded here: what a
model holds is stored. A serializer that is not for JSON only is heeded.
"""

from __future__ import annotations

import copy
import weakref
from threading import RLock
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError
from treadle.model.adapt import compile_adapt
from treadle.model.bson_types import RESERVED, convert_by
from treadle.model.dump import compile_dump
from treadle.model.dump import omitted_when_none as omitted_when_none
from treadle.model.pairs import is_paired
from treadle.model.shape import field_shape
from treadle.model.stored import Codec as Codec
from treadle.model.stored import StoredField as StoredField

M = TypeVar("M", bound=BaseModel)

_COMPILING = RLock()
_CODECS: weakref.WeakKeyDictionary[type[BaseModel], Codec[Any]] = weakref.WeakKeyDictionary()


def codec_of(model: type[M]) -> Codec[M]:
    """The codec of a model, compiled at the first call."""
    codec: Codec[M] | None = _CODECS.get(model)
    if codec is not None and codec.ready:
        return codec
    # Only the compiling thread itself may meet a codec that is not ready: in a model that contains itself.
    with _COMPILING:
        codec = _CODECS.get(model)
        if codec is None:
            if not model.__pydantic_complete__:
                model.model_rebuild()
            complete = getattr(model, "__treadle_complete__", None)
            if complete is not None:
                complete()
            codec = Codec(model, codec_of)
            _CODECS[model] = codec
            try:
                _compile(codec)
            except BaseException:
                del _CODECS[model]
                raise
    return codec


def without_id(model: type[M]) -> Codec[M]:
    """A codec whose `dump` leaves out the id of a document, and so does not make a generated one."""
    codec = copy.copy(codec_of(model))
    codec._dump = compile_dump(codec, with_id=False)
    return codec


def stored_name(name: str, info: FieldInfo) -> str:
    """The name that a field has in the database: its Pydantic alias, or its own."""
    if info.serialization_alias:
        return info.serialization_alias
    alias = info.validation_alias
    if isinstance(alias, str):
        return alias
    if isinstance(alias, AliasChoices):
        return next((choice for choice in alias.choices if isinstance(choice, str)), name)
    return name


def _compile(codec: Codec[Any]) -> None:
    model = codec.model
    # The id of a document is `_id`, whatever an alias generator makes of it.
    own_id = "id" if hasattr(model, "__treadle__") else None
    fields = tuple(
        StoredField(
            name,
            "_id" if name == own_id else stored_name(name, info),
            field_shape(model.__name__, name, info),
            info,
        )
        for name, info in model.__pydantic_fields__.items()
    )
    codec.fields = fields
    codec.by_name = {field.name: field for field in fields}
    codec.by_stored = {field.stored: field for field in fields}
    _refuse_clashes(codec)
    for field in fields:
        if is_paired(field.shape):
            codec.pairs[field.stored] = field.shape
        elif field.shape.kind == "model" and (nested := codec_of(field.shape.python)).ready:
            codec.pairs |= {f"{field.stored}.{path}": shape for path, shape in nested.pairs.items()}
    codec._dump = compile_dump(codec)
    codec._adapt = compile_adapt(codec)
    codec.ready = True


def _refuse_clashes(codec: Codec[Any]) -> None:
    where = codec.model.__name__
    for field in codec.fields:
        if field.stored in ("", RESERVED) or "." in field.stored or field.stored.startswith("$"):
            raise DeclarationError(
                f"{where}.{field.name} would be stored as {field.stored!r}; a stored name may not be "
                f"empty or {RESERVED!r}, contain '.' or begin with '$': give it another alias",
                code="stored-name-invalid",
            )
        other = codec.by_stored[field.stored]
        if other is not field:
            raise DeclarationError(
                f"{where}.{other.name} and {where}.{field.name} are both stored as "
                f"{field.stored!r}; give one of them another alias",
                code="stored-name-clash",
            )


convert_by(BaseModel, lambda value, altered: codec_of(type(value)).dump(value, altered))
