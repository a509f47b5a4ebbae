"""Readers: pages of what a cursor gives, made into documents of a model, cards, or results of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from treadle.engine.documents import require_soft_delete
from treadle.engine.queries import divided_read, read_of, refuse_changed, upgraded_for_reader
from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.layout import PageReader
from treadle.graph.model_entry import ModelEntry
from treadle.graph.query import SKIPPED, Query
from treadle.model.adapt import accepted_keys, adapter_of
from treadle.model.bson_types import clean, from_bson
from treadle.model.codec import codec_of
from treadle.plan import Plan, Raw, Read
from treadle.query.attributes import refuse_attributes
from treadle.query.comparison import order_key
from treadle.query.field_paths import Unchecked
from treadle.query.filters import parse_filter, parse_match, refuse_operators, sort_keys
from treadle.query.paths import Path, resolve

R = TypeVar("R")

# Where the server says by what it has sorted a document.
_SORT_KEY = "_treadle_sort"

WRITING_STAGES = frozenset({"$out", "$merge"})


def find_command(entry: ModelEntry, query: Query) -> Read:
    """Return the command whose cursor streams the matching documents."""
    query.require_window()
    if query.deleted:
        require_soft_delete(entry, "find(…, deleted=True)")
    keys = sort_keys(query.sort, entry.paths.fields)
    scope = entry.deleted.filter() if query.deleted else None
    condition = parse_filter(entry.paths.fields, query.filter, scope)
    return read_of(entry, condition, keys, query.skip or 0, query.limit or 0, query.projection)


class DocumentReader(PageReader[R]):
    """Pages of stored documents, each as the model, or a card, has it."""

    def __init__(self, entry: ModelEntry, command: Read, query: Query) -> None:
        self._command = command
        # PyMongo's own iteration costs as much per document as validating one.
        self.page = entry.limits.find_page
        self.done = False
        self._entry = entry
        self._card = query.card
        self._noted = query.errors
        self._load = query.loader(entry.codec)
        # Where all documents are as the model has them, there is nothing to do to a page.
        chain = entry.versions
        self._upgrades = chain.needs_server or (chain.is_versioned and query.card is not None)
        self._sorts = [*dict(command.options.get("sort") or ())]
        self._divided = divided_read(entry, command)
        if self._divided is not None:
            self._command, self.page = self._divided.command, self._divided.page

    def in_pages_of(self, page: int) -> DocumentReader[R]:
        """The same in larger pages, each in one reply, for what is read to its end."""
        self.page = page
        options = {**self._command.options, "batch_size": page + 1}
        self._command = replace(self._command, options=options)
        return self

    @property
    def command(self) -> Read:
        return self._command

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[R]]:
        yield from refuse_changed(self._entry, "a sort", self._sorts)
        # Once is enough.
        self._sorts = []
        self.done = ended
        if self._divided is not None:
            raws = yield from self._divided.take(raws)
            self.done = ended or self._divided.done
        if not self._upgrades:
            return map(self._load, raws) if self._noted is None else self._fitting(raws)
        current = yield from self._shown(raws)
        if self._noted is not None:
            return self._fitting(current)
        return (self._load(raw) for raw in current if raw is not None)

    def _fitting(self, raws: Sequence[Raw | None]) -> Iterable[R]:
        documents = (self._load(raw) for raw in raws if raw is not None)
        return (document for document in documents if document is not SKIPPED)

    def _shown(self, raws: list[Raw]) -> Plan[Sequence[Raw | None]]:
        """The documents as the current version has them; one by one where one cannot be converted."""
        try:
            return (yield from upgraded_for_reader(self._entry, raws, self._card))
        except DataError as error:
            if self._noted is None:
                raise
            if len(raws) == 1:
                self._noted.append(error)
                return []
        shown: list[Raw | None] = []
        for raw in raws:
            shown += yield from self._shown([raw])
        return shown


# -- archived documents too ------------------------------------------------------------------------


class ArchiveReader:
    """Pages of a collection and its archive, merged in the order of the sort; without one, in this order.

    A document is in one of the two at every moment, so both are read at one moment, in a snapshot.
    """

    def __init__(self, entry: ModelEntry, query: Query) -> None:
        archive = entry.everything.archive
        if archive is None:
            raise UsageError(
                f"{entry.model.__name__} has no archive to look into; declare it with archive=Archive(…)",
                code="archive-undeclared",
            )
        query.require_window()
        self.page = entry.limits.find_page
        self.done = False
        self._entry = entry
        self._card = query.card
        self._load = query.loader(entry.codec)
        self._skip = query.skip or 0
        self._left = query.limit
        most = None if query.limit is None else (query.skip or 0) + query.limit
        refuse_attributes(entry.codec, sort_keys(query.sort, entry.paths.fields))
        command = find_command(entry, query._replace(skip=0, limit=most))
        sort = dict(command.options["sort"] or ())
        self._sorts, self._directions = [*sort], [*sort.values()]
        if sort:
            # What the server sorts by, also where that is one of an array's items.
            condition, projection = command.arguments
            shown = {**(projection or {}), _SORT_KEY: {"$meta": "sortKey"}}
            command = replace(command, arguments=(condition, shown))
        self._sides = _Side(entry, command), _Side(entry, replace(command, collection=archive))
        self.commands = [side.command for side in self._sides]

    @property
    def wanting(self) -> list[int]:
        """Which of the cursors must be read before anything else can be told."""
        missing = [at for at, side in enumerate(self._sides) if not side.raws and not side.ended]
        return missing if self._directions else missing[:1]

    def fill(self, at: int, raws: list[Raw]) -> None:
        """Take what a cursor gave; less than a page is its end."""
        self._sides[at].fill(raws, self.page)

    def take(self) -> Plan[Iterable[Any]]:
        """Return the documents that come next."""
        yield from refuse_changed(self._entry, "a sort", self._sorts)
        self._sorts = []
        for side in self._sides:
            yield from side.match()
        raws: list[Raw] = []
        while not self.wanting and not self.done:
            raws += self._next()
        current = yield from upgraded_for_reader(self._entry, raws, self._card)
        documents = (self._load(raw) for raw in current if raw is not None)
        return [document for document in documents if document is not SKIPPED]

    def _next(self) -> list[Raw]:
        """Return the document that comes first; none where it is skipped, or all are taken."""
        side = self._first()
        if side is None:
            self.done = True
            return []
        raw = side.raws.pop()
        raw.pop(_SORT_KEY, None)
        if self._skip:
            self._skip -= 1
            return []
        if self._left is not None:
            self._left -= 1
            self.done = not self._left
        return [raw]

    def _first(self) -> _Side | None:
        """Return the side whose next document comes first."""
        present = [side for side in self._sides if side.raws]
        if len(present) < 2 or not self._directions:
            return next(iter(present), None)
        keys = present[0].raws[-1][_SORT_KEY], present[1].raws[-1][_SORT_KEY]
        for direction, *values in zip(self._directions, *keys, strict=True):
            one, other = map(order_key, values)
            if one != other:
                return present[int((one < other) != (direction == 1))]
        return present[0]


class _Side:
    """One of the two collections that are merged."""

    def __init__(self, entry: ModelEntry, command: Read) -> None:
        self._reading = divided_read(entry, command)
        self.command = command if self._reading is None else self._reading.command
        # The rest of a page, the next document last, and whether there are more pages.
        self.raws: list[Raw] = []
        self.ended = False
        self._is_matched = True

    def fill(self, raws: list[Raw], page: int) -> None:
        self.raws, self.ended, self._is_matched = raws[::-1], len(raws) < page, False

    def match(self) -> Plan[None]:
        """Keep of a new page the documents that match once they are upgraded."""
        if self._reading is not None and not self._is_matched:
            self.raws = (yield from self._reading.take(self.raws[::-1]))[::-1]
            self.ended = self.ended or self._reading.done
        self._is_matched = True


# -- values and pipelines -------------------------------------------------------------------------


def path_of(entry: ModelEntry, field: Any) -> tuple[Path, ModelEntry]:
    """The path that a caller names in Python, and the model of the family that has it."""
    error: DeclarationError | None = None
    for each in [entry, *entry.kinds.below]:
        try:
            return resolve(each.codec, str(field), entry.model.__name__, "field-unknown"), each
        except DeclarationError as refused:
            error = error or refused
    assert error is not None
    raise UsageError(error.message, code="field-unknown")


def adapted_values(owner: ModelEntry, path: Path, values: Iterable[Any]) -> list[Any]:
    adapt = adapter_of(owner.codec, path.shape)
    return [value if value is None or adapt is None else adapt(value) for value in values]


class PipelineReader(PageReader[Any]):
    """Pages of what a pipeline gives: dicts of Python values, or models."""

    def __init__(self, entry: ModelEntry, command: Read, into: Any) -> None:
        self._command = command
        self.page = entry.limits.find_page
        self.done = False
        self._load = result_loader(into)

    @property
    def command(self) -> Read:
        return self._command

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[Any]]:
        self.done = ended
        return map(self._load, raws)
        yield


def result_loader(into: Any) -> Callable[[Raw], Any]:
    """What makes Python values of a result, or the model that was asked for."""
    if into is None:
        return from_bson
    if not (isinstance(into, type) and issubclass(into, BaseModel)):
        raise UsageError(
            f"into={into!r} is no Pydantic model; pass the class to read results as", code="card-invalid"
        )
    load, field = codec_of(into).load, into.model_fields.get("id")
    if field is None or "_id" in accepted_keys(into, "id", field):
        return load

    def named(raw: Raw) -> Any:
        # As for the cards of find.
        if "_id" in raw:
            raw.setdefault("id", raw["_id"])
        return load(raw)

    return named


def checked_pipeline(entry: ModelEntry, pipeline: Any) -> list[Raw]:
    """The stages that a caller gave, without those that write or run code."""
    stages = (
        list(pipeline) if isinstance(pipeline, Sequence) and not isinstance(pipeline, str) else [pipeline]
    )
    for stage in stages:
        _require_stage(entry, stage)
    cleaned: list[Raw] = clean(stages)
    reason = "writes past the patterns and is not accepted in aggregate; store what it gives by insert_many"
    refuse_operators(cleaned, WRITING_STAGES, reason, code="operator-forbidden")
    _parse_first(entry, stages, cleaned)
    return cleaned


def _parse_first(entry: ModelEntry, stages: Sequence[Any], cleaned: list[Raw]) -> None:
    """Parse the conditions with which a pipeline begins: there, documents are as they are stored."""
    for number, stage in enumerate(stages):
        if "$match" not in stage or not isinstance(stage["$match"], Mapping):
            return
        if not isinstance(stage["$match"], Unchecked):
            cleaned[number] = {"$match": parse_match(entry.paths.fields, stage["$match"])}


def _require_stage(entry: ModelEntry, stage: Any) -> None:
    if not isinstance(stage, Mapping) or len(stage) != 1 or not str(next(iter(stage))).startswith("$"):
        raise UsageError(
            f"a pipeline over {entry.model.__name__} is a list of stages such as "
            f"{{'$match': {{…}}}}; it has {type(stage).__name__}",
            code="pipeline-invalid",
        )
