"""What one commit changes: the net (before, after) of each document.

A change has no kind of its own. Whether a document entered, left or changed is
what each rule sees through its own scope (`Scope.through`). Images are in the
current version, whatever is stored.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from treadle.errors import DataError
from treadle.graph.scope import Image
from treadle.graph.versions import VersionChain
from treadle.plan import Plan, Raw
from treadle.query.keys import freeze


class NotRead(enum.Enum):
    """The type of `NOT_READ`."""

    NOT_READ = enum.auto()


# Before a change there was a document, which was not read.
NOT_READ: Final = NotRead.NOT_READ
Before: TypeAlias = Image | NotRead | None


class Change(NamedTuple):
    """One document before and after a commit; None where there was or is none."""

    before: Before
    after: Image | None

    @property
    def id(self) -> Any:
        image = self.after if self.after is not None else self.before
        assert isinstance(image, Image)
        return image.document["_id"]


class ChangedModel(Protocol):
    """What `Changes` needs to know of a model."""

    @property
    def collection(self) -> str: ...

    versions: VersionChain


class Changes:
    """The net changes of one commit, by model."""

    def __init__(self, *, joined: bool = False, transactional: bool = True) -> None:
        # Whether the transaction is the caller's own, and may hold earlier writes of the same documents.
        self.joined = joined
        # Whether all writes of the commit happen together or not at all.
        self.transactional = transactional
        # By the model's collection and the document's frozen id.
        self._changes: dict[str, dict[Any, Change]] = {}
        self._new_ids: set[tuple[str, Any]] = set()
        # By rule and frozen id the image that the rule has recorded last.
        self._recorded: dict[Hashable, dict[Any, Image | None]] = {}
        # Documents that this commit has stored upgraded, by collection and frozen id.
        self._upgraded: set[tuple[str, Any]] = set()
        # By collection the model, and by frozen id the ids of documents that the commit must lower.
        self._to_lower: dict[str, tuple[ChangedModel, dict[Any, Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._changes or self._to_lower)

    def add(
        self,
        model: ChangedModel,
        pairs: Iterable[tuple[Raw | NotRead | None, Raw | None]],
        *,
        before_in: str | None = None,
        after_in: str | None = None,
    ) -> Plan[None]:
        """Add documents before and after a write, as they are stored.

        They are in the model's collection, unless another is named. One that
        cannot be upgraded is taken as it is stored.
        """
        pairs = list(pairs)
        befores = [before if isinstance(before, dict) else None for before, _ in pairs]
        old = yield from load_images(model, befores, before_in)
        new = yield from load_images(model, [after for _, after in pairs], after_in)
        for (before, _), image, after in zip(pairs, old, new, strict=True):
            self.note(model, before if isinstance(before, NotRead) else image, after)

    def note(self, model: ChangedModel, before: Before, after: Image | None) -> None:
        """Add one change by its images. Several changes of one document become one."""
        if isinstance(before, Image) and (model.collection, freeze(before.document["_id"])) in self._upgraded:
            before = before._replace(outdated=True)
        if after is not None and after.collection == model.collection and model.versions.writes_older:
            self._note_to_lower(model, [after.document["_id"]])
            after = after._replace(outdated=True)
        of_model = self._changes.setdefault(model.collection, {})
        change = Change(before, after)
        key = freeze(change.id)
        earlier = of_model.get(key)
        of_model[key] = change if earlier is None else Change(earlier.before, after)

    def note_upgraded(self, model: ChangedModel, ids: Sequence[Any]) -> None:
        """Note outdated documents of a model's collection that this commit has stored upgraded."""
        self._upgraded.update((model.collection, freeze(each)) for each in ids)
        if model.versions.writes_older:
            self._note_to_lower(model, ids)

    def _note_to_lower(self, model: ChangedModel, ids: Iterable[Any]) -> None:
        _, by_key = self._to_lower.setdefault(model.collection, (model, {}))
        by_key.update((freeze(each), each) for each in ids)

    def to_lower(self) -> list[tuple[ChangedModel, list[Any]]]:
        """Return the ids of the documents to store in an older version as the last step, by model."""
        return [(model, list(by_key.values())) for model, by_key in self._to_lower.values()]

    def note_new_ids(self, model: ChangedModel, ids: Iterable[Any]) -> None:
        """Note ids that were generated in this call, so that nothing can refer to them yet."""
        self._new_ids.update((model.collection, freeze(each)) for each in ids)

    def is_new_id(self, model: ChangedModel, identity: Any) -> bool:
        """Whether an id was generated in this call."""
        return bool(self._new_ids) and (model.collection, freeze(identity)) in self._new_ids

    def of(self, model: ChangedModel) -> list[Change]:
        """Return the net changes of a model's collection, whatever their kinds."""
        changes = self._changes.get(model.collection)
        return list(changes.values()) if changes else []

    def take_unrecorded(self, rule: Hashable, model: ChangedModel) -> list[Change]:
        """Return the changes of a model since a rule last took them."""
        changes = self._changes.get(model.collection)
        if not changes:
            return []
        recorded, new = self._recorded.setdefault(rule, {}), []
        for key, change in changes.items():
            before = recorded.get(key, change.before)
            if before is not change.after:
                new.append(Change(before, change.after))
                recorded[key] = change.after
        return new


def load_images(
    model: ChangedModel, raws: Sequence[Raw | None], collection: str | None = None
) -> Plan[list[Image | None]]:
    """Return stored documents as images, None for None.

    One that cannot be upgraded is taken as it is stored.
    """
    collection, chain = model.collection if collection is None else collection, model.versions
    documents = iter((yield from load_documents(model, [raw for raw in raws if raw is not None])))
    return [
        None
        if raw is None
        else Image(next(documents), collection, chain.is_versioned and chain.is_outdated(raw))
        for raw in raws
    ]


def load_documents(model: ChangedModel, raws: Sequence[Raw]) -> Plan[list[Raw]]:
    """Return stored documents in the current version; one that cannot be upgraded as it is."""
    chain = model.versions
    if not chain.is_versioned or not any(map(chain.is_outdated, raws)):
        return list(raws)
    outcomes = (yield from chain.upgrade(raws)).outcomes
    return [
        raw if isinstance(outcome, DataError) else outcome
        for raw, outcome in zip(raws, outcomes, strict=True)
    ]
