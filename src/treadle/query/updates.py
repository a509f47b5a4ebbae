"""An update as a caller gives it, parsed once and asked many times.

One pass over the update refuses what the model does not have and what Treadle maintains, brings every value
into the form in which an insert stores it, and notes what the update touches. What cannot be judged without
the rest of the document (a validator of the whole model, the result of an `$inc` under a bound, a pipeline)
makes the update inexact: the result must then be validated before it is committed.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bson.decimal128 import Decimal128
from pydantic import ValidationError
from pydantic_core import SchemaValidator, core_schema

from treadle.errors import InvalidValue, UsageError
from treadle.model.bson_types import (
    Raw,
    Update,
    check_values,
    clean,
    decimal_to_bson,
    from_bson,
    to_bson,
    too_deep,
)
from treadle.query.attributes import update_stages
from treadle.query.field_paths import FieldPath, FieldPaths, Unchecked
from treadle.query.field_types import FieldType, Unjudgeable
from treadle.query.filters import FilterParser

_SETTING_STAGES = frozenset({"$set", "$addFields", "$unset"})
UPDATE_STAGES = _SETTING_STAGES | {"$project", "$replaceWith", "$replaceRoot"}
# `$[identifier]`, the elements that an array filter chooses.
_IDENTIFIER = re.compile(r"\$\[([^\].]+)\](?=\.|$)")
# Added to the largest Decimal128, anything smaller than this is rounded away.
DECIMAL_SAFE = decimal.Decimal("1E6110")
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    schema["type"]: SchemaValidator(schema).validate_python
    for schema in (core_schema.int_schema(), core_schema.float_schema(), core_schema.decimal_schema())
}


class ParsedUpdate(NamedTuple):
    """An update that may be sent."""

    update: Update
    # The stored paths that it may change, without positions; None where it may change any.
    touched: frozenset[str] | None
    # Whether no result of it can be invalid.
    is_exact: bool
    # Whether something is derived from what it touches.
    is_followed: bool
    array_filters: list[Any] | None = None


# Returns the stored form of a value, and whether no result of it can be invalid.
_Handler = Callable[[FieldType, Any], tuple[Any, bool]]


class _Refused(Exception):
    """A value that the operator does not take, in words for the caller."""


def parse_update(paths: FieldPaths, update: Any, array_filters: Sequence[Any] | None = None) -> ParsedUpdate:
    """Return an update with operators, or a pipeline, that the driver can send.

    Raises `InvalidValue` where a value does not fit its field, and `UsageError` for everything else.
    """
    try:
        # A dict is recognised in less time than a Mapping.
        if isinstance(update, (dict, Mapping)):
            return _OperatorParser(paths, isinstance(update, Unchecked)).parse(update, array_filters)
        if isinstance(update, Sequence) and not isinstance(update, (str, bytes)):
            return _parse_pipeline(paths, update)
    except RecursionError:
        raise too_deep("update") from None
    raise UsageError(
        f"an update is a mapping with operators or a pipeline of stages, not {type(update).__name__}",
        code="update-invalid",
    )


# -- operators ----------------------------------------------------------------------------------------


class _OperatorParser:
    def __init__(self, paths: FieldPaths, unchecked: bool) -> None:
        self.paths = paths
        self.unchecked = unchecked
        self.parsed: dict[str, Raw] = {}
        self.fields: dict[str, FieldPath] = {}
        self.is_exact = True

    def parse(self, update: Mapping[Any, Any], array_filters: Sequence[Any] | None) -> ParsedUpdate:
        for operator, changes in update.items():
            handle = self._handler(operator, changes)
            self.parsed[operator] = {
                path: self._value(self._field(path), operator, handle, value)
                for path, value in changes.items()
            }
        if not self.parsed:
            raise self._no_operators()
        fields = self.fields.values()
        return ParsedUpdate(
            self._sent(),
            frozenset(field.plain for field in fields),
            self.is_exact,
            any(field.is_followed for field in fields),
            None if array_filters is None else self._array_filters(array_filters),
        )

    def _sent(self) -> Update:
        attributes = {path: field.attribute for path, field in self.fields.items()}
        if self.unchecked or not any(attributes.values()):
            return self.parsed
        return update_stages(self.paths.model, self.parsed, attributes)

    def _handler(self, operator: Any, changes: Any) -> _Handler:
        if not (isinstance(operator, str) and operator.startswith("$")):
            raise self._no_operators()
        if operator not in _HANDLERS:
            raise UsageError(
                f"{operator!r} is not an update operator; there are {', '.join(sorted(_HANDLERS))}",
                code="update-invalid",
            )
        if not isinstance(changes, (dict, Mapping)):
            raise UsageError(f"{operator} in an update takes a mapping of fields", code="update-invalid")
        return _HANDLERS[operator]

    def _no_operators(self) -> UsageError:
        return UsageError(
            f"an update of {self.paths.model} uses MongoDB's operators, such as "
            "{'$set': {'status': 'paid'}}; to write a whole document use replace()",
            code="update-invalid",
        )

    def _field(self, path: str) -> FieldPath:
        field = self.fields[path] = self.paths[path]
        if field.protected is not None or field.unknown is not None:
            field.check_update(unchecked=self.unchecked)
        return field

    def _value(self, field: FieldPath, operator: str, handle: _Handler, value: Any) -> Any:
        """Return the stored form of one value."""
        if operator == "$rename" and isinstance(value, str):
            self._field(value)
        if operator in ("$addToSet", "$pullAll") and field.is_completed:
            raise UsageError(
                f"{operator} compares whole elements, but those of {self.paths.model}.{field.path} also hold "
                "what Treadle maintains; use $push, or $pull with a condition on fields",
                code="update-invalid",
            )
        if self.unchecked:
            return clean(value)
        if operator in ("$pull", "$pullAll"):
            value = self._of_elements(field, value)
        if field.serialized and handle in (_set, _push):
            # Not in BSON's form, which the field's own validator may read as something else.
            stored, certain = self._judged(field, handle, value)
            stored = to_bson(stored, [])
        else:
            stored, certain = self._judged(field, handle, to_bson(value, []))
        self.is_exact = self.is_exact and certain
        # Only now, because a serializer may have made a value that can be sent.
        check_values(stored)
        return stored

    def _of_elements(self, field: FieldPath, condition: Any) -> Any:
        parser = FilterParser(self.paths, lambda path: self.paths.named(path, "update"))
        parse = parser.of_elements if isinstance(condition, Mapping) else parser.condition
        return parse(field, condition)

    def _judged(self, field: FieldPath, handle: _Handler, value: Any) -> tuple[Any, bool]:
        try:
            stored, certain = handle(field.type, value)
        except Unjudgeable:
            return value, False
        except (ValidationError, _Refused) as error:
            if isinstance(error, ValidationError) and field.is_completed:
                return value, False
            inner, reason = _problem(field.path, error)
            raise InvalidValue(
                f"the update has a value for {self.paths.model}.{field.path}{inner} that does not fit: "
                f"{reason}; nothing was changed",
                code="document-invalid",
            ) from None
        certain = certain and field.certain
        return stored, certain and (not field.others or _suits_all(field.others, handle, value))

    def _array_filters(self, filters: Sequence[Any]) -> list[Any]:
        """Return the conditions on elements, which the update names by `$[identifier]`."""
        if self.unchecked:
            return [clean(each) for each in filters]
        arrays: dict[str, str] = {}
        for path in self.fields:
            for match in _IDENTIFIER.finditer(path):
                arrays.setdefault(match[1], path[: match.end()])

        def full_path(key: str) -> str:
            identifier, dot, rest = key.partition(".")
            return f"{arrays.get(identifier, identifier)}{dot}{rest}"

        parser = FilterParser(self.paths, lambda path: self.paths.named(path, "array filter"))
        return [
            parser.parse(each, full_path) if isinstance(each, Mapping) else clean(each) for each in filters
        ]


def _problem(path: str, error: ValidationError | _Refused) -> tuple[str, str]:
    """Return where inside the value the first problem is, and what it is."""
    if isinstance(error, _Refused):
        return "", str(error)
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    parts = [str(part) for part in problem["loc"]]
    if parts and path.endswith(f".{parts[0]}"):
        # The key of a map, which the path names already.
        del parts[0]
    return "".join(f".{part}" for part in parts), f"{problem['msg']} ({problem['type']})"


def _suits_all(others: Sequence[FieldType], handle: _Handler, value: Any) -> bool:
    """Whether no result of a change can be invalid in documents of other kinds."""
    try:
        return all(handle(each, value)[1] for each in others)
    except (ValidationError, UsageError, Unjudgeable, _Refused):
        return False


def _set(type_: FieldType, value: Any) -> tuple[Any, bool]:
    return type_.stored(value), type_.certain


def _unset(type_: FieldType, value: Any) -> tuple[Any, bool]:
    if type_.required:
        raise _Refused("the field is required")
    return value, type_.certain


def _inc(type_: FieldType, value: Any) -> tuple[Any, bool]:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal128)):
        raise _Refused(f"only a number can be added or multiplied, not {type(value).__name__}")
    validate = _NUMBERS.get(type_.core_type) if type_.shape.kind == "scalar" else None
    if validate is None:
        return value, False
    # A Decimal128 would turn the sum of floats into one, which the field does not hold.
    number = validate(from_bson(value))
    if isinstance(number, decimal.Decimal):
        return decimal_to_bson(number), abs(number) < DECIMAL_SAFE and type_.is_open
    return number, type_.is_open


def _mul(type_: FieldType, value: Any) -> tuple[Any, bool]:
    stored, certain = _inc(type_, value)
    return stored, certain and type_.core_type != "decimal"


def _push(type_: FieldType, value: Any) -> tuple[Any, bool]:
    element = type_.element
    if element is None:
        return value, type_.is_open and type_.core_type == "any"
    if not (isinstance(value, dict) and "$each" in value):
        return _set(element, value)
    items = value["$each"]
    if not isinstance(items, (list, tuple)):
        raise _Refused("$each takes a list")
    return {**value, "$each": [element.stored(item) for item in items]}, element.certain


def _current_date(type_: FieldType, value: Any) -> tuple[Any, bool]:
    return value, value in (True, {"$type": "date"}) and type_.is_open and type_.core_type == "datetime"


_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("$set", "$setOnInsert", "$min", "$max"), _set),
    **dict.fromkeys(("$push", "$addToSet"), _push),
    **dict.fromkeys(("$pull", "$pullAll", "$pop"), lambda type_, value: (value, type_.is_open)),
    "$unset": _unset, "$inc": _inc, "$mul": _mul, "$currentDate": _current_date,
    "$bit": lambda type_, value: (value, type_.is_open and type_.core_type == "int"),
    "$rename": lambda type_, value: (value, False),
}  # fmt: skip


# -- pipelines ----------------------------------------------------------------------------------------


def is_update_stage(stage: Any) -> bool:
    """Whether an update pipeline may have this stage."""
    return isinstance(stage, Mapping) and len(stage) == 1 and next(iter(stage)) in UPDATE_STAGES


def _parse_pipeline(paths: FieldPaths, stages: Sequence[Any]) -> ParsedUpdate:
    if not stages or not all(map(is_update_stage, stages)):
        raise UsageError(
            f"an update pipeline is a list of stages, each one of {', '.join(sorted(UPDATE_STAGES))}",
            code="update-invalid",
        )
    rewrites = any(next(iter(stage)) not in _SETTING_STAGES for stage in stages)
    if rewrites and (paths.codec.owned or paths.maintained):
        raise UsageError(
            f"this pipeline rewrites the whole {paths.model}, with the fields that Treadle maintains; set "
            "the fields that change with $set",
            code="field-maintained",
        )
    touched, remaining = _names_in(stages)
    fields = [paths[path] for path in touched]
    _refuse_attributes(fields)
    if rewrites:
        return ParsedUpdate(clean(list(stages)), None, False, paths.are_followed(None))
    for field in fields:
        # A name that the pipeline removes again is a variable of its own.
        field.check_update(unchecked=field.path not in remaining)
    plain_paths = frozenset(field.plain for field in fields)
    return ParsedUpdate(clean(list(stages)), plain_paths, False, any(field.is_followed for field in fields))


def _names_in(stages: Sequence[Mapping[str, Any]]) -> tuple[set[str], set[str]]:
    """Return the names that stages set or remove, and those of them that are there in the end."""
    touched: set[str] = set()
    remaining: set[str] = set()
    for stage in stages:
        ((operator, body),) = stage.items()
        names = {body} if isinstance(body, str) else {each for each in body if isinstance(each, str)}
        touched |= names
        remaining = remaining - names if operator == "$unset" else remaining | names
    return touched, remaining


def _refuse_attributes(fields: Iterable[FieldPath]) -> None:
    for field in fields:
        if field.attribute is not None and field.attribute.name is not None:
            raise UsageError(
                f"a pipeline works on what is stored, where {field.path!r} is not a field: attributes are "
                "stored as pairs; change it by operators, such as $set",
                code="attributes-update",
            )
