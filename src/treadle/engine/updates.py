"""Updates by operators: of one document, of all that match, and of fields by their Python names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import bson
from bson import ObjectId
from pydantic import ValidationError
from pymongo import UpdateOne
from pymongo.errors import WriteError

from treadle.engine.documents import (
    as_written,
    auto_fields,
    filter_of,
    not_written,
    require_filter,
    require_valid,
    stamping,
    translated,
    unchanged,
)
from treadle.engine.indexes import declared_indexes
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation
from treadle.engine.queries import find_matching, may_match, may_match_outdated, refuse_changed
from treadle.engine.references import follow_own
from treadle.engine.version_upgrade import upgrade_stored, upgraded
from treadle.errors import InvalidValue, PartlyDone, UsageError
from treadle.graph.changes import NOT_READ, Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.operations import Returns
from treadle.graph.write import ChunkedWrite, CommitNeeded, Selector, Write
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.codec import Codec
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    by_id,
    find_one,
    find_one_and_update,
    is_inside,
    server_facts,
    update_many,
)
from treadle.plan.server_errors import translate_update
from treadle.query.attributes import sorts_by_attribute
from treadle.query.filters import Sort, parse_filter, sort_keys
from treadle.query.keys import freeze
from treadle.query.paths import overlap, unknown_field
from treadle.query.updates import parse_update

D = TypeVar("D", bound=Document)


def concerns(entry: ModelEntry, touched: set[str] | None) -> bool:
    """Whether an update of these paths must be followed."""
    return not entry.effects.is_plain and entry.paths.fields.are_followed(touched)


def may_upgrade(entry: ModelEntry) -> bool:
    """Whether upgrading a document may change what others follow from."""
    chain, followed = entry.versions, entry.effects.followed
    if chain.writes_older:
        return True
    return chain.is_versioned and not entry.effects.is_plain and (followed is None or bool(followed))


class _Update:
    """What updates of one document and of many have in common."""

    entry: ModelEntry
    filter: Raw
    update: Any

    def _prepare(self, entry: ModelEntry, update: Any, array_filters: Sequence[Any] | None = None) -> None:
        self.entry = entry
        self.parsed = parse_update(entry.paths.fields, update, array_filters)
        # Otherwise documents are validated after the update.
        self.is_exact = self.parsed.is_exact
        self.update = stamping(entry, self.parsed.update)
        self.is_followed = not entry.effects.is_plain and (
            self.parsed.is_followed or entry.paths.fields.are_followed(auto_fields(entry, new=False).keys())
        )

    @property
    def _is_plain(self) -> bool:
        """Whether nothing follows from it."""
        return self.is_exact and not self.is_followed and not may_upgrade(self.entry)

    def _translated(self) -> AbstractContextManager[None]:
        sent = [self.filter, {"update": self.update}]
        return translated(self.entry.model.__name__, sent, translate=translate_update)

    def _apply(
        self,
        befores: Sequence[Raw],
        write: Callable[[list[Any], list[Any]], Plan[dict[Any, Raw]]],
        changes: Changes,
    ) -> Plan[list[Raw]]:
        """Update documents that were just read, and add the changes. Returns the documents after.

        `write` gets the ids of all, and of those that were outdated: these met
        the filter as they were stored, whether or not they do now.
        """
        entry, outdated = self.entry, list[Any]()
        if entry.versions.is_versioned:
            outdated = [each["_id"] for each in befores if entry.versions.is_outdated(each)]
            befores = yield from self._upgraded(befores, outdated, changes)
        with self._translated():
            afters = yield from write([each["_id"] for each in befores], outdated)
        final = [afters.get(freeze(each["_id"]), each) for each in befores]
        if derivation(entry).maintains_itself:
            final = yield from follow_own(entry, list(zip(befores, final, strict=True)))
        if not self.is_exact or derivation(entry).has_formulas:
            yield from require_valid(entry, befores, final, changes)
        yield from changes.add(entry, zip(befores, final, strict=True))
        return [each for each in final if freeze(each["_id"]) in afters]

    def _upgraded(
        self, befores: Sequence[Raw], outdated: Sequence[Any], changes: Changes
    ) -> Plan[Sequence[Raw]]:
        """Store the outdated documents upgraded. Returns all as they are then."""
        if not outdated:
            return befores
        server = yield from server_facts()
        server.require_transactions(f"an update of an outdated {self.entry.model.__name__}")
        return (yield from upgrade_stored(self.entry, befores, changes))


# -- one document ----------------------------------------------------------------------------------


class Update(_Update, Write[D | None]):
    """An update of one document."""

    def __init__(
        self,
        entry: ModelEntry[D],
        id_or_filter: Any,
        update: Any,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> None:
        self._prepare(entry, update, array_filters)
        self.filter = filter_of(entry, id_or_filter)
        self.sort = None if sort is None else sort_keys(sort, entry.paths.fields)
        # By an attribute only a pipeline sorts, so that the document is found first.
        self._by_attribute = sort is not None and sorts_by_attribute(entry.codec, self.sort)
        check_returns(returns)
        self.returns = returns
        self.shows_document = returns == "after"
        self.options: Raw = {}
        if self.parsed.array_filters is not None:
            self.options["array_filters"] = self.parsed.array_filters

    def command(self) -> Plan[Raw | None] | None:
        return self._update_alone() if self._is_plain and not self._by_attribute else None

    def _update_alone(self) -> Plan[Raw | None]:
        entry, chain, chosen = self.entry, self.entry.versions, self.filter
        with self._translated():
            if not chain.is_versioned:
                return (yield from self._find_and_update(chosen, after=self.returns == "after"))
            yield from self._refuse_sort()
            # The first of all versions: an outdated one would be passed over.
            if self.sort is not None and (yield from may_match_outdated(entry, chosen)):
                raise CommitNeeded
            current = {"$and": [chosen, chain.current_only]}
            raw = yield from self._find_and_update(current, after=self.returns == "after")
            # It may have been upgraded since it was passed over.
            if raw is None and (yield from may_match(entry, chosen)):
                raise CommitNeeded
            return raw

    def _find_and_update(self, chosen: Raw, *, after: bool) -> Plan[Raw | None]:
        return find_one_and_update(
            self.entry.collection, chosen, self.update, sort=self.sort, after=after, **self.options
        )

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        if not self._reads_before(changes):
            return (yield from self._update_unread(changes))
        before = yield from self._first()
        return None if before is None else (yield from self.update_document(before, changes))

    def _reads_before(self, changes: Changes) -> bool:
        """Whether anything follows from what the document was."""
        entry = self.entry
        return (
            not self.is_exact
            or self._by_attribute
            or self.returns == "before"
            or entry.versions.is_versioned
            or derivation(entry).needs_before
            or (changes.joined and self._has_rules)
        )

    @property
    def _has_rules(self) -> bool:
        return any(each.rules for each in self.entry.kinds.related)

    def _first(self) -> Plan[Raw | None]:
        """The document that matches first."""
        if not (self.entry.versions.may_change or self._by_attribute):
            return (yield from find_one(self.entry.collection, self.filter, sort=self.sort))
        yield from self._refuse_sort()
        matches = yield from find_matching(self.entry, self.filter, self.sort, limit=1)
        return matches[0] if matches else None

    def _refuse_sort(self) -> Plan[None]:
        return refuse_changed(self.entry, "a sort", dict(self.sort or ()))

    def update_document(self, before: Raw, changes: Changes) -> Plan[Raw | None]:
        """Update the document that was just read."""
        afters = yield from self._apply([before], self._write, changes)
        if not afters or self.returns == "after":
            return afters[0] if afters else None
        return (yield from upgraded(self.entry, [before]))[0]

    def _write(self, keys: list[Any], outdated: list[Any]) -> Plan[dict[Any, Raw]]:
        # With the caller's filter, to which a positional operator (`items.$`) refers.
        chosen = by_id(keys[0]) if outdated else {"$and": [by_id(keys[0]), self.filter]}
        after = yield from find_one_and_update(self.entry.collection, chosen, self.update, **self.options)
        return {} if after is None else {freeze(keys[0]): after}

    def _update_unread(self, changes: Changes) -> Plan[Raw | None]:
        """Update a document of which only copies are made, so that nothing follows from what it was."""
        sets = None if self._has_rules else _plain_sets(self.update)
        with self._translated():
            raw = yield from self._find_and_update(self.filter, after=sets is None)
        if raw is None:
            return None
        if sets is None:
            yield from changes.add(self.entry, [(NOT_READ, raw)])
            return raw
        after = {**raw, **sets}
        yield from changes.add(self.entry, [(raw, after)])
        return after

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)

    @property
    def targets(self) -> frozenset[Hashable]:
        return self.selector.targets

    # -- several as one ------------------------------------------------------------------------

    @property
    def key(self) -> ObjectId | None:
        """The id of the one document that it means; None where it may mean another."""
        simple = not self.options and self.sort is None and self.returns == "after"
        return self.selector.single_id if simple and merges_by_id(self.entry) else None

    def merges(self, other: Write[Any]) -> bool:
        return merges_single(self, other)

    def merged(self, other: Update[D]) -> UpdateEach:
        return UpdateEach(self).merged(other)


def check_returns(returns: Any) -> None:
    """Refuse what is neither of the two documents that an update can return."""
    if returns not in ("after", "before"):
        raise UsageError(f"returns={returns!r}; it takes 'after' or 'before'", code="update-invalid")


class EachWrite(Write[list[Raw | None]]):
    """Several writes of single documents by their ids, in one round of commands."""

    def __init__(self, first: Any) -> None:
        self.entry = first.entry
        self.writes = [first]
        self._keys = {first.key}

    def merges(self, other: Any) -> bool:
        return merges_single(self.writes[0], other) and other.key not in self._keys

    def merged(self, other: Any) -> Self:
        self.writes.append(other)
        self._keys.add(other.key)
        return self

    def shares(self, parts: Sequence[Write[Any]], outcome: Any) -> list[Any]:
        return list(outcome)

    def find_befores(self) -> Plan[dict[Any, Raw]]:
        """Return the documents that the writes are about, by frozen id."""
        rows = yield from by_ids(self.entry.collection, self._keys)
        return {key: each for key, each in rows.items() if self.entry.targets.admits(each)}


def merges_single(first: Any, other: Any) -> bool:
    """Whether two writes of single documents can be one: each has its id alone for a filter, another one."""
    same = type(other) is type(first) and other.entry is first.entry
    return same and first.key is not None and other.key is not None and first.key != other.key


def merges_by_id(entry: ModelEntry) -> bool:
    """Whether writes of single documents can be one: each is no state of its own to any rule."""
    return not (entry.versions.is_versioned or derivation(entry).is_recorded)


def _plain_sets(update: Any) -> Raw | None:
    """Return what an update sets, as it will be read, where it does nothing but set whole fields; else None.

    Then the document before it tells what the document after it is, and no second look is needed.
    """
    if not isinstance(update, Mapping) or update.keys() != {"$set"}:
        return None
    sets = update["$set"]
    if not isinstance(sets, Mapping) or any("." in name or name.startswith("$") for name in sets):
        return None
    return bson.decode(bson.encode(sets, codec_options=CODEC_OPTIONS), CODEC_OPTIONS)


class UpdateEach(_Update, EachWrite):
    """Updates of single documents by their ids."""

    def apply(self, changes: Changes) -> Plan[list[Raw | None]]:
        self.filter = {}
        self.is_exact = all(each.is_exact for each in self.writes)
        self.update = [each.update for each in self.writes]
        befores = yield from self.find_befores()
        afters = (yield from self._apply([*befores.values()], self._write, changes)) if befores else []
        by_key = {freeze(each["_id"]): each for each in afters}
        return [by_key.get(freeze(each.key)) for each in self.writes]

    def _write(self, keys: list[Any], outdated: list[Any]) -> Plan[dict[Any, Raw]]:
        operations = [UpdateOne(each.filter, each.update) for each in self.writes]
        yield from bulk_write(self.entry.collection, operations)
        return (yield from by_ids(self.entry.collection, keys))


# -- some fields of a document at hand ---------------------------------------------------------------


class ChangeFields(Update[D]):
    """Some fields, by their Python names, of a document that the caller has read."""

    # Each has a refusal of its own.
    key = None

    def __init__(self, entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> None:
        raw, update = change_of(entry, document, fields)
        super().__init__(entry, document.id, update)
        self._identity = raw["_id"]
        self._unchanged = unchanged(entry, raw)
        self._stored = {**by_id(self._identity), **entry.targets.exact.filter()}
        self.filter = {**self._stored, **self._unchanged}

    def command(self) -> Plan[Raw] | None:
        command = super().command()
        return None if command is None else self._required(command)

    def apply(self, changes: Changes) -> Plan[Raw]:
        return self._required(super().apply(changes))

    def _required(self, update: Plan[Raw | None]) -> Plan[Raw]:
        raw = yield from update
        if raw is None:
            raise (
                yield from not_written(self.entry, self._stored, self._identity, self._unchanged, "changed")
            )
        return raw


def change_of(entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> tuple[Raw, Raw]:
    """Return a document with other values in these fields as it is stored, and the update for that."""
    changed = _with(entry, document, fields)
    # In the current version, whatever this Store writes: an update speaks of that one.
    codec: Codec[D] = getattr(entry.codec, "own", entry.codec)
    raw = codec.dump_all([changed], [])[0]
    sets, absent = dict[str, Any](), dict[str, Any]()
    for name in fields:
        stored = entry.codec.by_name[name].stored
        if stored in raw:
            sets[stored] = raw[stored]
        else:
            absent[stored] = ""
    return raw, {key: value for key, value in {"$set": sets, "$unset": absent}.items() if value}


def _with(entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> D:
    """The document with other values in these fields, validated as a whole."""
    model, known = entry.model.__name__, entry.codec.by_name
    _require_fields(entry, fields)
    present = {name: value for name, value in document.__dict__.items() if name in known}
    try:
        return entry.model.model_validate({**present, **fields}, by_name=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document as a whole"
        raise InvalidValue(
            f"change of {model}: {where}: {first['msg']}; nothing was written", code="document-invalid"
        ) from error


def _require_fields(entry: ModelEntry, fields: Mapping[str, Any]) -> None:
    """Refuse names that `change` cannot write."""
    model, known = entry.model.__name__, entry.codec.by_name
    if not fields or "id" in fields:
        what = "the id of a document" if fields else "nothing"
        raise UsageError(
            f"change of {model} was asked to change {what}; name the fields to change, such as "
            "change(document, status='paid')",
            code="update-invalid",
        )
    for name in fields:
        if name not in known:
            raise unknown_field(f"change of {model} names", name, model, list(known))


# -- all documents that match ------------------------------------------------------------------------


class UpdateMany(_Update, ChunkedWrite):
    """An update of the documents of one chunk."""

    def __init__(self, entry: ModelEntry, filter: Any, update: Any) -> None:
        require_filter(entry, filter)
        self._prepare(entry, update)
        self.filter = parse_filter(entry.paths.fields, filter)

    def command(self) -> Plan[int] | None:
        return self._update_alone() if self._is_plain and self.ids is None and not self._collides else None

    @property
    def _collides(self) -> bool:
        """Whether documents may be refused for a value that another has: then a chunk is done as a whole."""
        touched = self.parsed.touched
        unique = self.entry.rules.memo("unique paths", lambda: _unique_paths(self.entry))
        return bool(unique) and (
            touched is None or any(overlap(each, path) for each in touched for path in unique)
        )

    def _update_alone(self) -> Plan[int]:
        entry, chosen = self.entry, self.filter
        whole = yield from is_inside()
        if entry.versions.is_versioned:
            if (yield from may_match_outdated(entry, chosen)):
                raise CommitNeeded
            chosen = {"$and": [chosen, entry.versions.current_only]}
        with self._translated():
            try:
                return (yield from update_many(entry.collection, chosen, self.update)).matched_count
            except WriteError as error:
                # The server has written the documents before the refused one, and does not say how many.
                clear = translate_update(error, entry.model.__name__, [])
                if not whole:
                    # Raises where the server refuses the update for what it is.
                    yield from update_many(entry.collection, {"_id": {"$in": []}}, self.update)
                    raise PartlyDone(entry.model.__name__, None, clear) from error
                raise

    def apply(self, changes: Changes) -> Plan[int]:
        befores = yield from find_matching(self.entry, self.selector.filter)
        if befores:
            yield from self._apply(befores, self._write, changes)
        return len(befores)

    def _write(self, keys: list[Any], outdated: list[Any]) -> Plan[dict[Any, Raw]]:
        as_stored = {freeze(key) for key in outdated}
        others = [key for key in keys if freeze(key) not in as_stored]
        if others:
            chosen = Selector(self.entry, self.filter).within(others).filter
            yield from update_many(self.entry.collection, chosen, self.update)
        if outdated:
            yield from update_many(self.entry.collection, {"_id": {"$in": outdated}}, self.update)
        return (yield from by_ids(self.entry.collection, keys))


def _unique_paths(entry: ModelEntry) -> list[str]:
    unique = [index.document for index in declared_indexes(entry.kinds.root) if index.document.get("unique")]
    return [path for document in unique for path in dict(document["key"])]
