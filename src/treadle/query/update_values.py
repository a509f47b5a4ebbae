"""The values of an update, validated like the fields they go to before anything is sent.

Each stored path of a model is a `Spot`, compiled when an update first names
it. A value is read as a stored document would be and comes out in the form in
which an insert stores it, so that text of 24 digits becomes an ObjectId where
the field is an `Id`. What cannot be judged without the rest of the document
(a validator of the whole model, the result of an `$inc` under a bound, a
pipeline) makes the update one that is not `sure`: whoever performs it looks
at the result before it is committed.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import decimal
import types
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

from bson.decimal128 import Decimal128
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator

from treadle.errors import InvalidValue, UsageError
from treadle.model.adapt import adapter_of
from treadle.model.bson_types import Update, from_bson
from treadle.model.codec import Codec, StoredField
from treadle.model.dump import encoder_of, field_encoder, type_adapter
from treadle.model.shape import Shape

M = TypeVar("M", bound=BaseModel)
Check = Callable[[Any], Any]

# Paths of one model that are remembered; keys of maps and positions are the callers' and have no end.
SPOTS_MAX = 2_000
# Added to the largest Decimal128, anything smaller than this is rounded away.
DECIMAL_SAFE = decimal.Decimal("1E6110")
_ARRAYS = ("list", "set", "frozenset", "tuple")


class Checked(NamedTuple):
    """An update whose values fit their fields; `sure` says that no result of it can fail to fit."""

    update: Update
    sure: bool


class Spot:
    """One place of a model that an update may write."""

    def __init__(
        self,
        codec: Codec[Any],
        shape: Shape,
        annotation: Any,
        compile: Callable[[], Check | None] = lambda: None,
        *,
        sure: bool,
        free: bool = False,
        required: bool = False,
    ) -> None:
        self.codec = codec
        self.shape = shape
        self.annotation = annotation
        self._compile = compile
        # Whether a valid value here leaves everything around it valid.
        self.sure = sure
        # Whether any value of the type will do: no bound, no validator.
        self.free = free
        # Whether there is something here in every document, and must be.
        self.required = required

    @cached_property
    def check(self) -> Check | None:
        """What makes the stored form of a value, or raises Pydantic's error; None where anything goes."""
        return self._compile()

    @cached_property
    def bare(self) -> Any:
        return _bare(self.annotation)

    @cached_property
    def element(self) -> Spot | None:
        """What an array holds; None where this is not known to be an array of one type."""
        shape = self.shape
        if shape.kind not in _ARRAYS or len(shape.items) != 1:
            return None
        annotation = next(iter(get_args(self.bare)), Any)
        return _by_type(self.codec, shape.items[0], annotation, sure=self.sure and self.free)


def check_values(codec: Codec[Any], update: Update, lenient: Callable[[str], bool]) -> Checked:
    """A cleaned update with every value in its stored form; raises `InvalidValue`.

    What is set at a `lenient` path is completed by Treadle afterwards, so that
    it need not be whole.
    """
    if not isinstance(update, (dict, Mapping)):
        return Checked(update, False)
    checked: dict[str, dict[str, Any]] = {}
    sure = True
    for operator, changes in update.items():
        handle = _HANDLERS.get(operator)
        values = checked[operator] = dict(changes)
        if handle is None:
            sure = False
            continue
        for path, value in changes.items():
            spot = spot_of(codec, path)
            try:
                values[path], certain = handle(spot, value)
            except ValidationError as error:
                if not lenient(path):
                    raise _refused(codec, path, error) from None
                certain = False
            except UsageError:
                raise
            except _Refused as refusal:
                raise _refusal(codec, path, str(refusal)) from None
            except Exception:
                # A validator that only works on whole documents; the result is looked at.
                certain = False
            sure = sure and certain
    return Checked(checked, sure)


def takes(codec: Codec[Any], path: str, value: Any) -> bool:
    """Whether a stored value can be read at a path, as far as the path alone tells."""
    check = spot_of(codec, path).check
    try:
        if check is not None:
            check(value)
    except Exception:
        return False
    return True


def as_far_as_it_fits(codec: Codec[M], raw: Mapping[str, Any]) -> M:
    """A model of a stored document: what does not fit is as it is stored, None where it is missing."""
    values: dict[str, Any] = {}
    for field in codec.fields:
        if field.stored in raw:
            values[field.name] = _read(codec, field, raw[field.stored])
        elif field.info.is_required():
            values[field.name] = None
    made = codec.model.model_construct(_fields_set=set(values))
    made.__dict__.update(values)
    return made


def _read(codec: Codec[Any], field: StoredField, value: Any) -> Any:
    schema, definitions, config = _field_schema(codec.model, field.name)
    adapt = adapter_of(codec, field.shape)
    if schema is None:
        return from_bson(value)
    whole = {"type": "definitions", "schema": schema, "definitions": definitions}
    validate = SchemaValidator(whole, config=config).validate_python
    # It may have been adapted before something else was found not to fit.
    for prepare in (adapt, None):
        with contextlib.suppress(Exception):
            return validate(value if prepare is None or value is None else prepare(copy.deepcopy(value)))
    return from_bson(value)


def unlike(codec: Codec[Any], other: Codec[Any], path: str) -> bool:
    """Whether two models of one collection would judge a value at a path in different ways."""
    own, others = (each.by_stored.get(path.split(".", 1)[0]) for each in (codec, other))
    return own is None or others is None or own.shape != others.shape


class _Refused(Exception):
    """A value that cannot go where it is to go, in words for the caller."""


def _refused(codec: Codec[Any], path: str, error: ValidationError) -> InvalidValue:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    parts = [str(part) for part in problem["loc"]]
    if parts and path.endswith(f".{parts[0]}"):
        # The key of a map, which the path names already.
        del parts[0]
    inner = "".join(f".{part}" for part in parts)
    return _refusal(codec, path + inner, f"{problem['msg']} ({problem['type']})")


def _refusal(codec: Codec[Any], path: str, reason: str) -> InvalidValue:
    return InvalidValue(
        f"the update has a value for {codec.model.__name__}.{path} that does not fit: {reason}; "
        "nothing was changed",
        code="document-invalid",
    )


# -- operators ------------------------------------------------------------------------------------


def _set(spot: Spot, value: Any) -> tuple[Any, bool]:
    check = spot.check
    return (value if check is None else check(value)), spot.sure


def _unset(spot: Spot, value: Any) -> tuple[Any, bool]:
    if spot.required:
        raise _Refused("the field is required")
    return value, spot.sure


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal128)):
        raise _Refused(f"only a number can be added or multiplied, not {type(value).__name__}")
    return value.to_decimal() if isinstance(value, Decimal128) else value


def _add(spot: Spot, value: Any) -> tuple[Any, bool]:
    certain = spot.sure and spot.free
    number = value if type(value) is int else _number(value)
    if spot.bare is int and spot.shape.kind == "scalar":
        if type(number) is int:
            return number, certain
        if number != number or number in (float("inf"), float("-inf")) or number != int(number):
            raise _Refused("the field holds whole numbers")
        return int(number), certain
    if spot.bare is decimal.Decimal and spot.shape.kind == "scalar":
        value, _ = _set(Spot(spot.codec, spot.shape, decimal.Decimal, _decimal(spot), sure=True), value)
        return value, certain and abs(value.to_decimal()) < DECIMAL_SAFE
    if spot.bare is float and spot.shape.kind == "scalar":
        # A Decimal128 would make one of the sum, which the field does not hold.
        return float(number), certain
    return value, False


def _decimal(spot: Spot) -> Callable[[], Check | None]:
    return lambda: _by_type(spot.codec, Shape("scalar", decimal.Decimal), decimal.Decimal, sure=True).check


def _multiply(spot: Spot, value: Any) -> tuple[Any, bool]:
    value, certain = _add(spot, value)
    return value, certain and spot.bare is not decimal.Decimal


def _push(spot: Spot, value: Any) -> tuple[Any, bool]:
    element = spot.element
    if element is None:
        return value, spot.sure and spot.free and spot.bare is Any
    if isinstance(value, dict) and "$each" in value:
        items = value["$each"]
        if not isinstance(items, list):
            raise _Refused("$each takes a list")
        return {**value, "$each": [_set(element, item)[0] for item in items]}, element.sure
    return _set(element, value)


def _pull(spot: Spot, value: Any) -> tuple[Any, bool]:
    return value, spot.sure and spot.free


def _stamp(spot: Spot, value: Any) -> tuple[Any, bool]:
    is_date = value in (True, {"$type": "date"})
    return value, is_date and spot.sure and spot.free and spot.bare is dt.datetime


def _bits(spot: Spot, value: Any) -> tuple[Any, bool]:
    return value, spot.sure and spot.free and spot.bare is int


_HANDLERS: dict[str, Callable[[Spot, Any], tuple[Any, bool]]] = {
    **dict.fromkeys(("$set", "$setOnInsert", "$min", "$max"), _set),
    **dict.fromkeys(("$push", "$addToSet"), _push),
    **dict.fromkeys(("$pull", "$pullAll", "$pop"), _pull),
    "$unset": _unset,
    "$inc": _add,
    "$mul": _multiply,
    "$currentDate": _stamp,
    "$bit": _bits,
}


# -- from paths to spots ----------------------------------------------------------------------------


def spot_of(codec: Codec[Any], path: str) -> Spot:
    """The spot of a stored path, which may have positions."""
    spots: dict[str, Spot] = codec.spots
    spot = spots.get(path)
    if spot is None:
        if len(spots) >= SPOTS_MAX:
            spots.clear()
        spot = spots[path] = _find(codec, path.split("."), sure=True)
    return spot


def _find(codec: Codec[Any], parts: list[str], *, sure: bool) -> Spot:
    model = codec.model
    sure = sure and not _judges_the_whole(model)
    field = codec.by_stored.get(parts[0])
    if field is None or model.__pydantic_root_model__:
        # What the model does not have, it does not read, unless it takes whatever else there is.
        return Spot(codec, _ANY, Any, sure=sure and model.model_config.get("extra") in (None, "ignore"))
    return _descend(_of_field(codec, field, sure=sure), parts[1:])


def _descend(spot: Spot, parts: list[str]) -> Spot:
    if not parts:
        return spot
    shape, codec, head = spot.shape, spot.codec, parts[0]
    sure = spot.sure and spot.free
    if shape.kind in _ARRAYS and (head.isdigit() or head.startswith("$")):
        element = spot.element
        if element is None:
            return Spot(codec, _ANY, Any, sure=False)
        if head.isdigit():
            # Beyond the end, the server makes an element of what is set, and nulls before it.
            element = copy.copy(element)
            element.sure = False
        return _descend(element, parts[1:])
    if shape.kind == "map":
        return _descend(_of_key(spot, head, sure=sure), parts[1:])
    if shape.kind == "model":
        nested = codec.codec_of(shape.python)
        whole = spot.required or not any(each.info.is_required() for each in nested.fields)
        return _find(nested, parts, sure=sure and whole)
    return Spot(codec, _ANY, Any, sure=sure and spot.bare is Any)


def _of_field(codec: Codec[Any], field: StoredField, *, sure: bool) -> Spot:
    model, info, shape = codec.model, field.info, field.shape
    schema, definitions, config = _field_schema(model, field.name)
    judged = any(field.name in each.info.fields or "*" in each.info.fields for each in _validators(model))
    alone = schema is not None and not _needs_others(schema)

    def compile() -> Check | None:
        if shape == _ANY or not alone:
            return None
        validator = SchemaValidator(
            {"type": "definitions", "schema": schema, "definitions": definitions}, config=config
        )
        return _checking(adapter_of(codec, shape), validator.validate_python, field_encoder(codec, field))

    return Spot(
        codec,
        shape,
        info.annotation,
        compile,
        sure=sure and (alone or shape == _ANY),
        free=not judged and not _has_rules(shape) and not _strict_numbers(model),
        required=info.is_required() and not shape.optional,
    )


def _of_key(spot: Spot, key: str, *, sure: bool) -> Spot:
    """One value of a map, judged together with its key."""
    codec, shape = spot.codec, spot.shape
    pair = _by_type(codec, shape, spot.bare, sure=sure)

    def compile() -> Check | None:
        whole = pair.check
        return None if whole is None else lambda value: next(iter(whole({key: value}).values()))

    value = shape.items[1]
    annotation = get_args(spot.bare)[1] if len(get_args(spot.bare)) > 1 else Any
    return Spot(codec, value, annotation, compile, sure=sure, free=not _has_rules(value))


def _by_type(codec: Codec[Any], shape: Shape, annotation: Any, *, sure: bool) -> Spot:
    """A spot that its type alone describes: an element, a value of a map."""

    def compile() -> Check | None:
        if shape == _ANY:
            return None
        validate = type_adapter(annotation, codec.model).validate_python
        return _checking(adapter_of(codec, shape), validate, encoder_of(codec, shape))

    return Spot(
        codec, shape, annotation, compile, sure=sure, free=not _has_rules(shape), required=not shape.optional
    )


def _checking(adapt: Check | None, validate: Check, dump: Callable[[Any, list[Any]], Any] | None) -> Check:
    def check(value: Any) -> Any:
        # What adapts a stored value takes it over.
        read = copy.deepcopy(value) if type(value) in (dict, list) else value
        if adapt is not None and read is not None:
            read = adapt(read)
        validated = validate(read)
        if dump is None:
            return value
        return None if validated is None else dump(validated, [])

    return check


# -- what a model asks of its values ------------------------------------------------------------------

_ANY = Shape("any", Any)


def _judges_the_whole(model: type[BaseModel]) -> bool:
    """Whether validity may depend on several fields at once."""
    decorators = model.__pydantic_decorators__
    return bool(
        decorators.model_validators
        or decorators.root_validators
        or "__get_pydantic_core_schema__" in {name for each in _own_classes(model) for name in vars(each)}
        or model.__pydantic_custom_init__
        or model.model_post_init.__qualname__.split(".")[0] not in ("BaseModel", "init_private_attributes")
    )


def _own_classes(model: type[BaseModel]) -> list[type]:
    """The classes that its author wrote."""
    return [each for each in model.__mro__ if each.__module__.split(".")[0] not in ("pydantic", "treadle")]


def _validators(model: type[BaseModel]) -> list[Any]:
    decorators = model.__pydantic_decorators__
    return [*decorators.field_validators.values(), *decorators.validators.values()]


def _has_rules(shape: Shape) -> bool:
    """Whether a type carries bounds or validators; declarations of patterns and indexes are none."""
    return any(
        type(item).__module__.split(".")[0] in ("annotated_types", "pydantic", "pydantic_core")
        or hasattr(item, "__get_pydantic_core_schema__")
        for item in shape.metadata
    )


def _strict_numbers(model: type[BaseModel]) -> bool:
    config = model.model_config
    return bool(config.get("strict")) or config.get("allow_inf_nan") is False


def _field_schema(model: type[BaseModel], name: str) -> tuple[Any, list[Any], Any]:
    """Pydantic's schema of one field, validators included, with the definitions that it refers to."""
    schema: Any = model.__pydantic_core_schema__
    definitions: list[Any] = []
    if schema["type"] == "definitions":
        definitions, schema = schema["definitions"], schema["schema"]
    config = None
    while schema["type"] != "model-fields":
        if schema["type"] == "definition-ref":
            schema = next(each for each in definitions if each["ref"] == schema["schema_ref"])
        elif "schema" not in schema:
            return None, [], None
        else:
            config = schema.get("config", config)
            schema = schema["schema"]
    return schema["fields"][name]["schema"], definitions, config


def _needs_others(schema: Any) -> bool:
    """Whether a validator of the field may look at other fields."""
    if isinstance(schema, dict):
        function = schema.get("function")
        if isinstance(function, dict) and function.get("type") == "with-info":
            return True
        # The models inside have fields of their own, which are all there.
        return schema.get("type") != "model" and any(map(_needs_others, schema.values()))
    return isinstance(schema, list) and any(map(_needs_others, schema))


def _bare(annotation: Any) -> Any:
    """A type without what is said about it, None included."""
    while True:
        origin = get_origin(annotation)
        if origin is typing.Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__") and not isinstance(annotation, type):
            annotation = annotation.__value__
        elif origin in (Union, types.UnionType):
            members = [each for each in get_args(annotation) if each is not type(None)]
            if len(members) != 1:
                return annotation
            annotation = members[0]
        else:
            return annotation
