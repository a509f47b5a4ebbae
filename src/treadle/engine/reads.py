"""Reads of documents one by one: many by their ids, page after page, distinct values, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from treadle.engine import crud
from treadle.engine.divided_reads import divided_read, refuse_changed
from treadle.engine.documents import translated
from treadle.engine.target_updates import READ_KEYS_MAX
from treadle.errors import DataError, DeclarationError, UsageError
from treadle.graph.card import Card
from treadle.graph.layout import SKIPPED, PageReader, skipping
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Page
from treadle.graph.stored_pages import chunks
from treadle.model.adapt import accepted_keys, adapter_of
from treadle.model.bson_types import from_bson
from treadle.model.codec import codec_of
from treadle.model.text import quote
from treadle.plan import Call, Plan, Raw, Read, find, find_one
from treadle.query import keyset
from treadle.query.attributes import refuse_attributes
from treadle.query.field_paths import Unchecked
from treadle.query.filters import Sort, clean, confine, parse_filter, parse_match, refuse_operators, sort_keys
from treadle.query.keys import freeze
from treadle.query.paths import Path, overlap, resolve, value_at

# Documents of one page().
PAGE_MAX = 10_000

R = TypeVar("R")

WRITING_STAGES = frozenset({"$out", "$merge"})


class DocumentReader(PageReader[R]):
    """Pages of stored documents, each as the model, or a card, has it."""

    def __init__(
        self,
        entry: ModelEntry[Any],
        command: Read,
        filter: Any,
        card: Card[Any] | None = None,
        noted: list[DataError] | None = None,
    ) -> None:
        self._command = command
        # PyMongo's own iteration costs as much per document as validating one.
        self.page = entry.limits.find_page
        self.done = False
        self._entry = entry
        self._filter = filter
        self._card = card
        self._noted = noted
        self._load = crud.loader(entry, card)
        if noted is not None:
            self._load = skipping(self._load, noted)
        # Where all documents are as the model has them, there is nothing to do to a page.
        chain = entry.versions
        self._upgrades = chain.needs_server or (chain.is_versioned and card is not None)
        self._sorts = [path for path, _ in command.options.get("sort") or ()]
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
            return (yield from crud.shown(self._entry, raws, self._card))
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


# -- by id --------------------------------------------------------------------------------------


def many(entry: ModelEntry[Any], ids: Iterable[Any], card: Card[Any] | None) -> Plan[list[Any]]:
    """The documents with these ids in their order, None where there is none."""
    keys = [entry.ids.encode(each) for each in ids]
    load, by_key = crud.loader(entry, card), {}
    projection = None if card is None else card.projection
    for chunk in chunks([*{freeze(key): key for key in keys}.values()], READ_KEYS_MAX):
        chosen = {"_id": {"$in": chunk}, **entry.targets.filter()}
        raws = yield Read(entry.collection, "find", (chosen, projection), ids=chunk)
        for raw in (yield from crud.shown(entry, raws, card)):
            if raw is not None:
                by_key[freeze(raw["_id"])] = raw
    loaded = {key: load(raw) for key, raw in by_key.items()}
    return [loaded.get(freeze(key)) for key in keys]


def exists(entry: ModelEntry[Any], filter: Any) -> Plan[bool]:
    """Whether any document matches."""
    cleaned = parse_filter(entry.paths.fields, filter)
    divided = entry.versions.divide(cleaned)
    current = cleaned if divided is None else entry.versions.matching_current(divided)
    with translated(entry.model.__name__, [cleaned]):
        if (yield from find_one(entry.collection, current, {"_id": 1})) is not None:
            return True
        return divided is not None and bool((yield from entry.targets.find_outdated(divided)))


# -- page after page ------------------------------------------------------------------------------


def page(
    entry: ModelEntry[Any],
    filter: Any,
    sort: Sort | None,
    size: int,
    after: str | None,
    card: Card[Any] | None,
) -> Plan[Page[Any]]:
    """The documents after a place in the order of the sort, and the place where the next page begins."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= PAGE_MAX:
        raise UsageError(
            f"size={quote(size)}; a page has from 1 to {PAGE_MAX:,} documents",
            code="filter-invalid",
        )
    keys = refuse_attributes(entry.codec, sort_keys([] if sort is None else sort, entry.paths.fields)) or []
    cleaned = parse_filter(entry.paths.fields, filter)
    named = [path for path, _ in keys]
    yield from refuse_changed(entry, "page", named, cleaned)
    mixed = _mixed(entry, named)
    query = keyset.digest(entry.collection, cleaned, keys)
    chosen = cleaned
    if after is not None:
        place = keyset.after(keys, keyset.from_token(query, after, len(keys)), mixed=mixed)
        chosen = {"$and": [cleaned, place]} if cleaned else place
    projection = None
    if card is not None:
        extra = [path for path, _ in keys if not any(overlap(path, other) for other in card.paths)]
        projection = {**card.projection, **dict.fromkeys(extra, 1)}
    with translated(entry.model.__name__, [chosen]):
        raws = yield from find(entry.collection, chosen, projection, sort=keys, limit=size + 1)
    further, raws = len(raws) > size, raws[:size]
    following = (
        keyset.to_token(query, [_place(entry, raws[-1], path) for path, _ in keys]) if further else None
    )
    load, current = crud.loader(entry, card), (yield from crud.shown(entry, raws, card))
    return Page([load(raw) for raw in current if raw is not None], following)


def _mixed(entry: ModelEntry[Any], paths: Sequence[str]) -> list[str]:
    """The paths of a sort whose values may be of several types; refuses those that lead into arrays."""
    mixed = []
    for path in paths:
        try:
            resolved: Path | None = resolve(entry.codec, path, "", "sort-invalid")
        except DeclarationError:
            resolved = None
        if resolved is not None and resolved.in_array:
            raise _no_place(entry, path)
        if resolved is None or resolved.shape.kind not in ("scalar", "enum", "literal"):
            mixed.append(path)
    return mixed


def _no_place(entry: ModelEntry[Any], path: str) -> UsageError:
    return UsageError(
        f"the sort names {path!r}, which holds several values in one {entry.model.__name__}; page sorts by "
        "single values",
        code="sort-invalid",
    )


def _place(entry: ModelEntry[Any], raw: Raw, path: str) -> Any:
    value = value_at(raw, path)
    if isinstance(value, list):
        raise _no_place(entry, path)
    return value


# -- values and pipelines -------------------------------------------------------------------------


def path_of(entry: ModelEntry[Any], field: Any) -> tuple[Path, ModelEntry[Any]]:
    """The path that a caller names in Python, and the model of the family that has it."""
    error: DeclarationError | None = None
    for each in [entry, *entry.kinds.below]:
        try:
            return resolve(each.codec, str(field), entry.model.__name__, "field-unknown"), each
        except DeclarationError as refused:
            error = error or refused
    assert error is not None
    raise UsageError(error.message, code="field-unknown")


def distinct(entry: ModelEntry[Any], field: str, filter: Any) -> Plan[list[Any]]:
    """The different values of a field, as Python has them."""
    path, owner = path_of(entry, field)
    cleaned = parse_filter(entry.paths.fields, filter)
    yield from refuse_changed(entry, "distinct", [path.stored], cleaned)
    with translated(entry.model.__name__, [cleaned]):
        values = yield Call(entry.collection, "distinct", (path.stored, cleaned), {}, writes=False)
    return adapted_values(owner, path, values)


def adapted_values(owner: ModelEntry[Any], path: Path, values: Iterable[Any]) -> list[Any]:
    adapt = adapter_of(owner.codec, path.shape)
    return [value if value is None or adapt is None else adapt(value) for value in values]


class PipelineReader(PageReader[Any]):
    """Pages of what a pipeline gives: dicts of Python values, or models."""

    def __init__(self, entry: ModelEntry[Any], command: Read, into: Any) -> None:
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


def checked_pipeline(entry: ModelEntry[Any], pipeline: Any) -> list[Raw]:
    """The stages that a caller gave, without those that write or run code."""
    stages = (
        list(pipeline) if isinstance(pipeline, Sequence) and not isinstance(pipeline, str) else [pipeline]
    )
    for stage in stages:
        if not isinstance(stage, Mapping) or len(stage) != 1 or not str(next(iter(stage))).startswith("$"):
            raise UsageError(
                f"a pipeline over {entry.model.__name__} is a list of stages such as "
                f"{{'$match': {{…}}}}; it has {type(stage).__name__}",
                code="pipeline-invalid",
            )
    cleaned: list[Raw] = clean(stages)
    reason = "writes past the patterns and is not accepted in aggregate; store what it gives by insert_many"
    refuse_operators(cleaned, WRITING_STAGES, reason, code="operator-forbidden")
    for number, stage in enumerate(stages):
        # Up to here the documents are as they are stored.
        if "$match" not in stage or not isinstance(stage["$match"], Mapping):
            break
        if not isinstance(stage["$match"], Unchecked):
            cleaned[number] = {"$match": parse_match(entry.paths.fields, stage["$match"])}
    return cleaned


def aggregate(entry: ModelEntry[Any], pipeline: Any, into: Any) -> PipelineReader:
    """What reads the results of a pipeline over the documents of a model."""
    stages = checked_pipeline(entry, pipeline)
    scope = dict(entry.targets.filter())
    if scope:
        first = stages[0] if stages else {}
        if "$match" in first:
            # One condition: a text search must stand in the first stage.
            stages[0] = {"$match": confine(entry.codec, first["$match"])}
        elif "$geoNear" in first:
            near = first["$geoNear"]
            stages[0] = {"$geoNear": {**near, "query": confine(entry.codec, near.get("query", {}))}}
        else:
            stages.insert(0, {"$match": scope})
    return PipelineReader(entry, Read(entry.collection, "aggregate", (stages,), {"allowDiskUse": True}), into)
