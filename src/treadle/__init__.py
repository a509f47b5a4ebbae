"""MongoDB's schema design patterns as declarations on Pydantic models."""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.errors import BulkFailed as BulkFailed
    from treadle.errors import Conflict as Conflict
    from treadle.errors import DataError as DataError
    from treadle.errors import DeclarationError as DeclarationError
    from treadle.errors import Failure as Failure
    from treadle.errors import NotFound as NotFound
    from treadle.errors import NotSetUp as NotSetUp
    from treadle.errors import PartlyDone as PartlyDone
    from treadle.errors import TreadleError as TreadleError
    from treadle.errors import UsageError as UsageError
    from treadle.graph.lifecycle import CreatedAt as CreatedAt
    from treadle.graph.lifecycle import UpdatedAt as UpdatedAt
    from treadle.graph.limits import Limits as Limits
    from treadle.graph.operations import Bulk as Bulk
    from treadle.graph.operations import Delete as Delete
    from treadle.graph.operations import DeleteMany as DeleteMany
    from treadle.graph.operations import Insert as Insert
    from treadle.graph.operations import Replace as Replace
    from treadle.graph.operations import Update as Update
    from treadle.graph.operations import UpdateMany as UpdateMany
    from treadle.graph.operations import Upsert as Upsert
    from treadle.graph.operations import Upserted as Upserted
    from treadle.graph.outcomes import Action as Action
    from treadle.graph.outcomes import FieldSummary as FieldSummary
    from treadle.graph.outcomes import Finding as Finding
    from treadle.graph.outcomes import Nested as Nested
    from treadle.graph.outcomes import Page as Page
    from treadle.graph.outcomes import Progress as Progress
    from treadle.graph.outcomes import State as State
    from treadle.graph.outcomes import Summary as Summary
    from treadle.model.attributes import Measured as Measured
    from treadle.model.bson_types import Id as Id
    from treadle.model.document import Document as Document
    from treadle.model.document import Indexed as Indexed
    from treadle.patterns.approximation.declaration import Approximate as Approximate
    from treadle.patterns.archive.rule import Archive as Archive
    from treadle.patterns.attributes import Attributes as Attributes
    from treadle.patterns.bucket.declaration import Bucket as Bucket
    from treadle.patterns.bucket.declaration import TimeSeries as TimeSeries
    from treadle.patterns.computed import Average as Average
    from treadle.patterns.computed import Collect as Collect
    from treadle.patterns.computed import Count as Count
    from treadle.patterns.computed import Formula as Formula
    from treadle.patterns.computed import Max as Max
    from treadle.patterns.computed import Min as Min
    from treadle.patterns.computed import Sum as Sum
    from treadle.patterns.extended_reference import ExtendedReference as ExtendedReference
    from treadle.patterns.history.rule import History as History
    from treadle.patterns.links import Links as Links
    from treadle.patterns.outlier.declaration import Outlier as Outlier
    from treadle.patterns.rollup import Day as Day
    from treadle.patterns.rollup import Hour as Hour
    from treadle.patterns.rollup import Minute as Minute
    from treadle.patterns.rollup import Month as Month
    from treadle.patterns.rollup import Quarter as Quarter
    from treadle.patterns.rollup import Rollup as Rollup
    from treadle.patterns.rollup import Total as Total
    from treadle.patterns.rollup import Week as Week
    from treadle.patterns.rollup import Year as Year
    from treadle.patterns.schema_versioning import Migration as Migration
    from treadle.patterns.schema_versioning import migration as migration
    from treadle.patterns.subset import Subset as Subset
    from treadle.patterns.tree.declarations import AncestorArray as AncestorArray
    from treadle.patterns.tree.declarations import ChildReferences as ChildReferences
    from treadle.patterns.tree.declarations import MaterializedPath as MaterializedPath
    from treadle.patterns.tree.declarations import ParentReference as ParentReference
    from treadle.plan.server_errors import DuplicateKey as DuplicateKey
    from treadle.query.field_paths import Unchecked as Unchecked
    from treadle.store.async_store import AsyncStore as AsyncStore
    from treadle.store.blocking.store import Store as Store
    from treadle.store.call_context import TimedOut as TimedOut
    from treadle.upkeep.findings import KeptFinding as KeptFinding
    from treadle.upkeep.jobs import JobStatus as JobStatus
    from treadle.upkeep.migrate import Migrated as Migrated
    from treadle.upkeep.migrate import Sample as Sample
    from treadle.upkeep.migrate import SetAside as SetAside
    from treadle.upkeep.quarantine import SetAsideDocument as SetAsideDocument
    from treadle.upkeep.schedule import Ran as Ran

__version__ = "0.1.0"

# Imported when first used: `treadle --help` would otherwise wait for the driver
# and for Pydantic, which take longer to import than all the rest.
_NAMES = {
    "errors": "BulkFailed Conflict DataError DeclarationError Failure NotFound NotSetUp PartlyDone "
    "TreadleError UsageError",
    "graph.lifecycle": "CreatedAt UpdatedAt",
    "graph.limits": "Limits",
    "graph.operations": "Bulk Delete DeleteMany Insert Replace Update UpdateMany Upsert Upserted",
    "graph.outcomes": "Action FieldSummary Finding Nested Page Progress State Summary",
    "model.attributes": "Measured",
    "model.bson_types": "Id",
    "model.document": "Document Indexed",
    "patterns.approximation.declaration": "Approximate",
    "patterns.archive.rule": "Archive",
    "patterns.attributes": "Attributes",
    "patterns.bucket.declaration": "Bucket TimeSeries",
    "patterns.computed": "Average Collect Count Formula Max Min Sum",
    "patterns.extended_reference": "ExtendedReference",
    "patterns.history.rule": "History",
    "patterns.links": "Links",
    "patterns.outlier.declaration": "Outlier",
    "patterns.rollup": "Day Hour Minute Month Quarter Rollup Total Week Year",
    "patterns.schema_versioning": "Migration migration",
    "patterns.subset": "Subset",
    "patterns.tree.declarations": "AncestorArray ChildReferences MaterializedPath ParentReference",
    "plan.server_errors": "DuplicateKey",
    "query.field_paths": "Unchecked",
    "store.async_store": "AsyncStore",
    "store.blocking.store": "Store",
    "store.call_context": "TimedOut",
    "upkeep.quarantine": "SetAsideDocument",
    "upkeep.findings": "KeptFinding",
    "upkeep.jobs": "JobStatus",
    "upkeep.migrate": "Migrated Sample SetAside",
    "upkeep.schedule": "Ran",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)  # noqa: PLE0605 (type checkers read the imports above)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _import(module: str) -> Any:
    """Import a module without garbage collections, which would visit all new objects and free none."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
