"""Filters and sorts as callers give them, made safe and storable in one pass.

They are MongoDB's own language with stored names. Python's Decimal, enums, dates and sets are converted as
in models, text becomes an ObjectId where the field is an `Id`, and conditions on attributes become
conditions on pairs. Operators that run code on the server are refused at any depth.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bson import ObjectId
from pydantic import ValidationError

from treadle.errors import UsageError
from treadle.model.bson_types import Raw, check_key, clean, key_to_bson, refuse_unsendable, too_deep
from treadle.model.shape import ModelCodec
from treadle.model.text import quote
from treadle.query.attributes import attribute_conditions
from treadle.query.field_paths import FieldPath, FieldPaths, Unchecked
from treadle.query.field_types import Unjudgeable

Sort: TypeAlias = str | Sequence[str | tuple[str, int]] | Mapping[str, int]
# Finds a full stored path; refuses one that leads nowhere.
Lookup: TypeAlias = Callable[[str], FieldPath]

LOGICAL = frozenset({"$and", "$or", "$nor"})
# Their operands are not values of the field.
_UNTYPED = frozenset({"$regex", "$options", "$exists", "$type", "$size", "$mod", "$geoWithin", "$near"})
# Values of these types are stored as they are; of others perhaps as the serializer of a field says.
_SCALARS = frozenset({str, int, float, bool, bytes, type(None), ObjectId})
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{24}")


def refuse_operators(value: Any, operators: frozenset[str], reason: str, code: str) -> None:
    """Refuse a cleaned value that has one of these operators at any depth."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in operators:
            raise UsageError(f"{key} {reason}", code=code)
        if isinstance(item, (dict, list)):
            refuse_operators(item, operators, reason, code)


# -- filters ------------------------------------------------------------------------------------------


def parse_filter(paths: FieldPaths, filter: Any, scope: Raw | None = None) -> Raw:
    """Return a filter that the driver can send, confined to the model's own documents or to another scope."""
    if filter is None:
        return confine(paths.codec, {}, scope)
    if not isinstance(filter, Mapping):
        raise UsageError(
            f"a filter for {paths.model} is a mapping such as {{'status': 'open'}}, "
            f"not {type(filter).__name__}",
            code="filter-invalid",
        )
    if isinstance(filter, Unchecked):
        for key in filter:
            if not str(key).startswith("$"):
                paths.named(key, "filter", lenient=True)
        return confine(paths.codec, clean(filter), scope)
    # Outdated documents may have fields that the current version does not have.
    lenient = paths.codec.has_former_names
    parser = FilterParser(paths, lambda path: paths.named(path, "filter", lenient=lenient))
    return confine(paths.codec, parser.parse(filter), scope)


def parse_condition(codec: ModelCodec, condition: Mapping[str, Any]) -> Raw:
    """Return the condition of a declaration as the server evaluates it."""
    paths = FieldPaths(codec)
    return FilterParser(paths, paths.__getitem__).parse(condition)


def parse_match(paths: FieldPaths, condition: Mapping[str, Any]) -> Raw:
    """Return the condition of a `$match` stage, which sees attributes as the pairs that are stored."""
    lenient = paths.codec.has_former_names
    parser = FilterParser(
        paths, lambda path: paths.named(path, "filter", lenient=lenient)._replace(attribute=None)
    )
    return parser.parse(condition)


def confine(codec: ModelCodec, filter: Raw, scope: Mapping[str, Any] | None = None) -> Raw:
    """Return a filter that finds only the model's own documents, or those of another scope.

    The scope stands beside the caller's conditions, so that the server can use a partial index.
    """
    scope = codec.scope if scope is None else scope
    both = scope.keys() & filter.keys()
    if not both:
        return {**scope, **filter} if scope else filter
    rest = {key: condition for key, condition in filter.items() if key not in both}
    rest["$and"] = [*rest.get("$and", ()), {key: filter[key] for key in both}]
    return {**scope, **rest}


class FilterParser:
    """Parses the conditions of one filter, or of one operand of an update."""

    def __init__(self, paths: FieldPaths, lookup: Lookup) -> None:
        self._paths = paths
        self._lookup = lookup

    def parse(self, filter: Mapping[str, Any], full_path: Callable[[str], str] = str) -> Raw:
        """Return the conditions in their stored form; `full_path` makes a stored path of a key."""
        try:
            return self._conditions(filter, full_path)
        except RecursionError:
            raise too_deep("filter") from None

    def _conditions(self, filter: Mapping[str, Any], full_path: Callable[[str], str]) -> Raw:
        parsed: Raw = {}
        on_attributes: list[Raw] = []
        for key, condition in filter.items():
            key = key_to_bson(key)
            if key.startswith("$"):
                parsed[key] = self._top_level(key, condition, full_path)
                continue
            field = self._lookup(full_path(key))
            stored = self.condition(field, condition)
            if field.attribute is None:
                parsed[key] = stored
            else:
                on_attributes += attribute_conditions(field.attribute, stored)
        if on_attributes:
            parsed["$and"] = [*parsed.get("$and", ()), *on_attributes]
        return parsed

    def _top_level(self, operator: str, operand: Any, full_path: Callable[[str], str]) -> Any:
        check_key(operator)
        if operator not in LOGICAL or not isinstance(operand, (list, tuple)):
            return clean(operand)
        filters = [each if isinstance(each, Mapping) else clean(each) for each in operand]
        return [self._conditions(each, full_path) if isinstance(each, Mapping) else each for each in filters]

    def condition(self, field: FieldPath, condition: Any) -> Any:
        """Return operators or a value for one field, in their stored form."""
        if type(condition) not in _SCALARS and isinstance(condition, Mapping):
            operators = {key_to_bson(key): operand for key, operand in condition.items()}
            if any(key.startswith("$") for key in operators):
                return {key: self._operand(field, key, operand) for key, operand in operators.items()}
        return self._stored(field, condition)

    def _operand(self, field: FieldPath, operator: str, operand: Any) -> Any:
        check_key(operator)
        if operator in _UNTYPED:
            return clean(operand)
        if operator == "$elemMatch" and isinstance(operand, Mapping):
            # The elements of an attribute's array are pairs.
            return self.of_elements(field, operand) if field.attribute is None else clean(operand)
        if isinstance(operand, (list, tuple)):
            return [self.condition(field, each) for each in operand]
        return self.condition(field, operand)

    def of_elements(self, field: FieldPath, condition: Mapping[str, Any]) -> Raw:
        """Return a condition on the elements of an array: on their fields, or on themselves."""
        parsed = {}
        for name, operand in condition.items():
            key = key_to_bson(name)
            if key.startswith("$") and key not in LOGICAL:
                parsed[key] = self._operand(field, key, operand)
            else:
                parsed |= self._conditions({key: operand}, lambda each: f"{field.path}.{each}")
        return parsed

    def _stored(self, field: FieldPath, value: Any) -> Any:
        """Return a value as an insert would store it, and as an id where text stands for one."""
        if type(value) in _SCALARS:
            refuse_unsendable(value)
            return _with_ids(value) if field.holds_ids else value
        if isinstance(value, (list, tuple)):
            return [self._stored(field, each) for each in value]
        if field.holds_fields and isinstance(value, Mapping):
            items = {key_to_bson(key): each for key, each in value.items()}
            return {key: self._stored(self._inside(field, key), each) for key, each in items.items()}
        for type_ in field.serialized:
            with contextlib.suppress(ValidationError, UsageError, Unjudgeable):
                value = type_.stored(value)
                break
        value = clean(value)
        return _with_ids(value) if field.holds_ids else value

    def _inside(self, field: FieldPath, key: str) -> FieldPath:
        check_key(key)
        return self._paths[f"{field.path}.{key}"]


def _with_ids(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_with_ids, value))
    return ObjectId(value) if isinstance(value, str) and _HEXADECIMAL.fullmatch(value) else value


# -- sorts --------------------------------------------------------------------------------------------


def sort_keys(
    sort: Sort | None, paths: FieldPaths | None = None, *, tie_breaker: bool = True
) -> list[tuple[str, int]] | None:
    """Return PyMongo's form of a sort, with ties broken by `_id`."""
    if sort is None:
        return None
    keys = [_sort_key(part) for part in _sort_parts(sort)]
    if paths is not None:
        for path, _ in keys:
            paths.named(path, "sort", lenient=paths.codec.has_former_names)
    if tie_breaker and "_id" not in dict(keys):
        keys.append(("_id", 1))
    return keys


def _sort_parts(sort: Any) -> Sequence[Any]:
    if isinstance(sort, Mapping):
        return list(sort.items())
    if not isinstance(sort, Sequence):
        raise UsageError(
            f"sort= takes '-date', ['-likes', 'date'] or [('likes', -1)], not {type(sort).__name__}",
            code="sort-invalid",
        )
    return [sort] if isinstance(sort, str) else sort


def _sort_key(part: Any) -> tuple[str, int]:
    if isinstance(part, str):
        part = (part.removeprefix("-"), -1) if part.startswith("-") else (part.removeprefix("+"), 1)
    if not isinstance(part, (tuple, list)) or len(part) != 2 or part[1] not in (1, -1):
        raise UsageError(
            f"the sort has {quote(part)}; write '-date', ['-likes', 'date'] or [('likes', -1)]",
            code="sort-invalid",
        )
    path, direction = part
    if not isinstance(path, str) or not path or path.startswith("$"):
        raise UsageError(f"the sort names {path!r}, which is not a field", code="sort-invalid")
    return path, direction
