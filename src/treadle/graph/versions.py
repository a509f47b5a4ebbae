"""The versions of a document's shape, as one Store sees them.

A `Lineage` is the chain of migrations of one class. What is here needs no
server: a step that is a pipeline is done by `engine/convert.py`, for
documents that are at hand, or by `upkeep/migrations/ranges.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
from treadle.graph.watched import Watched
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import Raw

Function: TypeAlias = Callable[[Raw], Raw]
Pipeline: TypeAlias = list[Raw]
Way: TypeAlias = Function | Pipeline
WriteVersions: TypeAlias = Mapping[type[Document], int] | None


# Where a model keeps the migrations that were declared for it.
MIGRATIONS = "__treadle_migrations__"


class Step(Protocol):
    """One declared migration, from a version to the next and perhaps back."""

    up: Way
    back: Way | None

    @property
    def label(self) -> str:
        """How messages name it."""


def declared(model: type) -> dict[int, Step]:
    """The migrations of a model by their first version; a kind's own come before its base's."""
    steps: dict[int, Step] = {}
    for base in model.__mro__:
        for version, step in (base.__dict__.get(MIGRATIONS) or {}).items():
            steps.setdefault(version, step)
    return steps


class Lineage:
    """The versions of one class in one Store."""

    def __init__(self, model: type[Document], written: int | None = None) -> None:
        settings = model.__treadle__
        assert settings.version is not None
        self.model = model
        self.field = settings.version_field
        self.current: int = settings.version
        # What this Store writes; lower than the current one during a rolling deploy.
        self.written: int = settings.version if written is None else written
        self.stores_back = settings.migrate_on_read == "store"
        self.steps = declared(model)
        self._check_chain()
        # Versions ahead that can be read, because the way down from them is known.
        self.newest = self.current
        while self.newest in self.steps and self.steps[self.newest].back is not None:
            self.newest += 1

    def _check_chain(self) -> None:
        name = self.model.__name__
        missing = [version for version in range(1, self.current) if version not in self.steps]
        if missing:
            listed = ", ".join(f"{version} to {version + 1}" for version in missing)
            raise DeclarationError(
                f"{name} is of version {self.current}, but no migration leads from {listed}; declare it with "
                f"@migration({name}, from_version={missing[0]})",
                code="migration-missing",
            )
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

    @property
    def alike(self) -> Raw:
        """What the version field of a current document meets; without one it is of the first version."""
        return {"$eq": self.current} if self.current > 1 else {"$in": [1, None]}

    @property
    def unlike(self) -> Raw:
        """What the version field of any other document meets."""
        return {"$ne": self.current} if self.current > 1 else {"$nin": [1, None]}

    @property
    def highest(self) -> int:
        """The highest version to which a migration leads."""
        return max([self.current, *(version + 1 for version in self.steps)])

    def is_stale(self, raw: Raw) -> bool:
        """Whether a stored document is of another version than the current one."""
        version = raw.get(self.field)
        return version != self.current and (version is not None or self.current > 1)

    @property
    def older(self) -> Raw:
        """The condition that a document is of a version before the current one."""
        return {self.field: {"$not": {"$gte": self.current}}}

    @property
    def needs_server(self) -> bool:
        """Whether bringing a document up to date may take more than Python."""
        return self.stores_back or any(not callable(way) for way in self._ways_in())

    def _ways_in(self) -> Iterator[Any]:
        yield from (self.steps[version].up for version in range(1, self.current))
        yield from (self.steps[version].back for version in range(self.current, self.newest))

    def version_of(self, raw: Raw) -> int:
        """The version of a stored document; without the field it is 1."""
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

    def has_before(self, raw: Raw) -> bool:
        """Whether a document is of another version, so that migrating it may help."""
        try:
            return self.version_of(raw) != self.current
        except DataError:
            return False

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

    def ways_from(self, raw: Raw, end: int) -> list[tuple[Way, int]]:
        """The ways of one stored document; a version from the future is an error of its own."""
        start = self.version_of(raw)
        if start > self.newest and start > end:
            raise DataError(
                f"the {self.model.__name__} with _id {raw.get('_id')!r} is of version {start}, but this "
                f"Store knows versions up to {self.newest}; a newer release wrote it: update this one first, "
                "or keep the newer one writing the old version with write_versions=",
                code="version-unknown",
            )
        return self.ways(start, end)

    def upgrade(self, raw: Raw) -> Raw:
        """A stored document as the current version has it, in memory."""
        return self.convert(raw, self.current)

    def lower(self, raw: Raw) -> Raw:
        """A document of the current version as this Store writes it."""
        return self.convert(raw, self.written)

    def convert(self, raw: Raw, end: int) -> Raw:
        """A document as another version has it, by Python functions only."""
        for way, version in self.ways_from(raw, end):
            if not callable(way):
                raise DataError(
                    f"the {self.model.__name__} with _id {raw.get('_id')!r} is of an older version, and a "
                    "pipeline leads on from there, which only the server runs; read it through the Store",
                    code="migration-pipeline",
                )
            raw = self.apply(way, raw, version)
        return raw

    def apply(self, way: Function, raw: Raw, version: int) -> Raw:
        """One step of one document; whatever goes wrong in it is told with the document's id."""
        # Past a `Watched` document's own methods: this is not the function's reading.
        identity, state = dict.get(raw, "_id"), dict.get(raw, RESERVED)
        try:
            after = way(raw)
        except TreadleError:
            raise
        except Exception as error:
            raise failed(self.model, identity, version, f"{type(error).__name__}: {error}") from error
        if not isinstance(after, dict):
            reason = f"the function returned {type(after).__name__}, not the document"
            raise failed(self.model, identity, version, reason)
        returned = dict.get(after, "_id")
        # NaN is not equal to itself.
        if returned is not identity and returned != identity:
            raise failed(self.model, identity, version, "the function changed the _id")
        if state is not None:
            # Treadle's own state of a document stays, whatever a function makes of the rest.
            dict.setdefault(after, RESERVED, state)
        dict.__setitem__(after, self.field, version)
        return after

    def change(self, raw: Raw, ways: Sequence[tuple[Way, int]]) -> tuple[Raw, set[str] | None]:
        """A document after these functions, and the fields that they read; None for all."""
        watched = Watched(raw)
        after: Raw = watched
        for way, version in ways:
            assert callable(way)
            after = self.apply(way, after, version)
        if after is watched:
            return watched.plain(), watched.read
        return dict(after), watched.read


def failed(model: type, identity: Any, version: int, reason: str) -> DataError:
    return DataError(
        f"the {model.__name__} with _id {identity!r} could not be brought to version {version}: {reason}; "
        "mend the document or the migration",
        code="migration-failed",
    )
