"""The stored paths that aggregation expressions and filters read.

The server evaluates a name that no document has to nothing, so a misspelt one would store null, and a
computation from scratch would agree. So each name in a declaration must lead to a field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treadle.errors import DeclarationError, UsageError
from treadle.model.shape import ModelCodec
from treadle.query.field_paths import FieldPaths
from treadle.query.filters import LOGICAL
from treadle.query.paths import plain

# The variables that stand for the whole document.
_DOCUMENT = ("$$ROOT", "$$CURRENT")
# The parts of an attribute as it is stored.
_PAIR = ("k", "v", "u")


def require_known_names(expression: Any, codec: ModelCodec, label: str) -> None:
    """Raise `DeclarationError` if an expression over a model's documents names a field that they do not have.

    A field of a kind below the model is known, and so is any name below a dict. `label` says whose
    expression it is.
    """
    fields = FieldPaths(codec)
    for path in filter(None, paths_named(expression)):
        try:
            attribute = fields.named(path, f"expression of {label}").attribute
        except UsageError as error:
            reason = error.message.removesuffix(" (Unchecked({…}) lets it through)")
            raise DeclarationError(reason, code=error.code) from None
        if attribute is not None and attribute.name not in (None, *_PAIR):
            pairs = f"{attribute.map_path!r} is stored as an array of {{'k': name, 'v': value}}"
            raise DeclarationError(
                f"the expression of {label} names {path!r}, but {pairs}; $filter that array, or make "
                f"{attribute.name!r} a field of its own",
                code="attributes-path",
            )


def field_references(expression: Any) -> set[str] | None:
    """Return the stored paths that an expression reads, without positions; None where it may read any."""
    return _without_positions(paths_named(expression))


def filter_references(filter: Mapping[str, Any]) -> set[str] | None:
    """Return the stored paths that a filter reads, without positions; None where it may read any."""
    return _without_positions(_of_filter(filter))


def _without_positions(paths: Iterable[str]) -> set[str] | None:
    names = set(map(plain, paths))
    return None if "" in names else names


def _of_filter(filter: Mapping[str, Any]) -> Iterator[str]:
    for key, condition in filter.items():
        if key in LOGICAL:
            for each in condition:
                yield from _of_filter(each)
        elif key == "$expr":
            yield from paths_named(condition)
        else:
            yield "" if key.startswith("$") else key


def paths_named(expression: Any) -> list[str]:
    """Return the stored paths of the document that an expression names; "" where it may read any.

    What lies in a variable other than `$$ROOT` and `$$CURRENT` belongs to an element or to a computed value,
    whose names are not returned.
    """
    if isinstance(expression, str):
        return _of_text(expression)
    if isinstance(expression, Mapping):
        return [path for item in expression.items() for path in _of_argument(*item)]
    items = expression if isinstance(expression, (list, tuple)) else ()
    return [path for item in items for path in paths_named(item)]


def _of_text(text: str) -> list[str]:
    if text.startswith("$$"):
        variable, _, path = text.partition(".")
        return [path] if variable in _DOCUMENT else []
    return [text[1:]] if text.startswith("$") else []


def _of_argument(operator: str, argument: Any) -> list[str]:
    """Return the paths in the argument of an operator, or in the value of an object's key."""
    if operator in ("$literal", "$const"):
        return []
    if operator == "$getField":
        return _of_get_field(argument)
    if operator == "$let" and isinstance(argument, Mapping) and "CURRENT" in argument.get("vars", ()):
        # Names below are those of another value.
        return [""]
    return paths_named(argument)


def _of_get_field(argument: Any) -> list[str]:
    given = argument if isinstance(argument, Mapping) and "field" in argument else {"field": argument}
    field, source = given["field"], given.get("input", "$$CURRENT")
    outer = paths_named(source)
    if isinstance(field, Mapping) and "$literal" in field:
        field = field["$literal"]
    elif not isinstance(field, str) or field.startswith("$"):
        return [*outer, *paths_named(field)]
    return [f"{outer[0]}.{field}".lstrip(".")] if isinstance(source, str) and outer else outer
