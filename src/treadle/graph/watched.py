"""A document that notes which of its fields are read.

A migration's result is stored only if what the function read is still there.
To know what it read, it is given this dict. Whatever looks at the document as
a whole has read all of it; when in doubt, that is what is noted.
"""

from __future__ import annotations

from typing import Any


def copied(value: Any) -> Any:
    """A copy of a stored value; only documents and arrays can be changed in place."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) if type(item) in _DEEP else item for key, item in value.items()}
    if kind is list:
        return [copied(item) if type(item) in _DEEP else item for item in value]
    return value


_DEEP = frozenset({dict, list})


class Watched(dict[str, Any]):
    """A dict that keeps the keys which were looked at in `read`; None once all were."""

    __slots__ = ("read",)

    def __init__(self, raw: dict[str, Any]) -> None:
        dict.__init__(self, raw)
        self.read: set[str] | None = set()
        for key, value in raw.items():
            if value.__class__ in _DEEP:
                dict.__setitem__(self, key, copied(value))

    def plain(self) -> dict[str, Any]:
        """The same as an ordinary dict, without noting anything."""
        # Not dict.copy, which would go by the methods below.
        return dict(dict.items(self))

    # Called for each field of each document of a migration, and therefore without further calls.

    def __getitem__(self, key: Any) -> Any:
        if self.read is not None:
            self.read.add(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        if self.read is not None:
            self.read.add(key)
        return dict.get(self, key, default)

    def __contains__(self, key: Any) -> bool:
        if self.read is not None:
            self.read.add(key)
        return dict.__contains__(self, key)

    def pop(self, key: Any, *default: Any) -> Any:
        if self.read is not None:
            self.read.add(key)
        return dict.pop(self, key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if self.read is not None:
            self.read.add(key)
        return dict.setdefault(self, key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        # What is overwritten unseen is still somebody's: it must not have changed either.
        if self.read is not None:
            self.read.add(key)
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        if self.read is not None:
            self.read.add(key)
        dict.__delitem__(self, key)

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def copy(self) -> dict[str, Any]:
        self.read = None
        return self.plain()

    def __bool__(self) -> bool:
        return len(self) > 0

    __hash__ = None

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {key: copied(value) for key, value in self.copy().items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _reading_all(name: str) -> Any:
    """A method of dict that sees the whole document."""
    method = getattr(dict, name)

    def read_all(self: Watched, *others: Any) -> Any:
        self.read = None
        return method(self, *others)

    return read_all


for _name in (
    "__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__",
    "keys", "values", "items", "popitem", "clear",
):  # fmt: skip
    setattr(Watched, _name, _reading_all(_name))
