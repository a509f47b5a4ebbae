"""Dotted paths: from Python names to stored names, and along them through raw documents."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

from bson import DBRef
from pydantic import BaseModel

from treadle.errors import DeclarationError, UsageError
from treadle.model.attributes import is_paired
from treadle.model.bson_types import Raw
from treadle.model.codec import Codec, codec_of
from treadle.model.shape import Shape

ARRAYS = frozenset({"list", "set", "frozenset", "tuple"})
# Where a DBRef holds the id of the document that it refers to.
REFERRED = "$id"
# No name of a field is longer; comparing one that is takes seconds.
NAME_LENGTH_MAX = 200
# First the one that it nearly always is, which is asked for at a quarter of the cost.
_DOCUMENT = (dict, Mapping)


@dataclass(frozen=True)
class Step:
    """One segment of a path; `array` says that a document may hold many values here."""

    name: str
    stored: str
    array: bool


@dataclass(frozen=True)
class Path:
    """A path into a model: its steps, and the shape of what stands at its end."""

    steps: tuple[Step, ...]
    shape: Shape
    stored: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", ".".join(step.stored for step in self.steps))

    @property
    def python(self) -> str:
        return ".".join(step.name for step in self.steps)

    @property
    def in_array(self) -> bool:
        return any(step.array for step in self.steps)

    @property
    def array_depth(self) -> int:
        """How many leading steps lead into the innermost array; 0 without one."""
        return max((number + 1 for number, step in enumerate(self.steps) if step.array), default=0)


def resolve(codec: Codec[Any], path: str, where: str, code: str) -> Path:
    """The path that Python (or stored) names describe; a suggestion where there is none."""
    if not isinstance(path, str):
        raise DeclarationError(f"{where} names {path!r}; it takes the name of a field", code=code)
    steps: list[Step] = []
    current: Codec[Any] | None = codec
    shape = Shape("any", Any)
    for name in path.split("."):
        if current is None and is_paired(shape):
            raise DeclarationError(
                f"{where} names {path!r}, an attribute, which is no field of its own in what is stored; copy "
                "what you need into a field",
                code="attributes-path",
            )
        if current is None and shape.kind == "map":
            # Any key of a dict may be there.
            steps.append(Step(name, name, shape.items[1].kind in ARRAYS))
            shape = _element(shape.items[1])
            current = codec_of(shape.python) if shape.kind == "model" else None
            continue
        if current is None and name == REFERRED and shape.kind == "any":
            # A reference of another library: MongoDB's own kind, which holds the id.
            steps.append(Step(name, name, False))
            shape = Shape("any", Any, optional=True)
            continue
        if current is None:
            raise DeclarationError(
                f"{where} names {path!r}, but {steps[-1].name!r} has no fields of its own", code=code
            )
        declared = current.by_name.get(name) or current.by_stored.get(name)
        if declared is None:
            near = nearest(name, [*current.by_name])
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(current.by_name)}"
            raise DeclarationError(
                f"{where} names {path!r}, but {current.model.__name__} has no field {name!r}; {hint}",
                code=code,
            )
        refuse_array_of_arrays(declared.shape, where)
        steps.append(Step(declared.name, declared.stored, declared.shape.kind in ARRAYS))
        shape = _element(declared.shape)
        current = codec_of(shape.python) if shape.kind == "model" else None
    return Path(tuple(steps), shape)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known name that a misspelt one is most like; nothing of one that is too long to be any."""
    return difflib.get_close_matches(name, list(known), n=1) if len(name) <= NAME_LENGTH_MAX else []


def unknown_field(where: str, name: str, model: str, known: Sequence[str]) -> UsageError:
    """The refusal of a name that a model does not have, with the nearest that it has."""
    near = nearest(name, known)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
    return UsageError(f"{where} {name!r}, but {model} has no such field; {hint}", code="field-unknown")


def refuse_array_of_arrays(shape: Shape, where: str) -> None:
    """MongoDB's paths do not reach into an array that is an element of another."""
    if shape.kind in ARRAYS and shape.items and shape.items[0].kind in ARRAYS:
        raise DeclarationError(
            f"{where} lies in a list of lists, which MongoDB's paths do not reach into; "
            "wrap the inner list in a model",
            code="array-of-arrays",
        )


def _element(shape: Shape) -> Shape:
    """The shape itself, or that of the innermost elements of an array."""
    while shape.kind in ARRAYS and shape.items:
        shape = shape.items[0]
    return shape


def model_of(shape: Shape) -> type[BaseModel] | None:
    """The model that a field holds, one or many."""
    element = _element(shape)
    return element.python if element.kind == "model" else None


def models_of(shape: Shape) -> list[type[BaseModel]]:
    """The models that a field may hold, those of a union included."""
    element = _element(shape)
    members = element.items if element.kind == "union" else (element,)
    return [member.python for member in members if member.kind == "model"]


def value_at(raw: Any, path: str) -> Any:
    """The value at a stored path without arrays, "" for the whole; None where any step is missing."""
    if "." not in path and path:
        return raw.get(path) if isinstance(raw, _DOCUMENT) else None
    for name in path.split(".") if path else ():
        if isinstance(raw, _DOCUMENT):
            raw = raw.get(name)
        elif isinstance(raw, DBRef) and name == REFERRED:
            raw = raw.id
        else:
            return None
    return raw


def getter(path: str) -> Callable[[dict[str, Any]], Any]:
    """What gives the value at one path of any document; for those that are read often."""
    return (lambda raw: value_at(raw, path)) if "." in path else methodcaller("get", path)


def has(raw: Any, path: str) -> bool:
    """Whether something, null included, stands at a stored path without arrays."""
    for name in path.split("."):
        if not isinstance(raw, _DOCUMENT) or name not in raw:
            return False
        raw = raw[name]
    return True


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a stored path without arrays, making the documents on the way."""
    *outer, last = path.split(".")
    for name in outer:
        inner = raw.get(name)
        if not isinstance(inner, dict):
            inner = raw[name] = {}
        raw = inner
    raw[last] = value


def drop(raw: Any, path: str) -> None:
    """Remove what stands at a stored path without arrays, if anything does."""
    outer, _, last = path.rpartition(".")
    holder = value_at(raw, outer)
    if isinstance(holder, dict):
        holder.pop(last, None)


def top(path: str) -> str:
    """The field of the document itself that a stored path begins with."""
    return path.partition(".")[0]


def tops(paths: Iterable[str]) -> set[str]:
    """The fields of the document itself that stored paths begin with."""
    return {top(path) for path in paths}


def inside(path: str, depth: int) -> str:
    """What is left of a path after so many steps."""
    return ".".join(path.split(".")[depth:])


def containers(raw: Any, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Each sub-document that the steps lead to, through arrays, in order."""
    return (document for _, document in places_of(raw, steps))


def values_at(raw: Any, steps: Sequence[Step]) -> Iterator[Any]:
    """Each value that the steps lead to, through arrays, in order; nulls included."""
    if isinstance(raw, list):
        for item in raw:
            yield from values_at(item, steps)
    elif not steps:
        yield raw
    elif isinstance(raw, Mapping) and steps[0].stored in raw:
        yield from values_at(raw[steps[0].stored], steps[1:])
    elif isinstance(raw, DBRef) and steps[0].stored == REFERRED:
        yield raw.id


def overlap(one: str, other: str) -> bool:
    """Whether two stored paths are the same or one contains the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def outermost(paths: Iterable[str]) -> list[str]:
    """Paths without those that lie inside another; a projection takes no others."""
    every = set(paths)
    return sorted(path for path in every if not any(path.startswith(other + ".") for other in every))


def plain(path: str) -> str:
    """A path of an update without positions: `lines.$[i].sku` and `lines.0.sku` are `lines.sku`."""
    # The first name is that of a field, never a position, even if it is a number.
    head, *rest = path.split(".")
    return ".".join([head, *(part for part in rest if not (part.isdigit() or part.startswith("$")))])


def expression_of(path: str) -> Any:
    """The expression that reads a stored path, which may end in the id of a DBRef."""
    outer, _, last = path.rpartition(".")
    return _referred(f"${outer}") if last == REFERRED else f"${path}"


def _referred(reference: str) -> Raw:
    return {"$getField": {"field": {"$literal": REFERRED}, "input": reference}}


def values_expression(path: str) -> Any:
    """The same where the path leads through an array."""
    outer, _, last = path.rpartition(".")
    if last != REFERRED:
        return f"${path}"
    return {"$map": {"input": f"${outer}", "in": _referred("$$this")}}


def field_references(expression: Any) -> set[str] | None:
    """The stored paths that an aggregation expression reads; None where it may read any."""
    if isinstance(expression, str):
        head, _, rest = expression.partition(".")
        if head in ("$$ROOT", "$$CURRENT"):
            return {plain(rest)} if rest else None
        return {plain(expression[1:])} if head.startswith("$") and not head.startswith("$$") else set()
    if isinstance(expression, Mapping) and "$getField" in expression:
        argument = expression["$getField"]
        name = argument.get("field") if isinstance(argument, Mapping) else argument
        source = argument.get("input", "$$CURRENT") if isinstance(argument, Mapping) else "$$CURRENT"
        # From anywhere but the document itself it is the input that is read.
        if source not in ("$$CURRENT", "$$ROOT"):
            return field_references(source)
        return {name} if isinstance(name, str) and not name.startswith("$") else None
    if isinstance(expression, Mapping):
        return _all(field_references(item) for key, item in expression.items() if key != "$literal")
    return _all(map(field_references, expression if isinstance(expression, (list, tuple)) else ()))


def filter_references(filter: Mapping[str, Any]) -> set[str] | None:
    """The stored paths that a filter reads; None where it may read any."""

    def references(key: str, condition: Any) -> set[str] | None:
        if key in ("$and", "$or", "$nor"):
            return _all(map(filter_references, condition))
        if key == "$expr":
            return field_references(condition)
        return None if key.startswith("$") else {plain(key)}

    return _all(references(key, condition) for key, condition in filter.items())


def _all(parts: Iterable[set[str] | None]) -> set[str] | None:
    """The paths of all parts; None where one of them may be any."""
    paths: set[str] = set()
    for part in parts:
        if part is None:
            return None
        paths |= part
    return paths


def places_of(raw: Any, steps: Sequence[Step], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each sub-document that the steps lead to, with its path, positions included."""
    if isinstance(raw, list):
        for number, item in enumerate(raw):
            yield from places_of(item, steps, f"{prefix}{number}.")
    elif isinstance(raw, dict):
        if not steps:
            yield prefix, raw
        elif steps[0].stored in raw:
            yield from places_of(raw[steps[0].stored], steps[1:], f"{prefix}{steps[0].stored}.")
