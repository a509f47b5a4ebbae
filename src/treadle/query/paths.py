"""Dotted paths: from Python names to stored names, and along them through raw documents."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, NamedTuple

from bson import DBRef
from pydantic import BaseModel

from treadle.errors import DeclarationError, UsageError
from treadle.model.attributes import is_paired
from treadle.model.bson_types import Raw
from treadle.model.codec import StoredField, codec_of
from treadle.model.shape import ANY, ModelCodec, Shape

ARRAYS = frozenset({"list", "set", "frozenset", "tuple"})
# Where a DBRef holds the id of the document that it refers to.
REFERRED = "$id"
# No field has a longer name, and comparing a very long one takes seconds.
NAME_LENGTH_MAX = 200
# Nearly every document is a dict, which is recognised in a quarter of the time.
_DOCUMENT = (dict, Mapping)


class Step(NamedTuple):
    """One segment of a path; `array` says that a document may hold many values here."""

    name: str
    stored: str
    array: bool


class Path(NamedTuple):
    """A path into a model: its steps, and the shape of the values at its end."""

    steps: tuple[Step, ...]
    shape: Shape
    stored: str

    @property
    def python(self) -> str:
        return ".".join(step.name for step in self.steps)

    @property
    def in_array(self) -> bool:
        return any(step.array for step in self.steps)


def resolve(codec: ModelCodec, path: str, where: str, code: str) -> Path:
    """Return the path that Python (or stored) names describe; raises `DeclarationError` if there is none."""
    if not isinstance(path, str):
        raise DeclarationError(f"{where} names {path!r}; it takes the name of a field", code=code)
    steps: list[Step] = []
    current: ModelCodec | None = codec
    shape = ANY
    for name in path.split("."):
        if current is not None:
            declared = _declared(current, path, name, where, code)
            refuse_array_of_arrays(declared.shape, where)
            step, shape = Step(declared.name, declared.stored, declared.shape.kind in ARRAYS), declared.shape
        elif shape.kind == "map" and not is_paired(shape):
            # A dict may have any key.
            step, shape = Step(name, name, shape.items[1].kind in ARRAYS), shape.items[1]
        elif name == REFERRED and shape.kind == "any":
            # A reference of another library: MongoDB's own kind, which holds the id.
            step, shape = Step(name, name, False), replace(ANY, optional=True)
        else:
            raise _leads_nowhere(path, steps, shape, where, code)
        steps.append(step)
        shape = elements(shape)[0]
        current = codec_of(shape.python) if shape.kind == "model" else None
    return Path(tuple(steps), shape, ".".join(step.stored for step in steps))


def _declared(codec: ModelCodec, path: str, name: str, where: str, code: str) -> StoredField:
    declared = codec.by_name.get(name) or codec.by_stored.get(name)
    if declared is None:
        raise DeclarationError(
            f"{where} names {path!r}, but {codec.model.__name__} has no field {name!r}; "
            f"{suggestion(name, codec.by_name)}",
            code=code,
        )
    return declared


def _leads_nowhere(path: str, steps: Sequence[Step], shape: Shape, where: str, code: str) -> DeclarationError:
    if is_paired(shape):
        return DeclarationError(
            f"{where} names {path!r}, an attribute, which is not a field of its own in what is stored; copy "
            "what you need into a field",
            code="attributes-path",
        )
    return DeclarationError(
        f"{where} names {path!r}, but {steps[-1].name!r} has no fields of its own", code=code
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the nearest of the known ones, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1) if len(name) <= NAME_LENGTH_MAX else []
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"


def unknown_field(where: str, name: str, model: str, known: Iterable[str]) -> UsageError:
    """Return the refusal of a name that a model does not have."""
    return UsageError(
        f"{where} {name!r}, but {model} has no such field; {suggestion(name, known)}", code="field-unknown"
    )


def refuse_array_of_arrays(shape: Shape, where: str) -> None:
    """Refuse what MongoDB's paths do not reach into: an array that is an element of another."""
    if shape.kind in ARRAYS and shape.items and shape.items[0].kind in ARRAYS:
        raise DeclarationError(
            f"{where} lies in a list of lists, which MongoDB's paths do not reach into; "
            "wrap the inner list in a model",
            code="array-of-arrays",
        )


def elements(shape: Shape) -> list[Shape]:
    """Return the shape itself, or what arrays of it hold, at any depth."""
    if shape.kind not in ARRAYS:
        return [shape]
    return [element for item in shape.items or (ANY,) for element in elements(item)]


def model_of(shape: Shape) -> type[BaseModel] | None:
    """Return the model that a field holds, one or many."""
    element = elements(shape)[0]
    return element.python if element.kind == "model" else None


def models_of(shape: Shape) -> list[type[BaseModel]]:
    """Return the models that a field may hold, those of a union included."""
    element = elements(shape)[0]
    members = element.items if element.kind == "union" else (element,)
    return [member.python for member in members if member.kind == "model"]


# -- through raw documents, along paths without arrays -------------------------------------------------


def value_at(raw: Any, path: str) -> Any:
    """Return the value at a stored path, the whole for ""; None where a step is missing."""
    if "." not in path and path:
        if isinstance(raw, _DOCUMENT):
            return raw.get(path)
        return raw.id if isinstance(raw, DBRef) and path == REFERRED else None
    for name in path.split(".") if path else ():
        if isinstance(raw, _DOCUMENT):
            raw = raw.get(name)
        elif isinstance(raw, DBRef) and name == REFERRED:
            raw = raw.id
        else:
            return None
    return raw


def getter(path: str) -> Callable[[Raw], Any]:
    """Return the function that reads one path of any document, for paths that are read often."""
    return (lambda raw: value_at(raw, path)) if "." in path else methodcaller("get", path)


def has(raw: Any, path: str) -> bool:
    """Whether there is a value, null included, at a stored path."""
    for name in path.split("."):
        if not isinstance(raw, _DOCUMENT) or name not in raw:
            return False
        raw = raw[name]
    return True


def put(raw: Raw, path: str, value: Any) -> None:
    """Set the value at a stored path; creates the documents on the way."""
    *outer, last = path.split(".")
    for name in outer:
        inner = raw.get(name)
        if not isinstance(inner, dict):
            inner = raw[name] = {}
        raw = inner
    raw[last] = value


def drop(raw: Any, path: str) -> None:
    """Remove the value at a stored path, if there is one."""
    outer, _, last = path.rpartition(".")
    holder = value_at(raw, outer)
    if isinstance(holder, dict):
        holder.pop(last, None)


# -- through raw documents, through arrays ------------------------------------------------------------


def values_at(raw: Any, steps: Sequence[Step]) -> Iterator[Any]:
    """Yield each value that the steps lead to, in order; nulls included."""
    if isinstance(raw, list):
        for item in raw:
            yield from values_at(item, steps)
    elif not steps:
        yield raw
    elif isinstance(raw, Mapping) and steps[0].stored in raw:
        yield from values_at(raw[steps[0].stored], steps[1:])
    elif isinstance(raw, DBRef) and steps[0].stored == REFERRED:
        yield raw.id


# -- paths as text ------------------------------------------------------------------------------------


def top(path: str) -> str:
    """Return the field of the document itself with which a stored path begins."""
    return path.partition(".")[0]


def tops(paths: Iterable[str]) -> set[str]:
    """Return the fields of the document itself with which stored paths begin."""
    return {top(path) for path in paths}


def overlap(one: str, other: str) -> bool:
    """Whether two stored paths are the same or one contains the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that do not lie inside another, as a projection demands."""
    every = set(paths)
    return sorted(path for path in every if not any(path.startswith(other + ".") for other in every))


def plain(path: str) -> str:
    """Return a path of an update without positions: `lines.$[i].sku` and `lines.0.sku` are `lines.sku`."""
    # The first segment is the name of a field, even if it is a number.
    head, *rest = path.split(".")
    return ".".join([head, *(part for part in rest if not (part.isdigit() or part.startswith("$")))])


# -- expressions --------------------------------------------------------------------------------------


def expression_of(path: str) -> Any:
    """Return the expression that reads a stored path, which may end in the id of a DBRef."""
    return variable_field("", path)


def variable_field(variable: str, path: str) -> Any:
    """Return the expression that reads a path of a variable, which may end in the id of a DBRef."""
    prefix = f"$${variable}." if variable else "$"
    outer, _, last = path.rpartition(".")
    if last != REFERRED:
        return f"{prefix}{path}"
    reference = f"{prefix}{outer}".rstrip(".")
    return {"$getField": {"field": {"$literal": REFERRED}, "input": reference}}
