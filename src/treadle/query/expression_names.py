"""The stored paths that an aggregation expression names, each of which must lead to a field.

The server evaluates a name that no document has to nothing, so a misspelt one would store null, and a
computation from scratch would agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def paths_named(expression: Any) -> Iterator[str]:
    """Return the stored paths of the document that an expression names.

    What lies in a variable other than `$$ROOT` and `$$CURRENT` belongs to an element or to a value that
    was computed, so its names are not told.
    """
    if isinstance(expression, str):
        path = _path(expression)
        if path:
            yield path
    elif isinstance(expression, Mapping):
        for operator, argument in expression.items():
            if operator == "$getField":
                yield from _get_field_paths(argument)
            elif operator not in _LITERALS and not _rebinds_current(operator, argument):
                yield from paths_named(argument)
    elif isinstance(expression, (list, tuple)):
        for item in expression:
            yield from paths_named(item)


def _path(text: str) -> str | None:
    """Return the path that a text names, "" for the whole document; None if it names no field."""
    if text.startswith("$$"):
        variable, _, path = text.partition(".")
        return path if variable in _DOCUMENT else None
    return text[1:] if text.startswith("$") else None


def _get_field_paths(argument: Any) -> Iterator[str]:
    """Return the paths of a `$getField`, whose field is a constant unless it is an expression."""
    if not isinstance(argument, Mapping) or "field" not in argument:
        argument = {"field": argument}
    field, source = argument["field"], argument.get("input", "$$CURRENT")
    if isinstance(field, Mapping) and "$literal" in field:
        field = field["$literal"]
    outer = _path(source) if isinstance(source, str) else None
    if outer is not None and isinstance(field, str):
        yield f"{outer}.{field}" if outer else field
        return
    yield from paths_named(source)
    if not isinstance(field, str):
        yield from paths_named(field)


def _rebinds_current(operator: str, argument: Any) -> bool:
    """Whether names below this operator are not those of the document."""
    return operator == "$let" and isinstance(argument, Mapping) and "CURRENT" in argument.get("vars", ())
