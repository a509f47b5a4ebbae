"""Write `docs/api-reference.md` from the signatures and docstrings of every public name.

Example: python docs/write_api_reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import treadle

PAGE = Path(__file__).with_name("api-reference.md")
WIDTH = 100
HEAD = """# API reference

Written by `make docs` from the library itself; do not edit.
Every public name is here, with its signature and what it gives.
[Store](store.md) and [Models](models.md) explain how they go together.

`AsyncStore`, its worker and its handles have the calls of `Store`,
with `await`, `async for` and `async with`.
"""
FURTHER = ("treadle.fastapi", "treadle.testing")


def page() -> str:
    """The whole page."""
    groups: dict[str, list[str]] = {
        "The Store": [], "Documents and fields": [], "Patterns": [], "Operations of a bulk": [],
        "Results": [], "Errors and warnings": [],
    }  # fmt: skip
    for name in sorted(treadle.__all__, key=str.lower):
        groups[_group(name, getattr(treadle, name))].append(_section(name, getattr(treadle, name), 3))
    made = [HEAD]
    for heading, sections in groups.items():
        made += [f"\n## {heading}\n", *sections]
    handles = [_section(name, each, 3) for name, each in _handles().items()]
    made += ["\n## What a Store hands out\n", *handles]
    for module in FURTHER:
        made += [f"\n## {module}\n", *_module(importlib.import_module(module))]
    return "".join(made)


def _group(name: str, value: Any) -> str:
    if name in ("Store", "AsyncStore", "Limits"):
        return "The Store"
    home = treadle._HOMES[name]
    if (isinstance(value, type) and issubclass(value, (Exception, Warning))) or name == "Failure":
        return "Errors and warnings"
    if home == "graph.operations" and name not in ("Bulk", "Upserted"):
        return "Operations of a bulk"
    if home.startswith("patterns."):
        return "Patterns"
    if home.startswith("model.") or home in ("graph.lifecycle", "query.field_paths"):
        return "Documents and fields"
    return "Results"


def _handles() -> dict[str, Any]:
    """The classes that calls of a Store return and that nobody makes by hand."""
    from treadle.store.blocking.array import Array
    from treadle.store.blocking.counter import Counter
    from treadle.store.blocking.results import Results
    from treadle.store.blocking.tree import TreeHandle
    from treadle.store.blocking.worker import Worker

    return {each.__name__: each for each in (Array, Counter, Results, TreeHandle, Worker)}


def _module(module: Any) -> list[str]:
    """The sections of the functions and classes that a module defines itself."""
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and not isinstance(value, typing.TypeVar)
    ]
    return [_section(name, getattr(module, name), 3) for name in names]


def _section(name: str, value: Any, level: int) -> str:
    told = _text(value)
    lines = _signatures(name, value)
    made = f"\n{'#' * level} {name}\n\n"
    if lines:
        made += "```text\n" + "\n".join(lines) + "\n```\n"
    made += f"\n{told}\n" if told else ""
    if isinstance(value, type) and name != "AsyncStore":
        for method in _methods(value):
            made += _section(f"{name}.{method}", getattr(value, method), min(level + 1, 4))
    return made


def _methods(value: type) -> list[str]:
    """The public methods that Treadle's own classes give a class, in alphabetical order."""
    skipped = {"bind", "roles"} if hasattr(value, "bind") else set()
    return sorted(
        name
        for name in dir(value)
        if not name.startswith("_")
        and name not in skipped
        and any(name in vars(each) and _own(each) for each in value.__mro__)
        and (callable(getattr(value, name)) or isinstance(inspect.getattr_static(value, name), property))
        and not isinstance(getattr(value, name), type)
    )


def _own(value: type) -> bool:
    return value.__module__.startswith("treadle.")


class _Written:
    """An annotation as it is written in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signatures(name: str, value: Any) -> list[str]:
    """How a name is called: each way that the type checkers know, without `self`."""
    # All fields of Limits are in docs/limits.md.
    if not callable(value) or name == "Limits":
        return []
    made: list[str] = []
    function = value if isinstance(value, type) else inspect.unwrap(value)
    for each in typing.get_overloads(function) or [value]:
        try:
            signature = inspect.signature(each)
        except (TypeError, ValueError):
            return []
        parts = [
            part.replace(annotation=_written(part.annotation))
            for part in signature.parameters.values()
            if part.name not in ("self", "cls")
        ]
        returned = signature.empty if isinstance(value, type) else _written(signature.return_annotation)
        text = str(signature.replace(parameters=parts, return_annotation=returned))
        text = re.sub(r"GetPydanticSchema\([^)]*\)|<(?:class|factory|object)[^>]*>", "…", text)
        made += _folded(f"{name.rpartition('.')[2]}{text}")
    return made


def _written(annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    # Public types are known by their names, wherever a module is imported late.
    return _Written(re.sub(r"\bupkeep\.[a-z_.]+\.", "", annotation.strip("\"'")))


def _folded(text: str) -> list[str]:
    """A signature in lines of a width, broken between parameters."""
    parts, depth, begin = list[str](), 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and text[at : at + 2] == ", ":
            parts.append(text[begin : at + 1])
            begin = at + 2
    lines = [""]
    for part in [*parts, text[begin:]]:
        if lines[-1] and len(lines[-1]) + len(part) + 1 > WIDTH:
            lines.append("    " + part)
        else:
            lines[-1] = f"{lines[-1]} {part}".lstrip() if len(lines) == 1 else f"{lines[-1]} {part}"
    return lines


def _text(value: Any) -> str:
    """The docstring as one paragraph per paragraph; what a class inherits is not its own."""
    if isinstance(value, type) and "__doc__" not in vars(value):
        return ""
    told = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    if isinstance(value, type) and told.startswith(f"{value.__name__}("):
        # What a dataclass or a named tuple says by itself.
        return ""
    told = re.sub(r"(?<!\n)\n(?!\n|[-*] |    )", " ", told)
    return re.sub(r"[<>]", lambda found: f"&{'lt' if found[0] == '<' else 'gt'};", told)


if __name__ == "__main__":
    PAGE.write_text(page())
