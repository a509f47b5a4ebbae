"""Parsed filters and sorts as commands, and the documents that match, whatever their versions.

A filter or a sort may name fields that an upgrade changes. Such a read sends
one command, for the current documents that match and for the outdated ones
that may. These are upgraded, and those that then do not match are dropped. So
the skip and the limit are counted here and not by the server. A document that
cannot be upgraded is quarantined and does not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.engine.pages import by_ids
from treadle.engine.version_upgrade import has_outdated, matches_outdated, read_current
from treadle.errors import UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.query import ReadAs
from treadle.graph.versions import Divided
from treadle.plan import Plan, Raw, Read, find_one
from treadle.query.attributes import sorting_stages, sorts_by_attribute
from treadle.query.keys import freeze

# Documents that are read at a time where the caller wants fewer.
SMALL_PAGE = 32


def read_of(
    entry: ModelEntry,
    condition: Raw,
    sort: Sequence[tuple[str, Any]] | None = None,
    skip: int = 0,
    limit: int = 0,
    projection: Mapping[str, Any] | None = None,
) -> Read:
    """Return the read of what meets a parsed filter."""
    options = {"sort": sort, "skip": skip, "limit": limit}
    if sort is not None and sorts_by_attribute(entry.codec, sort):
        return _sorted_by_attribute(entry, condition, options, projection)
    return Read(entry.collection, "find", (condition, projection), options)


def _sorted_by_attribute(
    entry: ModelEntry, condition: Raw, options: Mapping[str, Any], projection: Mapping[str, Any] | None
) -> Read:
    """Return the same by a pipeline, for a sort by what a map stored as pairs holds."""
    sorting, tidying = sorting_stages(entry.codec, options["sort"])
    stages: list[Raw] = [{"$match": condition}, *sorting]
    stages += [{f"${name}": options[name]} for name in ("skip", "limit") if options[name]]
    stages.append(tidying if projection is None else {"$project": dict(projection)})
    return Read(entry.collection, "aggregate", (stages,), {"allowDiskUse": True})


def find_matching(
    entry: ModelEntry,
    condition: Raw,
    sort: Sequence[tuple[str, Any]] | None = None,
    limit: int = 0,
    projection: Mapping[str, Any] | None = None,
) -> Plan[list[Raw]]:
    """Find what meets a parsed filter, outdated documents once they are upgraded; as they are stored."""
    command = read_of(entry, condition, sort, 0, limit, projection)
    reading = divided_read(entry, command)
    if reading is None:
        raws: list[Raw] = yield command
        return raws
    matches: list[Raw] = []
    taken, ended = 0, False
    while not (ended or reading.done):
        raws = yield _with_window(reading.command, taken, reading.page)
        matches += yield from reading.take(raws)
        taken, ended = taken + len(raws), len(raws) < reading.page
    return matches


class DividedRead:
    """A read whose filter names fields that an upgrade changes."""

    def __init__(self, entry: ModelEntry, command: Read, divided: Divided) -> None:
        self._entry = entry
        self._divided = divided
        self._skip = command.options.get("skip") or 0
        self._left = command.options.get("limit") or None
        wanted = self._skip + (self._left or entry.limits.find_page)
        # The documents to read at a time.
        self.page = min(entry.limits.find_page, max(SMALL_PAGE, wanted))
        self.command = _with_filter(command, entry.versions.candidates(divided))

    @property
    def done(self) -> bool:
        """Whether the caller has all documents that it asked for."""
        return self._left == 0

    def take(self, raws: Sequence[Raw]) -> Plan[list[Raw]]:
        """Return the documents of a page that match, within the skip and the limit, as they are stored."""
        chain = self._entry.versions
        matches = yield from self._matching([raw for raw in raws if chain.is_outdated(raw)])
        kept = [raw for raw in raws if not chain.is_outdated(raw) or freeze(raw["_id"]) in matches]
        self._skip, kept = max(0, self._skip - len(kept)), kept[self._skip :]
        if self._left is not None:
            kept = kept[: self._left]
            self._left -= len(kept)
        return kept

    def _matching(self, outdated: Sequence[Raw]) -> Plan[set[Any]]:
        """Return the frozen ids of the outdated documents that match once they are upgraded."""
        if not outdated:
            return set()
        scope, collection = self._entry.targets, self.command.collection
        if _is_partial(self.command):
            # A migration may read any field.
            whole = yield from by_ids(collection, [raw["_id"] for raw in outdated])
            outdated = [*whole.values()]
        images = yield from scope.load(outdated, collection)
        stages: list[Raw] = [{"$match": self._divided.upgraded}, {"$project": {"_id": 1}}]
        rows = yield from scope.evaluate([image.document for image in images], stages)
        return {freeze(row["_id"]) for row in rows}


def divided_read(entry: ModelEntry, command: Read) -> DividedRead | None:
    """Return the read of a filter that names fields which an upgrade changes; None for any other."""
    if not entry.versions.may_change:
        return None
    first = command.arguments[0]
    divided = entry.versions.divide(first if command.method == "find" else first[0]["$match"])
    return None if divided is None else DividedRead(entry, command, divided)


def may_match_outdated(entry: ModelEntry, condition: Raw) -> Plan[bool]:
    """Whether an outdated document meets a caller's filter, as far as it can be told before the upgrade."""
    divided = entry.versions.divide(condition)
    return (yield from matches_outdated(entry, condition if divided is None else divided.stored))


def may_match(entry: ModelEntry, condition: Raw) -> Plan[bool]:
    """Whether a document of any version meets a caller's filter, as far as it can be told before the upgrade.

    One read, so that a document that is migrated at the same time is seen in one of its forms.
    """
    divided = entry.versions.divide(condition)
    candidates = condition if divided is None else entry.versions.candidates(divided)
    return (yield from find_one(entry.collection, candidates, {"_id": 1})) is not None


def _is_partial(command: Read) -> bool:
    """Whether a read gives parts of documents."""
    if command.method == "find":
        return any(command.arguments[1:])
    return "$project" in command.arguments[0][-1]


def _with_filter(command: Read, condition: Raw) -> Read:
    """Return the same read of what meets another filter, without its skip and limit."""
    first, *rest = command.arguments
    chosen: Any = condition if command.method == "find" else [{"$match": condition}, *first[1:]]
    return _with_window(replace(command, arguments=(chosen, *rest)), 0, 0)


def _with_window(command: Read, skip: int, limit: int) -> Read:
    if command.method == "find":
        return replace(command, options={**command.options, "skip": skip, "limit": limit})
    stages = [stage for stage in command.arguments[0] if not stage.keys() & {"$skip", "$limit"}]
    bounds = [{name: number} for name, number in (("$skip", skip), ("$limit", limit)) if number]
    return replace(command, arguments=([*stages[:-1], *bounds, stages[-1]],))


def upgraded_for_reader(entry: ModelEntry, raws: list[Raw], card: ReadAs | None) -> Plan[list[Raw | None]]:
    """Return documents as the current version has them; None for one that was deleted concurrently."""
    if not entry.versions.is_versioned:
        return list(raws)
    if card is None:
        return list((yield from read_current(entry, raws)))
    # A migration may read any field, so a card of an outdated document is taken from the whole of it.
    outdated = [*filter(entry.versions.is_outdated, raws)]
    if not outdated:
        return list(raws)
    whole = yield from by_ids(entry.collection, [raw["_id"] for raw in outdated])
    current = yield from read_current(entry, [*whole.values()])
    upgraded = dict(zip(whole, current, strict=True))
    return [upgraded.get(freeze(raw["_id"])) if entry.versions.is_outdated(raw) else raw for raw in raws]


def refuse_changed(
    entry: ModelEntry, call: str, paths: Iterable[str], filter: Raw | None = None
) -> Plan[None]:
    """Refuse to sort by, or to list the values of, fields that outdated documents hold in another form.

    Costs an indexed read where such a field is named, and else nothing.
    """
    chain = entry.versions
    if not chain.changes_any(paths) and (filter is None or chain.divide(filter) is None):
        return
    name = entry.model.__name__
    reason = f"{entry.collection} holds outdated documents; run migrate({name})"
    if chain.writes_older:
        reason = "this Store writes an older version (write_versions=)"
    elif not (yield from has_outdated(entry)):
        return
    raise UsageError(
        f"{call} of {name} names a field that a migration changes, which the server cannot order or list "
        f"while {reason}",
        code="documents-outdated",
    )
