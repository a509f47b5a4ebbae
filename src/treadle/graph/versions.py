"""The versions of a collection's documents, and how a stored document becomes a current one.

A `VersionChain` is the chain of migrations of one collection, and the
formulas of its models, which end every upgrade. Nothing is stored here: the
upgraded documents are values. Storing them is `engine/version_upgrade.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import bson

from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS, RESERVED, not_storable, to_bson
from treadle.model.document import Document
from treadle.plan import Plan, Raw, aggregate, outside
from treadle.plan.server_errors import is_about_one_document, message_of
from treadle.query.comparison import identical
from treadle.query.expressions import filter_references
from treadle.query.paths import top

Function: TypeAlias = Callable[[Raw], Raw]
Pipeline: TypeAlias = list[Raw]
Way: TypeAlias = Function | Pipeline
WriteVersions: TypeAlias = Mapping[type[Document], int] | None
# What becomes of a document for which a pipeline fails.
Failure: TypeAlias = Callable[[Raw, str], Raw | DataError]

# Where a model keeps the migrations that were declared for it.
MIGRATIONS = "__treadle_migrations__"
# Documents that the server upgrades in one command, and their size: a command holds 16 MB.
CONVERT_DOCUMENTS_MAX = 500
CONVERT_BYTES_MAX = 6 * 1024 * 1024
# The stages of a pipeline that replace the document as a whole, or name the fields that stay.
_WHOLE_STAGES = frozenset({"$replaceRoot", "$replaceWith", "$project"})


class Step(Protocol):
    """One declared migration, from a version to the next and perhaps back."""

    up: Way
    back: Way | None
    # The top-level stored names that its functions read and write; None where that was not declared.
    fields: frozenset[str] | None

    @property
    def label(self) -> str:
        """The migration's name in messages."""


def declared_steps(model: type) -> dict[int, Step]:
    """The migrations of a model by their first version; its own come before those of classes above it."""
    steps: dict[int, Step] = {}
    for base in model.__mro__:
        for version, step in (base.__dict__.get(MIGRATIONS) or {}).items():
            steps.setdefault(version, step)
    return steps


class Divided(NamedTuple):
    """A condition that names fields which an upgrade changes, in two parts that must both hold."""

    # Evaluated on documents as they are stored, whatever their version.
    stored: Raw
    # Evaluated on current documents, so on outdated ones after the upgrade.
    upgraded: Raw


@dataclass(slots=True)
class Upgraded:
    """For each given document, in order, the upgraded one or why there is none."""

    outcomes: list[Raw | DataError]
    given: Sequence[Raw]

    @property
    def documents(self) -> list[Raw]:
        return [each for each in self.outcomes if not isinstance(each, DataError)]

    @property
    def pairs(self) -> tuple[list[Raw], list[Raw]]:
        """The given documents that could be upgraded, and what became of them."""
        both = zip(self.given, self.outcomes, strict=True)
        pairs = [(raw, each) for raw, each in both if not isinstance(each, DataError)]
        return [raw for raw, _ in pairs], [each for _, each in pairs]

    @property
    def failed(self) -> list[tuple[Any, DataError]]:
        """The ids of the documents that could not be upgraded, with the reasons."""
        pairs = zip(self.given, self.outcomes, strict=True)
        return [(raw.get("_id"), each) for raw, each in pairs if isinstance(each, DataError)]

    def required(self) -> list[Raw]:
        """All documents; raises the first reason for which there is none."""
        for _, error in self.failed:
            raise error
        return self.documents


class VersionChain:
    """How the stored documents of one collection become current ones: migrations, then formulas."""

    def __init__(self, model: type[Document], written: int | None = None) -> None:
        settings = model.__treadle__
        self.model = model
        self.collection: str = settings.collection or ""
        self.field = settings.version_field
        # Whether the model declares versions; without, every document is current.
        self.is_versioned = settings.version is not None
        self.current: int = settings.version or 1
        # What this Store writes; lower than the current version during a rolling deploy.
        self.written: int = self.current if written is None else written
        self.stores_back = settings.migrate_on_read == "store"
        self.steps = declared_steps(model)
        # The stages that evaluate the formulas of all kinds; the graph sets them once all rules are bound.
        self.formulas: Sequence[Raw] = ()
        # The top-level fields of all kinds in the current version; set with the formulas.
        self.current_fields: frozenset[str] = frozenset()
        self._check()
        # Versions ahead that can be read, because the way down from them is known.
        self.newest = self.current
        while self.newest in self.steps and self.steps[self.newest].back is not None:
            self.newest += 1
        # Whether a stored document may have another version that this Store can read.
        self.may_change = self.is_versioned and self.newest > 1
        # Whether this Store stores an older version than the current one.
        self.writes_older = self.written < self.current

    def _check(self) -> None:
        name = self.model.__name__
        if not self.is_versioned and self.steps:
            raise DeclarationError(
                f"{name} has migrations but no version=; give it one", code="version-invalid"
            )
        missing = [version for version in range(1, self.current) if version not in self.steps]
        if missing:
            listed = ", ".join(f"{version} to {version + 1}" for version in missing)
            raise DeclarationError(
                f"{name} is of version {self.current}, but no migration leads from {listed}; declare it with "
                f"@migration({name}, from_version={missing[0]})",
                code="migration-missing",
            )
        self._check_written()

    def _check_written(self) -> None:
        name = self.model.__name__
        if isinstance(self.written, bool) or not isinstance(self.written, int) or self.written < 1:
            raise DeclarationError(
                f"write_versions has {self.written!r} for {name}; versions are whole numbers from 1",
                code="version-invalid",
            )
        if self.written > self.current:
            raise DeclarationError(
                f"write_versions has {self.written} for {name}, which only describes version {self.current}",
                code="version-invalid",
            )
        for version in range(self.written, self.current):
            if not callable(self.steps[version].back):
                raise DeclarationError(
                    f"write_versions has {self.written} for {name}, but {self.steps[version].label} has no "
                    "way down that is a Python function; declare one with .down",
                    code="migration-no-way-down",
                )

    # -- which version a document has ---------------------------------------------------------------

    @property
    def highest(self) -> int:
        """The highest version to which a migration leads."""
        return max([self.current, *(version + 1 for version in self.steps)])

    @property
    def current_only(self) -> Raw:
        """The condition that a document is current; one without a version has version 1."""
        return {self.field: {"$eq": self.current} if self.current > 1 else {"$in": [1, None]}}

    @property
    def outdated_only(self) -> Raw:
        """The condition that a document has another version."""
        return {self.field: {"$ne": self.current} if self.current > 1 else {"$nin": [1, None]}}

    def is_outdated(self, raw: Raw) -> bool:
        """Whether a stored document has another version than the current one."""
        if not self.is_versioned:
            return False
        version = raw.get(self.field)
        return version != self.current and (version is not None or self.current > 1)

    def version_of(self, raw: Raw) -> int:
        """The version of a stored document; raises `DataError` if it is not a whole number from 1."""
        version = raw.get(self.field)
        if version is None:
            return 1
        if isinstance(version, float) and version.is_integer():
            version = int(version)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise DataError(
                f"the {self.model.__name__} with _id {raw.get('_id')!r} has {self.field}={version!r}, which "
                "is no version; versions are whole numbers from 1",
                code="version-unknown",
            )
        return version

    # -- the ways between versions -----------------------------------------------------------------

    @cached_property
    def needs_server(self) -> bool:
        """Whether a reader may need the server to upgrade a document, or stores what it read."""
        ways = [*self._ways_in()]
        computes = bool(ways and self.formulas)
        return self.is_versioned and (self.stores_back or computes or any(not callable(way) for way in ways))

    def _ways_in(self) -> Iterator[Any]:
        yield from (self.steps[version].up for version in range(1, self.current))
        yield from (self.steps[version].back for version in range(self.current, self.newest))

    def ways(self, start: int, end: int) -> list[tuple[Way, int]]:
        """The ways from one version to another, each with the version that it leads to."""
        if start <= end:
            return [(self.steps[version].up, version + 1) for version in range(start, end)]
        ways: list[tuple[Way, int]] = []
        for version in range(start - 1, end - 1, -1):
            back = self.steps[version].back if version in self.steps else None
            if back is None:
                raise UsageError(
                    f"{self.model.__name__} has no way down from version {version + 1} to {version}; declare "
                    f"it with .down on the migration from version {version}",
                    code="migration-no-way-down",
                )
            ways.append((back, version))
        return ways

    def _require_known(self, raw: Raw, end: int) -> int:
        """The version of a document that can be converted to `end`."""
        start = self.version_of(raw)
        if start > self.newest and start > end:
            raise DataError(
                f"the {self.model.__name__} with _id {raw.get('_id')!r} is of version {start}, but this "
                f"Store knows versions up to {self.newest}; a newer release wrote it: update this one first, "
                "or keep the newer one writing the old version with write_versions=",
                code="version-unknown",
            )
        return start

    # -- conversions ----------------------------------------------------------------------------------

    def upgrade(self, raws: Sequence[Raw]) -> Plan[Upgraded]:
        """Stored documents as current ones, formulas evaluated; a current one is returned as it is."""
        if not any(map(self.is_outdated, raws)):
            return Upgraded(list(raws), raws)
        upgraded = yield from self.convert(raws, self.current)
        if self.formulas:
            pairs = zip(raws, upgraded.outcomes, strict=True)
            changed = [at for at, (raw, each) in enumerate(pairs) if each is not raw]
            # A formula that the server cannot compute leaves the document without a new value.
            yield from self._on_server(upgraded.outcomes, changed, self.formulas, lambda raw, _: raw)
        return upgraded

    def lower(self, documents: Sequence[Raw], to: int) -> Plan[list[Raw]]:
        """Current documents as an older version has them."""
        return (yield from self.convert(documents, to)).required()

    def convert(self, raws: Sequence[Raw], to: int) -> Plan[Upgraded]:
        """Documents of any versions as one version has them, formulas as they were."""
        outcomes: list[Raw | DataError] = list(raws)
        by_version: dict[int, list[int]] = {}
        for position, raw in enumerate(raws):
            try:
                version = self._require_known(raw, to)
            except DataError as error:
                outcomes[position] = error
                continue
            if version != to:
                by_version.setdefault(version, []).append(position)
        for version, positions in by_version.items():
            for way, reached in self.ways(version, to):
                yield from self._take(outcomes, positions, way, version, reached)
                version = reached
        return Upgraded(outcomes, raws)

    def _take(
        self, outcomes: list[Raw | DataError], positions: Sequence[int], way: Way, start: int, reached: int
    ) -> Plan[None]:
        """Take one way with the documents at some positions; one that failed before is left out."""
        if callable(way):
            for position in positions:
                raw = outcomes[position]
                if not isinstance(raw, DataError):
                    outcomes[position] = self._applied(way, raw, start, reached)
            return

        def fail(raw: Raw, reason: str) -> DataError:
            return self.failure(raw.get("_id"), reached, reason)

        stages = [*way, {"$set": {self.field: {"$literal": reached}}}]
        yield from self._on_server(outcomes, positions, stages, fail)

    def _applied(self, way: Function, raw: Raw, start: int, reached: int) -> Raw | DataError:
        """Return what a function makes of one document, or why it makes nothing."""
        try:
            # A copy: functions change the document in place, and the one that was read is still needed.
            after = way(copied(raw))
        except DataError as error:
            return error
        except TreadleError as error:
            return self.failure(raw.get("_id"), reached, error.message)
        except Exception as error:
            # The function is the caller's: whatever it raises is about this document.
            return self.failure(raw.get("_id"), reached, f"{type(error).__name__}: {error}")
        if reason := self._refusal(raw, after, start, reached):
            return self.failure(raw.get("_id"), reached, reason)
        if RESERVED in raw:
            # Treadle's own state of a document stays, whatever a function makes of the rest.
            after[RESERVED] = raw[RESERVED]
        after[self.field] = reached
        try:
            return encodable(after, self.model)
        except UsageError as error:
            return self.failure(raw.get("_id"), reached, error.message)

    def _refusal(self, raw: Raw, after: Any, start: int, reached: int) -> str | None:
        """Return why the result of a function cannot be the document."""
        if not isinstance(after, dict):
            return f"the function returned {type(after).__name__}, not the document"
        if not identical(after.get("_id"), raw.get("_id")):
            return "the function changed the _id"
        fields = self.steps[min(start, reached)].fields
        if fields is None:
            return None
        missing = object()
        for name in {*raw, *after} - fields - {self.field, RESERVED}:
            if not identical(raw.get(name, missing), after.get(name, missing)):
                return f"the function changed {name!r}, which fields= does not name"
        return None

    def upgrade_in_python(self, raw: Raw) -> Raw:
        """A document in the current version; raises `DataError` where a pipeline is on the way."""
        plan = self.convert([raw], self.current)
        try:
            next(plan)
        except StopIteration as done:
            upgraded: Upgraded = done.value
            return upgraded.required()[0]
        plan.close()
        raise DataError(
            f"the {self.model.__name__} with _id {raw.get('_id')!r} is of an older version, and a "
            "pipeline leads on from there, which only the server runs; read it through the Store",
            code="migration-pipeline",
        )

    def failure(self, identity: Any, version: int, reason: str) -> DataError:
        return DataError(
            f"the {self.model.__name__} with _id {identity!r} could not be brought to version {version}: "
            f"{reason}; repair the document or the migration",
            code="migration-failed",
        )

    # -- pipelines --------------------------------------------------------------------------------------

    def _on_server(
        self,
        outcomes: list[Raw | DataError],
        positions: Sequence[int],
        stages: Sequence[Raw],
        fail: Failure,
    ) -> Plan[None]:
        """Replace the documents at some positions by what stages make of them."""
        ready = [at for at in positions if not isinstance(outcomes[at], DataError)]
        for some in command_chunks([outcomes[at] for at in ready]):
            mine, ready = ready[: len(some)], ready[len(some) :]
            # Not in the caller's transaction: the failure of one document would end it.
            done = yield from outside(lambda some=some: self._evaluate(some, stages, fail))  # type: ignore[misc]
            for at, outcome in zip(mine, done, strict=True):
                outcomes[at] = outcome

    def _evaluate(
        self, raws: Sequence[Raw], stages: Sequence[Raw], fail: Failure
    ) -> Plan[list[Raw | DataError]]:
        """What stages make of documents; halves them until one that fails is alone."""
        try:
            rows = yield from aggregate(self.collection, [*given(raws), *stages])
        except Exception as error:
            if not is_about_one_document(error):
                raise
            if len(raws) == 1:
                return [fail(raws[0], message_of(error)[:300])]
            rows = []
        if len(rows) == len(raws):
            pairs = zip(raws, rows, strict=True)
            same_ids = [identical(raw.get("_id"), row.get("_id")) for raw, row in pairs]
            return [
                row if same else fail(raw, "the pipeline changed the _id")
                for raw, row, same in zip(raws, rows, same_ids, strict=True)
            ]
        if len(raws) == 1:
            return [fail(raws[0], "the pipeline dropped it")]
        middle = len(raws) // 2
        first = yield from self._evaluate(raws[:middle], stages, fail)
        return [*first, *(yield from self._evaluate(raws[middle:], stages, fail))]

    # -- conditions that hold before the upgrade ------------------------------------------------------

    @cached_property
    def changed_fields(self) -> frozenset[str] | None:
        """The top-level fields that an upgrade may change; None for all but the id.

        Those of a Python function without `fields=` are not known.
        """
        return None if self.steps_of_unknown_fields else self.named_fields

    @property
    def steps_of_unknown_fields(self) -> list[Step]:
        """The steps by Python functions that do not name their fields."""
        steps = [step for step in self._steps_in() if step.fields is None]
        return [step for step in steps if callable(step.up) or callable(step.back)]

    @cached_property
    def named_fields(self) -> frozenset[str] | None:
        """The top-level fields that an upgrade is known to change: by `fields=`, a pipeline, or a formula.

        None where a pipeline replaces the document as a whole.
        """
        changed = {self.field}
        for step in self._steps_in():
            changed |= step.fields or set()
            for way in (step.up, step.back):
                written = set() if callable(way) or way is None else written_fields(way)
                if written is None:
                    return None
                changed |= written
        formulas = written_fields(self.formulas) or set()
        return frozenset(changed | formulas)

    def _steps_in(self) -> list[Step]:
        """The steps by which stored documents become current ones."""
        return [self.steps[version] for version in range(1, self.newest)]

    def may_change_any(self, paths: Iterable[str] | None) -> bool:
        """Whether an upgrade may change a field among these paths, None for any."""
        if paths is None:
            return True
        names, changed = {*map(top, paths)} - {"_id"}, self.changed_fields
        return bool(names if changed is None else names & changed)

    def divide_strictly(self, own: Raw) -> Divided | None:
        """A rule's condition in two parts; None where it means the same in every version.

        Whatever is not known to stay counts as changed.
        """
        return self._divided(own, self._may_mean_another)

    def _may_mean_another(self, part: Raw) -> bool:
        return self.may_change_any(filter_references(part))

    def _divided(self, own: Raw, changes: Callable[[Raw], bool]) -> Divided | None:
        if not self.may_change:
            return None
        stored: list[Raw] = []
        upgraded: list[Raw] = []
        for part in _conjuncts(own):
            (upgraded if changes(part) else stored).append(part)
        return Divided(_merged(stored), _merged(upgraded)) if upgraded else None

    # -- filters of callers ---------------------------------------------------------------------------

    def divide(self, own: Raw) -> Divided | None:
        """A caller's filter in two parts; None where outdated documents meet it as they are stored.

        Only fields that an upgrade is known to change count as changed. A name
        of an older version alone is looked for as it is stored.
        """
        return self._divided(own, self._is_known_to_change)

    def _is_known_to_change(self, part: Raw) -> bool:
        paths = filter_references(part)
        # Other operators of the whole document, such as $text, only the collection itself can evaluate.
        return "$expr" in part if paths is None else self.changes_any(paths)

    def changes_any(self, paths: Iterable[str]) -> bool:
        """Whether an upgrade is known to change a field among these paths."""
        if not self.may_change:
            return False
        names = {top(path) for path in paths} & self.current_fields
        return bool(names if self.named_fields is None else names & self.named_fields)

    def candidates(self, divided: Divided) -> Raw:
        """The condition of the current documents that match, and of outdated ones that may."""
        current = _merged([self.current_only, divided.upgraded])
        return _merged([divided.stored, {"$or": [current, self.outdated_only]}])

    def matching_current(self, divided: Divided) -> Raw:
        """The condition of the current documents that match."""
        return _merged([self.current_only, divided.stored, divided.upgraded])


def _conjuncts(own: Raw) -> Iterator[Raw]:
    """The conditions that must all hold, each by itself."""
    for name, condition in own.items():
        if name == "$and":
            for each in condition:
                yield from _conjuncts(each)
        else:
            yield {name: condition}


def _merged(parts: Sequence[Raw]) -> Raw:
    """Conditions as one: beside each other, unless a name is in several."""
    merged = {name: condition for part in parts for name, condition in part.items()}
    return merged if len(merged) == sum(map(len, parts)) else {"$and": [part for part in parts if part]}


def written_fields(stages: Sequence[Raw]) -> set[str] | None:
    """The top-level fields that update stages write; None where that may be any."""
    written: set[str] = set()
    for stage in stages:
        ((name, body),) = stage.items()
        if name in _WHOLE_STAGES:
            return None
        written |= {top(path) for path in ([body] if isinstance(body, str) else body)}
    return written


def given(raws: Sequence[Any]) -> list[Raw]:
    """The stages that make an aggregation over any collection begin with documents at hand."""
    return [
        # One document to begin with, even where the collection is empty.
        {"$limit": 1},
        {"$facet": {"none": [{"$limit": 1}]}},
        {"$project": {"given": {"$literal": list(raws)}}},
        {"$unwind": "$given"},
        {"$replaceWith": "$given"},
    ]


def command_chunks(raws: Sequence[Any]) -> Iterator[list[Any]]:
    """Documents in pieces that one command holds."""
    chunk: list[Any] = []
    size = 0
    for raw in raws:
        size += len(bson.encode(raw, codec_options=CODEC_OPTIONS))
        if chunk and (size > CONVERT_BYTES_MAX or len(chunk) == CONVERT_DOCUMENTS_MAX):
            yield chunk
            chunk, size = [], len(bson.encode(raw, codec_options=CODEC_OPTIONS))
        chunk.append(raw)
    if chunk:
        yield chunk


def copied(value: Any) -> Any:
    """A copy of a stored value; only documents and arrays can be changed in place."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if kind is list else value


def encodable(raw: Any, model: type) -> Raw:
    """A document in BSON's own types, where `Decimal`, dates and sets are stored as those of models are.

    Raises `UsageError` where a value has no form in BSON.
    """
    try:
        bson.encode(raw, codec_options=CODEC_OPTIONS)
    except ENCODING_ERRORS:
        raw = to_bson(raw, [])
        try:
            bson.encode(raw, codec_options=CODEC_OPTIONS)
        except ENCODING_ERRORS as error:
            raise not_storable(error, model.__name__, [raw]) from error
    stored: Raw = raw
    return stored
