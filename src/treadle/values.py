"""Frozen values: what `@dataclass(frozen=True, slots=True)` makes, in a sixth of the time.

There are more than a hundred of them, and `dataclass` compiles six functions
for each when its module is imported, which took half the time of importing
Treadle. Here all share their functions, but for `__init__`, which is compiled
when the first value is made. It sets each slot directly, which takes half as
long as through `object.__setattr__`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, field
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, /, *, kw_only: bool = False) -> Any:
    """Make a class of frozen values, with slots; all of `dataclasses` works on them.

    A class of values derives from others of its kind alone.
    """
    return _make(cls, kw_only) if cls is not None else lambda each: _make(each, kw_only)


def _make(cls: type[T], kw_only: bool) -> type[T]:
    own = cls.__dict__
    shared: dict[str, Any] = {
        "__setattr__": _refuse_setting,
        "__delattr__": _refuse_deleting,
        "__getstate__": _state,
        "__setstate__": _restore,
    }
    shared |= {"__eq__": _equal} if "__eq__" not in own else {}
    shared |= {"__hash__": _hash} if own.get("__hash__") is None else {}
    shared |= {"__repr__": _represent} if "__repr__" not in own else {}
    # Where no base is frozen yet, the functions that make it so need not be compiled.
    derived = dataclasses.is_dataclass(cls)
    make = dataclasses.dataclass(
        init=False, repr=False, eq=False, slots=True, kw_only=kw_only, frozen=derived
    )
    made: Any = make(cls)
    made.__dataclass_params__.frozen = True
    for name, function in shared.items():
        setattr(made, name, function)
    fields = dataclasses.fields(made)
    compared = [each.name for each in fields if each.compare]
    made.__treadle_compared__ = _getter(compared)
    hashed = [each.name for each in fields if (each.compare if each.hash is None else each.hash)]
    made.__treadle_hashed__ = _getter(hashed)
    made.__init__ = _compiling(made)
    made.__signature__ = _Signature()
    return made  # type: ignore[no-any-return]


def _getter(names: list[str]) -> Any:
    return staticmethod(attrgetter(*names) if names else lambda _: ())


# -- what all values share ---------------------------------------------------


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__treadle_compared__(self) == self.__treadle_compared__(other)


def _hash(self: Any) -> int:
    return hash(self.__treadle_hashed__(self))


@recursive_repr()
def _represent(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse_setting(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deleting(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for each, given in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, given)


# -- what each has of its own ------------------------------------------------


class _Signature:
    """The signature of a class of values, for whoever asks: it takes the compiled `__init__`."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        if "__treadle_compared__" not in vars(owner):
            # Of a class that only derives from one of values: as its `__init__` says.
            raise AttributeError("__signature__")
        _, *others = inspect.signature(_initializer(owner)).parameters.values()
        types = {each.name: each.type for each in dataclasses.fields(owner)}
        return inspect.Signature([_described(each, types[each.name]) for each in others])


class _Made:
    def __repr__(self) -> str:
        return "<factory>"


def _described(parameter: inspect.Parameter, annotation: Any) -> inspect.Parameter:
    """A parameter as its field declares it; a default that is made anew each time is only named."""
    default = _Made() if parameter.default is MISSING else parameter.default
    return parameter.replace(annotation=annotation, default=default)


def _compiling(cls: type[Any]) -> Any:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        made: Any = _initializer(cls)
        cls.__init__ = made
        made(self, *arguments, **named)

    return __init__


def _initializer(cls: type[Any]) -> Callable[..., None]:
    """The function that sets the slots of a new value."""
    fields = dataclasses.fields(cls)
    known: dict[str, Any] = {"_MISSING": MISSING}
    positional, named, lines = ["self"], list[str](), list[str]()
    for each in fields:
        name = each.name
        known[f"_set_{name}"] = getattr(cls, name).__set__
        has_default, has_factory = each.default is not MISSING, each.default_factory is not MISSING
        given = name
        if has_factory:
            known[f"_make_{name}"] = each.default_factory
            given = f"_make_{name}() if {name} is _MISSING else {name}" if each.init else f"_make_{name}()"
        elif has_default:
            known[f"_default_{name}"] = each.default
            given = name if each.init else f"_default_{name}"
        if each.init:
            default = "=_MISSING" if has_factory else f"=_default_{name}" if has_default else ""
            (named if each.kw_only else positional).append(name + default)
        elif not (has_default or has_factory):
            # Its `__post_init__` sets it.
            continue
        lines.append(f" _set_{name}(self, {given})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    listed = ", ".join([*positional, *(["*", *named] if named else [])])
    exec(f"def __init__({listed}):\n" + ("\n".join(lines) or " pass"), known)
    made: Callable[..., None] = known["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made
