"""Generated ids that do not exist until somebody asks for them.

A document that is inserted under an id that nobody can know has no other
documents that refer to it, and `insert` need not look for them. To be sure of
that, a new document holds a `LazyObjectId`: it has no value. Whoever needs
the value, in whatever way (by attribute, text, comparison, hash, copy, pickle,
or because it is being encoded), makes it, and from then on it is an ordinary
ObjectId. So "is it still a LazyObjectId?" answers "can anybody know it?".
"""

from __future__ import annotations

import threading
from typing import Any

from bson import ObjectId

_MAKING = threading.Lock()


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


def made(identity: Any) -> Any:
    """The same id, with its value; any other value as it is."""
    if type(identity) is LazyObjectId:
        # Two threads that ask at once must get the same value.
        with _MAKING:
            if type(identity) is LazyObjectId:
                ObjectId.__init__(identity)
                identity.__class__ = ObjectId
    return identity


def is_unknown(document: Any) -> bool:
    """Whether nobody can know this document's id yet."""
    return type(document.__dict__.get("id")) is LazyObjectId


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
