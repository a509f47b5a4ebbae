"""What one place of a model accepts: how a value is validated, how it is stored, and what it may break.

A value in an update is read as a stored document would be, and comes out in the form in which an insert
stores it. Whether the whole document stays valid is `certain` only where it follows from that one value:
a validator of the whole model, or a bound on the result of an `$inc`, needs the document after the write.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator

from treadle.errors import UsageError
from treadle.model.adapt import adapter_of
from treadle.model.bson_types import from_bson
from treadle.model.codec import Codec, StoredField
from treadle.model.dump import Encoder, encoder_of, field_encoder, own_serializers, unchanged
from treadle.model.shape import ANY, ModelCodec, Shape
from treadle.query.paths import ARRAYS

M = TypeVar("M", bound=BaseModel)


class Unjudgeable(Exception):
    """The user's validator failed in a way of its own; it may only work on whole documents."""


class Schema(NamedTuple):
    """Pydantic's schema of one place, with the definitions and the configuration that it needs."""

    schema: Any
    definitions: list[Any]
    config: Any

    def validator(self) -> Callable[[Any], Any]:
        whole: Any = {"type": "definitions", "schema": self.schema, "definitions": self.definitions}
        return SchemaValidator(whole, config=self.config).validate_python

    def core(self) -> tuple[Any, bool]:
        """Return the schema without defaults, None and validators; and whether there are no validators."""
        schema, free = self.schema, True
        while schema["type"] == "definition-ref" or (schema["type"] in _WRAPPERS and "schema" in schema):
            free = free and not schema["type"].startswith("function-")
            schema = _resolved(schema, self.definitions)
        return schema, free


_WRAPPERS = frozenset({"nullable", "default", "function-before", "function-after", "function-wrap"})
# What a schema without any bound may have.
_UNBOUNDED = frozenset(
    {
        "type", "ref", "metadata", "serialization", "microseconds_precision",
        "items_schema", "variadic_item_index", "keys_schema", "values_schema",
    }
)  # fmt: skip


def _resolved(schema: Any, definitions: list[Any]) -> Any:
    if schema["type"] == "definition-ref":
        return next(each for each in definitions if each["ref"] == schema["schema_ref"])
    return schema["schema"]


@dataclass(eq=False)
class FieldType:
    """The values that one place of a model accepts."""

    codec: ModelCodec
    shape: Shape = ANY
    schema: Schema | None = None
    # The field of the model that the whole place is.
    field: StoredField | None = None
    # Whether a valid value here leaves everything around it valid.
    certain: bool = False
    # Whether every document has a value here.
    required: bool = False
    # A value of a map is validated together with its key.
    pair: tuple[str, FieldType] | None = None

    @cached_property
    def _core(self) -> tuple[Any, bool]:
        return ({"type": ""}, False) if self.schema is None else self.schema.core()

    @property
    def core_type(self) -> str:
        """Pydantic's name of the type, without None, bounds and validators; empty where it is not known."""
        return str(self._core[0]["type"])

    @cached_property
    def free(self) -> bool:
        """Whether any value of the type is valid: no bound, no validator."""
        core, free = self._core
        config = (self.schema.config if self.schema else None) or {}
        unbounded = core["type"] == "model" or {key for key in core if core[key] is not False} <= _UNBOUNDED
        strict = config.get("strict") or config.get("allow_inf_nan") is False
        return free and unbounded and not strict

    @property
    def is_open(self) -> bool:
        """Whether any value of the type leaves everything around it valid."""
        return self.certain and self.free

    @cached_property
    def _validate(self) -> Callable[[Any], Any] | None:
        return None if self.schema is None or self.shape == ANY else self.schema.validator()

    @cached_property
    def _adapt(self) -> Callable[[Any], Any] | None:
        return adapter_of(self.codec, self.shape)

    def read(self, value: Any, *, adapted: bool = False) -> Any:
        """Return the validated Python value of a stored one."""
        if self._adapt is not None and value is not None and not adapted:
            # `adapt` takes its argument over.
            value = self._adapt(copy.deepcopy(value) if type(value) in (dict, list) else value)
        return value if self._validate is None else self._validate(value)

    def stored(self, value: Any) -> Any:
        """Return the stored form of a value; raises ValidationError, UsageError or Unjudgeable."""
        if self.pair is not None:
            key, pair = self.pair
            return pair.stored({key: value}).popitem()[1]
        if self._validate is None:
            return value
        try:
            validated = self.read(value)
            if self.store is None:
                return value
            is_stored_as_it_is = validated is None or self.store is unchanged
            return validated if is_stored_as_it_is else self.store(validated, [])
        except (ValidationError, UsageError):
            raise
        except Exception as error:
            # Validators and serializers are the user's code, and may raise anything.
            raise Unjudgeable from error

    @cached_property
    def store(self) -> Encoder | None:
        """What stores a valid value; None where a value is stored as it was given."""
        if self.field is None:
            return encoder_of(self.codec, self.shape)
        return field_encoder(self.codec, self.field)

    def accepts(self, value: Any) -> bool:
        """Whether a stored value can be read here, as far as this place alone tells."""
        try:
            self.stored(value)
        except (ValidationError, UsageError, Unjudgeable):
            return False
        return True

    @cached_property
    def element(self) -> FieldType | None:
        """The type of an array's elements; None where this is not an array of one type."""
        shape, items = self.shape, self._core[0].get("items_schema")
        if shape.kind not in ARRAYS or len(shape.items) != 1 or items is None:
            return None
        return self._inner(shape.items[0], items[0] if isinstance(items, list) else items)

    def map_value(self, key: str) -> FieldType:
        """Return the type of one value of a map."""
        core = self._core[0]
        value = self._inner(self.shape.items[1], core.get("values_schema"))
        value.required = False
        if core["type"] == "dict":
            pair = {name: core[name] for name in ("type", "keys_schema", "values_schema")}
            value.pair = key, self._inner(replace(self.shape, metadata=()), pair)
        return value

    @property
    def serialized(self) -> list[FieldType]:
        """This type and that of its elements, where values have a stored form of the user's own."""
        own = self.field is not None and self.field.name in own_serializers(self.codec.model)
        types = [self] if own or _has_own_form(self.shape) else []
        return types if self.element is None else [*types, *self.element.serialized]

    def _inner(self, shape: Shape, schema: Any) -> FieldType:
        inner = None if self.schema is None or schema is None else self.schema._replace(schema=schema)
        return FieldType(self.codec, shape, inner, certain=self.is_open, required=not shape.optional)


def _has_own_form(shape: Shape) -> bool:
    """Whether a serializer makes the stored form of a value, or of the values of a map."""
    return shape.kind == "custom" or (shape.kind == "map" and any(map(_has_own_form, shape.items[1:])))


def undeclared(codec: ModelCodec) -> FieldType:
    """Return the type of a field that a model does not declare, and so perhaps ignores."""
    ignored = codec.model.model_config.get("extra") in (None, "ignore")
    whole = codec.model.__pydantic_root_model__ or judges_the_whole(codec.model)
    return FieldType(codec, certain=ignored and not whole)


def field_type(codec: ModelCodec, field: StoredField, *, certain: bool = True) -> FieldType:
    """Return the type of a model's field, validators included."""
    schema = _field_schema(codec.model, field.name)
    alone = schema is not None and not _needs_others(schema.schema)
    return FieldType(
        codec,
        field.shape,
        schema if alone else None,
        field,
        certain=certain and alone and not judges_the_whole(codec.model),
        required=field.info.is_required() and not field.shape.optional,
    )


def load_what_fits(codec: Codec[M], raw: Mapping[str, Any]) -> M:
    """Return a model of an invalid document: a field that does not fit holds what is stored, or None."""
    values: dict[str, Any] = {}
    for field in codec.fields:
        if field.stored in raw:
            type_ = FieldType(codec, field.shape, _field_schema(codec.model, field.name))
            values[field.name] = _read_if_it_fits(type_, raw[field.stored])
        elif field.info.is_required():
            values[field.name] = None
    document = codec.model.model_construct(_fields_set=set(values))
    document.__dict__.update(values)
    return document


def _read_if_it_fits(type_: FieldType, value: Any) -> Any:
    # An earlier attempt to load the whole document may have adapted the value already.
    for adapted in (False, True):
        # The user's validators may raise anything; the write is done and the document must be returned.
        with contextlib.suppress(Exception):
            return type_.read(value, adapted=adapted)
    return from_bson(value)


def judges_the_whole(model: type[BaseModel]) -> bool:
    """Whether validity may depend on several fields at once."""
    decorators, ours = model.__pydantic_decorators__, ("pydantic", "treadle")
    own_classes = [each for each in model.__mro__ if each.__module__.split(".")[0] not in ours]
    return bool(
        decorators.model_validators
        or decorators.root_validators
        or any("__get_pydantic_core_schema__" in vars(each) for each in own_classes)
        or model.__pydantic_custom_init__
        or model.model_post_init.__qualname__.split(".")[0] not in ("BaseModel", "init_private_attributes")
    )


def _field_schema(model: type[BaseModel], name: str) -> Schema | None:
    """Return Pydantic's schema of one field, or None where it cannot be taken out of the model's."""
    schema: Any = model.__pydantic_core_schema__
    definitions: list[Any] = []
    if schema["type"] == "definitions":
        definitions, schema = schema["definitions"], schema["schema"]
    config = None
    while schema["type"] != "model-fields":
        if schema["type"] != "definition-ref" and "schema" not in schema:
            return None
        config = schema.get("config", config)
        schema = _resolved(schema, definitions)
    return Schema(schema["fields"][name]["schema"], definitions, config)


def _needs_others(schema: Any) -> bool:
    """Whether a validator of the field may look at other fields."""
    if isinstance(schema, dict):
        function = schema.get("function")
        if isinstance(function, dict) and function.get("type") == "with-info":
            return True
        # The fields of nested models are all within the value.
        return schema.get("type") != "model" and any(map(_needs_others, schema.values()))
    return isinstance(schema, list) and any(map(_needs_others, schema))
