"""A model's codec as one Store sees it: with the kinds below it, and the versions before it.

Reading a document of a known kind and of the current version costs a lookup
and a comparison more than reading one of a model without either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from treadle.errors import DataError, UsageError
from treadle.graph.versions import VersionChain
from treadle.model.codec import Codec

M = TypeVar("M", bound=BaseModel)
Load = Callable[[dict[str, Any]], Any]


class StoreCodec(Codec[M]):
    """The codec of one entry; `load` and `dump_all` heed kinds and versions."""

    def __init__(
        self, codec: Codec[M], scope: Mapping[str, Any], owned: frozenset[str], confined: bool = False
    ) -> None:
        # The compiled parts are shared with the model's own codec.
        self.__dict__.update(codec.__dict__)
        self.own = codec
        self.scope = scope
        # Whether it reads documents of some kinds only.
        self.confined = confined
        self.owned = owned
        self.versions: VersionChain | None = None
        self._discriminator: str | None = None
        self._members: dict[Any, StoreCodec[Any]] = {}
        self._by_class: dict[type, StoreCodec[Any]] = {}
        self._default: Any = None
        self._load: Load = codec.load

    def dispatch(
        self,
        discriminator: str,
        members: Mapping[Any, StoreCodec[Any]],
        default: Any = None,
    ) -> None:
        """Read documents as the class that their kind names, and those that name none as the default."""
        self._discriminator = discriminator
        self._default = default if default in members else None
        self._members = dict(members)
        self.pairs = {
            path: shape for each in members.values() for path, shape in each.pairs.items()
        } | self.pairs
        self._by_class = {member.model: member for member in members.values()}
        self.settle()

    def settle(self) -> None:
        """Put together how documents are read, once kinds and versions are known."""
        self.kinds = tuple(member for member in self._members.values() if member is not self)
        self.has_former_names = self.versions is not None and self.versions.current > 1
        if self._discriminator is None or (
            len(self._members) == 1
            and self.model in self._by_class
            and self.confined
            and self._default is None
        ):
            self._load = self._exact()
        else:
            self._load = self._by_kind(self._discriminator)
        # The caller's loop then costs no lookup of a method.
        self.__dict__["load"] = self._load

    def load(self, raw: dict[str, Any]) -> M:
        """The validated model of a stored document; takes the document over."""
        model: M = self._load(raw)
        return model

    def _exact(self) -> Load:
        chain, load = self.versions, self.own.load
        if chain is None:
            return load
        field, current, upgrade = chain.field, chain.current, chain.upgrade_in_python

        def load_version(raw: dict[str, Any]) -> Any:
            if raw.get(field) != current:
                raw = upgrade(raw)
            return load(raw)

        return load_version

    def _by_kind(self, discriminator: str) -> Load:
        loads = {kind: member._exact() for kind, member in self._members.items()}
        # Most documents are ready for Pydantic as they are; they are handed over without a call more.
        direct = {
            kind: member.own._validate
            for kind, member in self._members.items()
            if member.versions is None and member.own._adapt is None
        }
        unknown, default = self._load_unknown, self._default
        if default is not None:
            named = loads[default]
            # Its model may declare the field that is missing.
            loads[None] = lambda raw: named({**raw, discriminator: default})

        def load_slowly(raw: dict[str, Any]) -> Any:
            load = loads.get(raw.get(discriminator))
            return unknown(raw) if load is None else load(raw)

        def load_kind(raw: dict[str, Any]) -> Any:
            try:
                validate = direct.get(raw.get(discriminator))
            except TypeError:
                return unknown(raw)
            if validate is None:
                return load_slowly(raw)
            try:
                return validate(raw)
            except Exception:
                # Again, for an error that names the document, whatever a user's validator raised.
                return load_slowly(raw)

        return load_kind

    def _load_unknown(self, raw: dict[str, Any]) -> Any:
        """A document of a kind that no model has: migrated by the base, or an error."""
        chain = self.versions
        if chain is not None and chain.is_outdated(raw):
            raw = chain.upgrade_in_python(raw)
            kind = raw.get(self._discriminator or "")
            member = self._members.get(kind) if isinstance(kind, (str, int)) else None
            if member is not None:
                return member.load(raw)
        raise unknown_kind(self.model, self._discriminator or "", raw, self._members)

    def dump(self, value: Any, altered: list[Any]) -> dict[str, Any]:
        """The document to store, as its own class, in the current version."""
        member = self if self._discriminator is None else self._member(value)
        return member.own.dump(value, altered)

    def dump_all(self, values: Iterable[Any], altered: list[Any]) -> list[dict[str, Any]]:
        """The documents to store, each as its own class, in the current version."""
        if self._discriminator is None:
            return self.own.dump_all(values, altered)
        values = list(values)
        mine = self._by_class.get(self.model)
        if mine is not None and all(value.__class__ is self.model for value in values):
            return self.own.dump_all(values, altered)
        return [self._member(value).own.dump(value, altered) for value in values]

    def _member(self, value: Any) -> StoreCodec[Any]:
        member = self._by_class.get(type(value))
        if member is None:
            raise UsageError(
                f"{type(value).__name__} is abstract: it has no kind=, so its documents could not be told "
                "from others in the collection; store one of its kinds, or give it a kind",
                code="kind-missing",
            )
        return member


def unknown_kind(model: type, discriminator: str, raw: Any, known: Iterable[Any]) -> DataError:
    kind = raw.get(discriminator) if isinstance(raw, dict) else None
    identity = raw.get("_id") if isinstance(raw, dict) else None
    listed = ", ".join(map(repr, known)) or "none"
    return DataError(
        f"the document with _id {identity!r} has {discriminator}={kind!r}, a kind of {model.__name__} that "
        f"this Store does not know (it knows {listed}); add the kind's model to models=, or correct "
        "the document",
        code="kind-unknown",
    )
