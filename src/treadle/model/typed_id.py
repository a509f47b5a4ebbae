"""What type checkers see in `document.id`: an ObjectId, or whatever type the model declares instead.

Nothing here runs. A class below `Document` may declare `id: str`, which would
be an incompatible override of a field of another type. So `id` is no field
for the checkers, but a descriptor. Pyright does not compare a declaration
with an attribute that has none. Mypy compares it with what the descriptor
gives, for the class that declares it: one whose own `id` is no ObjectId is
given Any, and so may have it.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

from bson import ObjectId

# True for mypy alone.
MYPY = False


class _Generated(Protocol):
    """A document that declares no id of its own."""

    @property
    def id(self) -> ObjectId: ...


class GeneratedId:
    """The attribute `id` of documents."""

    if MYPY:

        @overload
        def __get__(self, instance: None, owner: Any) -> Any: ...
        @overload
        def __get__(self, instance: _Generated, owner: Any) -> ObjectId: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Any: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
    else:

        @overload
        def __get__(self, instance: None, owner: Any) -> Any: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> ObjectId: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    def __set__(self, instance: object, value: ObjectId) -> None: ...
