"""Models to stored documents and back, compiled once per model.

`dump` reads a model's `__dict__` and returns what is stored, under stored
names. `load` takes a document as the driver decoded it and returns a fully
validated model. Both are generated from the shapes of the fields.

`Field(exclude=True)` concerns JSON answers and has no effect here: what a
model holds is stored. A serializer that is not for JSON only has.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError

from treadle.errors import DataError, DeclarationError, UsageError
from treadle.model.adapt import alias_names, compile_adapt
from treadle.model.attributes import is_paired
from treadle.model.bson_types import RESERVED, Altered, Raw, register_converter
from treadle.model.dump import compile_dump
from treadle.model.shape import ModelCodec, Shape, field_shape
from treadle.model.shape import StoredField as StoredField

M = TypeVar("M", bound=BaseModel)

PATHS_SHOWN_MAX = 5
_COMPILING = RLock()


class InvalidDocument(DataError):
    """A stored document does not fit its model; `faults` are the places and what is wrong there."""

    faults: frozenset[tuple[tuple[int | str, ...], str]] = frozenset()


class Codec(ModelCodec, Generic[M]):
    """How documents of one model are written and read; made by `codec_of`."""

    model: type[M]
    codec_of: Callable[[type[BaseModel]], Codec[Any]]

    def __init__(self, model: type[M], codec_of: Callable[[type[BaseModel]], Codec[Any]]) -> None:
        self.model = model
        self.codec_of = codec_of
        self.by_name = {}
        self.by_stored = {}
        self.pairs = {}
        self._validate: Callable[[Any], M] = model.__pydantic_validator__.validate_python

    def dump(self, value: Any, altered: Altered) -> Raw:
        """Return the document to store; notes in `altered` what it had to change."""
        return Codec.dump_all(self, [value], altered)[0]

    def dump_all(self, values: Iterable[Any], altered: Altered) -> list[Raw]:
        """Return the documents to store; one tight loop, for bulk inserts."""
        dump = self._dump
        try:
            return [dump(value, altered) for value in values]
        except (KeyError, AttributeError, TypeError, PydanticSerializationError) as error:
            # The generated function trusts the model, whose fields may have been set past its validators.
            raise UsageError(
                f"this {self.model.__name__} holds something that its declaration does not allow "
                f"({type(error).__name__}: {error}); build it through its constructor",
                code="model-inconsistent",
            ) from error

    def load(self, raw: Raw) -> M:
        """Return the validated model of a stored document; changes the document."""
        if self._adapt is not None:
            raw = self._adapt(raw)
        try:
            return self._validate(raw)
        except ValidationError as error:
            # Not chained: Pydantic's text repeats the values that it refuses.
            raise invalid_document(self.model, raw, error) from None
        except Exception as error:
            # A validator of the user's own may raise anything; Pydantic turns only a few into its own error.
            raise validator_failed(self.model, raw, error) from error


_CODECS: weakref.WeakKeyDictionary[type[BaseModel], Codec[Any]] = weakref.WeakKeyDictionary()


def codec_of(model: type[M]) -> Codec[M]:
    """Return the codec of a model, compiled at the first call."""
    codec: Codec[M] | None = _CODECS.get(model)
    if codec is not None and codec.ready:
        return codec
    # Only the compiling thread may see a codec that is not ready: in a model that contains itself.
    with _COMPILING:
        codec = _CODECS.get(model)
        if codec is None:
            if not model.__pydantic_complete__:
                model.model_rebuild()
            # Gives the fields that came with forward references their stored names.
            getattr(model, "__treadle_complete__", bool)()
            codec = _CODECS[model] = Codec(model, codec_of)
            try:
                _compile(codec)
            except BaseException:
                del _CODECS[model]
                raise
    return codec


def without_id(model: type[M]) -> Codec[M]:
    """Return a codec whose `dump` leaves out the id of a document, and so does not make a generated one."""
    codec = copy.copy(codec_of(model))
    codec._dump = compile_dump(codec, with_id=False)
    return codec


def invalid_document(model: type[BaseModel], raw: Any, error: ValidationError) -> InvalidDocument:
    """Return the error of a stored document that does not fit its model, without the document's values."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    places = "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['type']}"
        for problem in problems[:PATHS_SHOWN_MAX]
    )
    if len(problems) > PATHS_SHOWN_MAX:
        places += f"; and {len(problems) - PATHS_SHOWN_MAX} more"
    identity = raw.get("_id") if isinstance(raw, dict) else None
    invalid = InvalidDocument(
        f"a stored document does not fit {model.__name__} (_id {identity!r}): {places}; "
        "correct the document, or widen the model",
        code="document-invalid",
    )
    invalid.faults = frozenset((problem["loc"], problem["type"]) for problem in problems)
    return invalid


def validator_failed(model: type[BaseModel], raw: Any, error: Exception) -> InvalidDocument:
    """Return the error where a user's own validator raises for a stored document."""
    identity = raw.get("_id") if isinstance(raw, dict) else None
    return InvalidDocument(
        f"a validator of {model.__name__} raises {type(error).__name__} for the stored document with _id "
        f"{identity!r}; repair the document, or the validator",
        code="document-invalid",
    )


def _compile(codec: Codec[Any]) -> None:
    model = codec.model
    codec.fields = tuple(
        StoredField(name, _stored_name(model, name, info), field_shape(model.__name__, name, info), info)
        for name, info in model.__pydantic_fields__.items()
    )
    codec.by_name = {field.name: field for field in codec.fields}
    codec.by_stored = {field.stored: field for field in codec.fields}
    for field in codec.fields:
        _check_stored_name(codec, field)
        codec.pairs |= _pairs_in(field)
    codec._dump = compile_dump(codec)
    codec._adapt = compile_adapt(codec)
    codec.ready = True


def _stored_name(model: type[BaseModel], name: str, info: FieldInfo) -> str:
    """Return the name that a field has in the database: its Pydantic alias, or its own."""
    if name == "id" and hasattr(model, "__treadle__"):
        # Whatever an alias generator makes of it.
        return "_id"
    return info.serialization_alias or next(iter(alias_names(info)), name)


def _pairs_in(field: StoredField) -> dict[str, Shape]:
    """Return the maps stored as pairs at, or in the model of, a field."""
    if is_paired(field.shape):
        return {field.stored: field.shape}
    if field.shape.kind != "model" or not (nested := codec_of(field.shape.python)).ready:
        return {}
    return {f"{field.stored}.{path}": shape for path, shape in nested.pairs.items()}


def _check_stored_name(codec: Codec[Any], field: StoredField) -> None:
    where, name = f"{codec.model.__name__}.{field.name}", field.stored
    if name in ("", RESERVED) or "." in name or name.startswith("$"):
        raise DeclarationError(
            f"{where} would be stored as {name!r}; a stored name may not be "
            f"empty or {RESERVED!r}, contain '.' or begin with '$': give it another alias",
            code="stored-name-invalid",
        )
    other = codec.by_stored[name]
    if other is not field:
        raise DeclarationError(
            f"{where} and {codec.model.__name__}.{other.name} are both stored as {name!r}; "
            "give one of them another alias",
            code="stored-name-clash",
        )


register_converter(BaseModel, lambda value, altered: codec_of(type(value)).dump(value, altered))
