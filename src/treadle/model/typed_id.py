"""What type checkers see in `document.id`: an ObjectId, or the type that the model declares instead.

Nothing here runs. A subclass of `Document` may declare `id: str`, which would
be an incompatible override of a field, so for type checkers `id` is a
descriptor. Pyright does not compare a declared field with an attribute that
is not declared. Mypy compares it with what the descriptor returns for that
class: Any, unless its own `id` is an ObjectId.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

from bson import ObjectId

# Mypy takes this for true; pyright does not.
MYPY = False


class _Generated(Protocol):
    """A document that does not declare an id of its own."""

    @property
    def id(self) -> ObjectId: ...


class GeneratedId:
    """The attribute `id` of documents."""

    if MYPY:

        @overload
        def __get__(self, instance: None, owner: object) -> Any: ...
        @overload
        def __get__(self, instance: _Generated, owner: object) -> ObjectId: ...
        @overload
        def __get__(self, instance: object, owner: object) -> Any: ...
        def __get__(self, instance: Any, owner: object) -> Any: ...
    else:

        @overload
        def __get__(self, instance: None, owner: object) -> Any: ...
        @overload
        def __get__(self, instance: object, owner: object) -> ObjectId: ...
        def __get__(self, instance: object, owner: object) -> Any: ...

    def __set__(self, instance: object, value: ObjectId) -> None: ...
