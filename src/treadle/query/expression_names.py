"""The stored paths that an aggregation expression names, each of which must lead to a field.

The server evaluates a name that no document has to nothing, so a misspelt one would store null, and a
computation from scratch would agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.errors import DeclarationError, UsageError
from treadle.model.codec import Codec
from treadle.query.field_paths import FieldPaths

# The variables that stand for the whole document.
_DOCUMENT = ("$$ROOT", "$$CURRENT")
_LITERALS = ("$literal", "$const")


def require_known_names(expression: Any, codec: Codec[Any], label: str) -> None:
    """Raise `DeclarationError` if an expression over a model's documents names a field that they do not have.

    A field of a kind below the model is known, and so is any name below a dict. `label` says whose
    expression it is.
    """
    fields = FieldPaths(codec)
    for path in paths_named(expression):
        try:
            fields.named(path, f"expression of {label}")
        except UsageError as error:
            reason = error.message.removesuffix(" (Unchecked({…}) lets it through)")
            raise DeclarationError(reason, code=error.code) from None


def paths_named(expression: Any) -> list[str]:
    """Return the stored paths of the document that an expression names.

    What lies in a variable other than `$$ROOT` and `$$CURRENT` belongs to an element or to a value that
    was computed, so its names are not told.
    """
    if isinstance(expression, str):
        return [path] if (path := _path(expression)) else []
    if isinstance(expression, Mapping):
        return [path for item in expression.items() for path in _argument_paths(*item)]
    items = expression if isinstance(expression, (list, tuple)) else ()
    return [path for item in items for path in paths_named(item)]


def _argument_paths(operator: str, argument: Any) -> list[str]:
    """Return the paths that the argument of an operator, or the value of an object's key, names."""
    if operator == "$getField":
        return _get_field_paths(argument)
    if operator in _LITERALS or _rebinds_current(operator, argument):
        return []
    return paths_named(argument)


def _path(text: str) -> str | None:
    """Return the path that a text names, "" for the whole document; None if it names no field."""
    if text.startswith("$$"):
        variable, _, path = text.partition(".")
        return path if variable in _DOCUMENT else None
    return text[1:] if text.startswith("$") else None


def _get_field_paths(argument: Any) -> list[str]:
    """Return the paths of a `$getField`, whose field is a constant unless it is an expression."""
    given = argument if isinstance(argument, Mapping) and "field" in argument else {"field": argument}
    field, source = given["field"], given.get("input", "$$CURRENT")
    if isinstance(field, Mapping):
        field = field.get("$literal", field)
    if not isinstance(field, str):
        return [*paths_named(source), *paths_named(field)]
    outer = _path(source) if isinstance(source, str) else None
    if outer is None:
        return paths_named(source)
    return [f"{outer}.{field}" if outer else field]


def _rebinds_current(operator: str, argument: Any) -> bool:
    """Whether names below this operator are not those of the document."""
    return operator == "$let" and isinstance(argument, Mapping) and "CURRENT" in argument.get("vars", ())
