"""Treadle keeps MongoDB's schema design patterns true."""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.errors import (
        BulkFailed,
        Conflict,
        DataError,
        DeclarationError,
        Failure,
        NotFound,
        PartlyDone,
        TreadleError,
        UsageError,
    )
    from treadle.graph.lifecycle import CreatedAt, UpdatedAt
    from treadle.graph.limits import Limits
    from treadle.graph.operations import (
        Bulk,
        Delete,
        DeleteMany,
        Insert,
        Replace,
        Update,
        UpdateMany,
        Upsert,
        Upserted,
    )
    from treadle.graph.outcomes import (
        Action,
        FieldSummary,
        Finding,
        Nested,
        Page,
        Progress,
        State,
        Summary,
    )
    from treadle.model.bson_types import Id
    from treadle.model.document import Document
    from treadle.model.indexed import Indexed
    from treadle.model.pairs import Measured
    from treadle.patterns.approximation.rule import Approximate
    from treadle.patterns.archive.rule import Archive
    from treadle.patterns.attributes import Attributes
    from treadle.patterns.bucket.rule import Bucket
    from treadle.patterns.bucket.time_series import TimeSeries
    from treadle.patterns.computed import Average, Collect, Count, Formula, Max, Min, Sum
    from treadle.patterns.extended_reference import ExtendedReference
    from treadle.patterns.history.rule import History
    from treadle.patterns.links import Links
    from treadle.patterns.outlier.rule import Outlier
    from treadle.patterns.rollup import Day, Hour, Minute, Month, Quarter, Rollup, Total, Week, Year
    from treadle.patterns.schema_versioning import Migration, migration
    from treadle.patterns.subset import Subset
    from treadle.patterns.tree.ancestor_array import AncestorArray
    from treadle.patterns.tree.child_references import ChildReferences
    from treadle.patterns.tree.materialized_path import MaterializedPath
    from treadle.patterns.tree.parent_reference import ParentReference
    from treadle.plan.server_errors import DuplicateKey
    from treadle.query.field_paths import Unchecked
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking.store import Store
    from treadle.store.deadline import TimedOut
    from treadle.upkeep.aside import SetAsideDocument
    from treadle.upkeep.findings import KeptFinding
    from treadle.upkeep.jobs import JobStatus
    from treadle.upkeep.migrations.run import Migrated, Sample, SetAside
    from treadle.upkeep.schedule import Ran

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AncestorArray",
    "Approximate",
    "Archive",
    "AsyncStore",
    "Attributes",
    "Average",
    "Bucket",
    "Bulk",
    "BulkFailed",
    "ChildReferences",
    "Collect",
    "Conflict",
    "Count",
    "CreatedAt",
    "DataError",
    "Day",
    "DeclarationError",
    "Delete",
    "DeleteMany",
    "Document",
    "DuplicateKey",
    "ExtendedReference",
    "Failure",
    "FieldSummary",
    "Finding",
    "Formula",
    "History",
    "Hour",
    "Id",
    "Indexed",
    "Insert",
    "JobStatus",
    "KeptFinding",
    "Limits",
    "Links",
    "MaterializedPath",
    "Max",
    "Measured",
    "Migrated",
    "Migration",
    "Min",
    "Minute",
    "Month",
    "Nested",
    "NotFound",
    "NotSetUp",
    "Outlier",
    "Page",
    "ParentReference",
    "PartlyDone",
    "Progress",
    "Quarter",
    "Ran",
    "Replace",
    "Rollup",
    "Sample",
    "SetAside",
    "SetAsideDocument",
    "State",
    "Store",
    "Subset",
    "Sum",
    "Summary",
    "TimeSeries",
    "TimedOut",
    "Total",
    "TreadleError",
    "Unchecked",
    "Update",
    "UpdateMany",
    "UpdatedAt",
    "Upsert",
    "Upserted",
    "UsageError",
    "Week",
    "Year",
    "migration",
]

# Imported when first asked for: `treadle --help` would otherwise wait for the
# driver and for Pydantic, which take longer to import than all the rest.
_HOMES = {
    "Action": "graph.outcomes",
    "AncestorArray": "patterns.tree.ancestor_array",
    "Approximate": "patterns.approximation.rule",
    "Archive": "patterns.archive.rule",
    "AsyncStore": "store.async_store",
    "Attributes": "patterns.attributes",
    "Average": "patterns.computed",
    "Bucket": "patterns.bucket.rule",
    "Bulk": "graph.operations",
    "BulkFailed": "errors",
    "ChildReferences": "patterns.tree.child_references",
    "Collect": "patterns.computed",
    "Conflict": "errors",
    "Count": "patterns.computed",
    "CreatedAt": "graph.lifecycle",
    "DataError": "errors",
    "Day": "patterns.rollup",
    "DeclarationError": "errors",
    "Delete": "graph.operations",
    "DeleteMany": "graph.operations",
    "Document": "model.document",
    "DuplicateKey": "plan.server_errors",
    "ExtendedReference": "patterns.extended_reference",
    "Failure": "errors",
    "FieldSummary": "graph.outcomes",
    "Finding": "graph.outcomes",
    "Formula": "patterns.computed",
    "History": "patterns.history.rule",
    "Hour": "patterns.rollup",
    "Id": "model.bson_types",
    "Indexed": "model.indexed",
    "Insert": "graph.operations",
    "JobStatus": "upkeep.jobs",
    "KeptFinding": "upkeep.findings",
    "Limits": "graph.limits",
    "Links": "patterns.links",
    "MaterializedPath": "patterns.tree.materialized_path",
    "Max": "patterns.computed",
    "Measured": "model.pairs",
    "Migrated": "upkeep.migrations.run",
    "Migration": "patterns.schema_versioning",
    "Min": "patterns.computed",
    "Minute": "patterns.rollup",
    "Month": "patterns.rollup",
    "NotFound": "errors",
    "NotSetUp": "errors",
    "Outlier": "patterns.outlier.rule",
    "Nested": "graph.outcomes",
    "Page": "graph.outcomes",
    "ParentReference": "patterns.tree.parent_reference",
    "PartlyDone": "errors",
    "Progress": "graph.outcomes",
    "Quarter": "patterns.rollup",
    "Ran": "upkeep.schedule",
    "Replace": "graph.operations",
    "Rollup": "patterns.rollup",
    "Sample": "upkeep.migrations.run",
    "SetAside": "upkeep.migrations.run",
    "SetAsideDocument": "upkeep.aside",
    "State": "graph.outcomes",
    "Store": "store.blocking.store",
    "Subset": "patterns.subset",
    "Sum": "patterns.computed",
    "Summary": "graph.outcomes",
    "TimeSeries": "patterns.bucket.time_series",
    "TimedOut": "store.deadline",
    "Total": "patterns.rollup",
    "TreadleError": "errors",
    "Unchecked": "query.field_paths",
    "Update": "graph.operations",
    "UpdateMany": "graph.operations",
    "UpdatedAt": "graph.lifecycle",
    "Upsert": "graph.operations",
    "Upserted": "graph.operations",
    "UsageError": "errors",
    "Week": "patterns.rollup",
    "Year": "patterns.rollup",
    "migration": "patterns.schema_versioning",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_imported(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _imported(module: str) -> Any:
    """A module; without collections meanwhile, which would go through all that was made and find nothing."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
