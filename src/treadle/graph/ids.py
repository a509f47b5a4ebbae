"""The ids of one model's documents, as callers give them and as they are stored."""

from __future__ import annotations

from functools import cached_property
from inspect import isawaitable
from typing import Any

from bson import ObjectId
from pydantic import TypeAdapter, ValidationError

from treadle.errors import DeclarationError, UsageError
from treadle.model.bson_types import refuse_unsendable, to_bson, too_deep
from treadle.model.document import Document
from treadle.model.shape import Shape, field_shape
from treadle.model.text import quote
from treadle.query.paths import ARRAYS


class IdCodec:
    """How the ids of a model are checked and stored."""

    def __init__(self, model: type[Document]) -> None:
        self._model = model
        self.shape: Shape = field_shape(model.__name__, "id", model.__pydantic_fields__["id"])
        if self.shape.optional or self.shape.kind in ARRAYS:
            raise DeclarationError(
                f"{model.__name__}.id may be None or a list, which MongoDB does not take as the id of a "
                "document; leave it out, and an ObjectId is made",
                code="id-invalid",
            )
        info, plain = model.__pydantic_fields__["id"], Document.__pydantic_fields__["id"]
        # An ObjectId needs no validation, unless the model asks for more.
        is_plain = (info.annotation, info.metadata) == (plain.annotation, plain.metadata)
        self._exact: type | None = ObjectId if is_plain else None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        # Most callers give an ObjectId, which needs none.
        return TypeAdapter(self._model.__pydantic_fields__["id"].rebuild_annotation())

    def encode(self, value: Any) -> Any:
        """Return the stored form of an id that a caller gave; never an operator."""
        if type(value) is self._exact:
            return value
        try:
            identity = to_bson(self._adapter.validate_python(value), [])
        except ValidationError as error:
            hint = "write await before it" if isawaitable(value) else error.errors()[0]["msg"]
            raise UsageError(
                f"{quote(value)} is not an id of {self._model.__name__}: {hint}", code="id-invalid"
            ) from error
        except RecursionError:
            raise too_deep(self._model.__name__) from None
        if not isinstance(identity, (dict, list)):
            refuse_unsendable(identity)
        return identity
