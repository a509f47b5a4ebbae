"""Generated ids that do not exist until somebody asks for them.

A document that is inserted under an id that nobody can know has no other
documents that refer to it, and `insert` need not look for them. To be sure of
that, a new document holds a `LazyObjectId`: it has no value. Whoever needs
the value, in whatever way (by attribute, text, comparison, hash, copy, pickle,
or because it is being encoded), makes it, and from then on it is an ordinary
ObjectId. So its class answers "can anybody know it?".

While a document is being inserted its id has a value, and is a `PromisedId`
for as long as nobody but the Store has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any

from bson import ObjectId

_MAKING = Lock()


class LazyObjectId(ObjectId):
    """An ObjectId whose value is made when it is first asked for."""

    __slots__ = ()

    # Without ObjectId's own, which makes the value.
    __init__ = object.__init__

    def __getattr__(self, name: str) -> Any:
        # Only what is missing gets here, and until it has a value that is its value.
        return getattr(made(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made(self).__reduce_ex__(protocol)


class PromisedId(ObjectId):
    """An ObjectId with a value that nobody has looked at."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return getattr(made(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made(self).__reduce_ex__(protocol)


def made(identity: Any) -> Any:
    """The same id as an ordinary one, with a value; anything else as it is."""
    if type(identity) is LazyObjectId:
        _give_value(identity, None, ObjectId)
    elif type(identity) is PromisedId:
        object.__setattr__(identity, "__class__", ObjectId)
    return identity


def _give_value(identity: Any, value: ObjectId | None, kind: type[ObjectId]) -> bool:
    """Give an id this value, or a new one; whether it had none."""
    # Two threads that ask at once must get the same value.
    with _MAKING:
        first = type(identity) is LazyObjectId
        if first:
            ObjectId.__init__(identity, value)
            object.__setattr__(identity, "__class__", kind)
    return first


class Promise:
    """The id of a document that is being inserted; made before anybody could know it."""

    __slots__ = ("identity", "value")

    def __init__(self, identity: Any, value: ObjectId) -> None:
        self.identity = identity
        # To be stored; looking at it tells nobody anything.
        self.value = value

    @property
    def known(self) -> bool:
        """Whether somebody has looked at the document's id since."""
        return type(self.identity) is not PromisedId


def promise(document: Any) -> Promise | None:
    """The id that a document will have; None if somebody may know it already."""
    identity = document.__dict__.get("id")
    if type(identity) is LazyObjectId:
        value = ObjectId()
        if _give_value(identity, value, PromisedId):
            return Promise(identity, value)
    return None


def reveal(promises: Iterable[Promise | None]) -> list[ObjectId]:
    """Make promised ids ordinary ones; those that somebody has looked at before."""
    known = []
    for each in promises:
        if each is not None:
            if each.known:
                known.append(each.value)
            made(each.identity)
    return known


class IdAttribute:
    """The `id` of a document; reading it makes a generated one."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            # Pydantic asks the class for defaults; there is none here.
            raise AttributeError("id")
        return made(instance.__dict__["id"])

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__pydantic_fields_set__.add("id")
        instance.__dict__["id"] = value
