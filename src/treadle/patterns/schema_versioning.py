"""Schema versioning: each document says of which version it is, and readers understand all of them.

`@migration(User, from_version=1)` declares the step from 1 to 2, as a Python
function or as a pipeline, with a way down where there is one. A document
without a version is of the first.

An upgraded document is stored in the transaction in which it was read. So
writers that do not know of versions lose no write, and need not be stopped.

The chain of a collection's steps is in `graph/versions.py`, outdated
documents that a call meets in `engine/version_upgrade.py`, whole collections
in `upkeep/migrate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

from treadle.errors import DeclarationError, UsageError
from treadle.graph.versions import MIGRATIONS, Function, Pipeline, Way
from treadle.model.bson_types import clean
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.paths import top
from treadle.query.updates import UPDATE_STAGES, is_update_stage


class Migration:
    """One step between two versions of a model; `down` declares the way back."""

    def __init__(
        self,
        model: type[Document],
        from_version: int,
        up: Way,
        down: Way | None,
        fields: frozenset[str] | None = None,
    ) -> None:
        self.model = model
        self.from_version = from_version
        self.up = up
        self.back = down
        self.fields = fields

    def __call__(self, document: Raw) -> Raw:
        if not callable(self.up):
            raise UsageError(f"{self.label} is a pipeline, which the server runs", code="migration-pipeline")
        return self.up(document)

    def down(self, function: Function) -> Function:
        """Declare the way back: `@split_phone.down`."""
        if self.back is not None:
            raise DeclarationError(f"{self.label} has two ways down; keep one", code="migration-twice")
        self.back = _way(self.label, function)
        return function

    @property
    def label(self) -> str:
        return f"the migration of {self.model.__name__} from version {self.from_version}"


@overload
def migration(
    model: type[Document],
    from_version: int,
    *,
    up: None = None,
    down: Way | None = None,
    fields: Sequence[str] | None = None,
) -> Callable[[Function], Migration]: ...
@overload
def migration(
    model: type[Document],
    from_version: int,
    *,
    up: Way,
    down: Way | None = None,
    fields: Sequence[str] | None = None,
) -> Migration: ...
def migration(
    model: type[Document], from_version: int, *, up: Any = None, down: Any = None, fields: Any = None
) -> Any:
    """Declare how documents get from one version to the next; a decorator unless `up` is given.

    A function takes a stored document and returns it changed. A pipeline is a
    list of MongoDB's update stages. The version itself is set by Treadle.
    `fields` are the stored names that the functions read and write: what
    depends on other fields then need not read outdated documents.
    """
    declare = partial(_register, model, from_version, down, fields)
    return declare if up is None else declare(up)


def _register(model: Any, from_version: Any, down: Any, fields: Any, up: Any) -> Migration:
    if not hasattr(model, "__treadle__") or type(from_version) is not int or from_version < 1:
        name = getattr(model, "__name__", repr(model))
        raise DeclarationError(
            f"{name} cannot have a migration from version {from_version!r}; a migration takes a Document and "
            "a whole number from 1",
            code="version-invalid",
        )
    step = Migration(model, from_version, [], None)
    step.fields = _names(step.label, fields)
    step.up = _way(step.label, up)
    step.back = None if down is None else _way(step.label, down)
    own: dict[int, Migration] = model.__dict__.get(MIGRATIONS) or {}
    if from_version in own:
        raise DeclarationError(f"{step.label} is declared twice; keep one", code="migration-twice")
    type.__setattr__(model, MIGRATIONS, {**own, from_version: step})
    return step


def _names(label: str, fields: Any) -> frozenset[str] | None:
    """The top-level names of the fields that a migration reads and writes."""
    if fields is None:
        return None
    if isinstance(fields, str) or not all(isinstance(each, str) and each for each in fields):
        raise DeclarationError(
            f'{label} has fields={fields!r}; it takes stored names, such as fields=("phone", "phones")',
            code="migration-invalid",
        )
    return frozenset(top(each) for each in fields)


def _way(label: str, way: Any) -> Way:
    if callable(way):
        return way  # type: ignore[no-any-return]
    stages = list(way) if isinstance(way, Sequence) and not isinstance(way, (str, bytes)) else []
    if not stages or not all(map(is_update_stage, stages)):
        raise DeclarationError(
            f"{label} is neither a function nor a pipeline of {', '.join(sorted(UPDATE_STAGES))}",
            code="migration-invalid",
        )
    cleaned: Pipeline = clean(stages)
    return cleaned
