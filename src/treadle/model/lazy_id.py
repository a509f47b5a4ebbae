"""Generated ids whose value is made when it is first read.

A document inserted under an id that no other code can know has no sources
yet, so `insert` need not look for them. To be sure of that, a new document
holds a `LazyObjectId`, which has no value. Any use of it (an attribute, text,
comparison, hash, copy, pickle, encoding) makes the value, and from then on it
is an ordinary ObjectId. So the class of an id says whether it may be known.

`reserve_id` gives the id a value to insert. Until `publish_ids`, the
document's own id is a `PendingId`: a read of it during the insert, also from
another thread, turns it into an ordinary ObjectId and is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar, overload

from bson import ObjectId
from pydantic import BaseModel

T = TypeVar("T")

# Two threads that read an id at once must get the same value.
_VALUE_LOCK = Lock()


class LazyObjectId(ObjectId):
    """An ObjectId whose value is made when it is first read."""

    __slots__ = ()

    # Without ObjectId's own, which makes the value.
    __init__ = object.__init__

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only, and until there is a value, that is the value.
        return getattr(materialize(self), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return materialize(self).__reduce_ex__(protocol)


class PendingId(ObjectId):
    """An ObjectId with a value that has not been read since it was reserved."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return getattr(materialize(self), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return materialize(self).__reduce_ex__(protocol)


def materialize(identity: T) -> T:
    """Turn a generated id into an ordinary ObjectId, in place; returns it. Other values are left alone."""
    if type(identity) is LazyObjectId:
        _set_value(identity, None, ObjectId)  # type: ignore[arg-type]
    elif type(identity) is PendingId:
        object.__setattr__(identity, "__class__", ObjectId)
    return identity


def _set_value(identity: ObjectId, value: ObjectId | None, kind: type[ObjectId]) -> bool:
    """Give an id this value, or a new one, and this class; False if it had a value already."""
    with _VALUE_LOCK:
        if type(identity) is not LazyObjectId:
            return False
        ObjectId.__init__(identity, value)
        object.__setattr__(identity, "__class__", kind)
    return True


class ReservedId(NamedTuple):
    """The id of a document that is being inserted: the document's own, and an equal one to store."""

    identity: ObjectId
    value: ObjectId

    @property
    def is_known(self) -> bool:
        """Whether the document's id was read since it was reserved."""
        return type(self.identity) is not PendingId


def reserve_id(document: BaseModel) -> ReservedId | None:
    """Give a document's id its value; None if other code may know it already."""
    identity: Any = document.__dict__.get("id")
    if type(identity) is not LazyObjectId:
        return None
    value = ObjectId()
    return ReservedId(identity, value) if _set_value(identity, value, PendingId) else None


def publish_ids(reserved: Iterable[ReservedId | None]) -> list[ObjectId]:
    """Turn reserved ids into ordinary ones; returns those that were read before."""
    read = []
    for each in reserved:
        if each is not None:
            if each.is_known:
                read.append(each.value)
            materialize(each.identity)
    return read


class IdAttribute:
    """The attribute `id` of documents; reading it makes the value of a generated id."""

    def __get__(self, instance: BaseModel | None, owner: type | None = None) -> Any:
        if instance is None:
            # Pydantic asks the class for a default; there is none here.
            raise AttributeError("id")
        return materialize(instance.__dict__["id"])

    def __set__(self, instance: BaseModel, value: object) -> None:
        instance.__pydantic_fields_set__.add("id")
        instance.__dict__["id"] = value


# -- for type checkers ----------------------------------------------------------------------------

# Mypy takes this for true; pyright does not.
MYPY = False


class _Generated(Protocol):
    """A document that does not declare an id of its own."""

    @property
    def id(self) -> ObjectId: ...


class GeneratedId:
    """What type checkers see in `document.id`: an ObjectId, or the type that the model declares instead.

    Nothing here runs. A subclass of `Document` may declare `id: str`, which would be an incompatible
    override of a field, so for type checkers `id` is a descriptor. Pyright does not compare a declared
    field with an attribute that is not declared. Mypy compares it with what the descriptor returns for
    that class: Any, unless its own `id` is an ObjectId.
    """

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
