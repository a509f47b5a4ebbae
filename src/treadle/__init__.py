"""Treadle keeps MongoDB's schema design patterns true."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.async_api import AsyncStore
    from treadle.bson_types import Id
    from treadle.buckets.reading import FieldSummary, Summary
    from treadle.document import Document
    from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
    from treadle.indexes import Indexed
    from treadle.maintenance.finding import Finding
    from treadle.maintenance.lazy import OldDocuments
    from treadle.maintenance.migration import Migrated, Sample, SetAside
    from treadle.maintenance.schedule import Ran
    from treadle.maintenance.verify import Progress
    from treadle.patterns.ancestor_array import AncestorArray
    from treadle.patterns.approximation import Approximate
    from treadle.patterns.bucket import Bucket
    from treadle.patterns.child_references import ChildReferences
    from treadle.patterns.computed import Average, Count, Formula, Max, Min, Sum
    from treadle.patterns.extended_reference import ExtendedReference
    from treadle.patterns.materialized_path import MaterializedPath
    from treadle.patterns.outlier import Outlier
    from treadle.patterns.parent_reference import ParentReference
    from treadle.patterns.rollup import Day, Hour, Month, Rollup, Week
    from treadle.patterns.schema_versioning import Migration, migration
    from treadle.patterns.subset import Subset
    from treadle.patterns.time_series import TimeSeries
    from treadle.set_up import Action
    from treadle.sync_api import Store

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AncestorArray",
    "Approximate",
    "AsyncStore",
    "Average",
    "Bucket",
    "ChildReferences",
    "Count",
    "DataError",
    "Day",
    "DeclarationError",
    "Document",
    "ExtendedReference",
    "FieldSummary",
    "Finding",
    "Formula",
    "Hour",
    "Id",
    "Indexed",
    "MaterializedPath",
    "Max",
    "Migrated",
    "Migration",
    "Min",
    "Month",
    "OldDocuments",
    "Outlier",
    "ParentReference",
    "Progress",
    "Ran",
    "Rollup",
    "Sample",
    "SetAside",
    "Store",
    "Subset",
    "Sum",
    "Summary",
    "TimeSeries",
    "TreadleError",
    "UsageError",
    "Week",
    "migration",
]

# Imported when first asked for: `treadle --help` would otherwise wait for the
# driver and for Pydantic, which take longer to import than all the rest.
_HOMES = {
    "Action": "set_up",
    "AncestorArray": "patterns.ancestor_array",
    "Approximate": "patterns.approximation",
    "AsyncStore": "async_api",
    "Average": "patterns.computed",
    "Bucket": "patterns.bucket",
    "ChildReferences": "patterns.child_references",
    "Count": "patterns.computed",
    "DataError": "errors",
    "Day": "patterns.rollup",
    "DeclarationError": "errors",
    "Document": "document",
    "ExtendedReference": "patterns.extended_reference",
    "FieldSummary": "buckets.reading",
    "Finding": "maintenance.finding",
    "Formula": "patterns.computed",
    "Hour": "patterns.rollup",
    "Id": "bson_types",
    "Indexed": "indexes",
    "MaterializedPath": "patterns.materialized_path",
    "Max": "patterns.computed",
    "Migrated": "maintenance.migration",
    "Migration": "patterns.schema_versioning",
    "Min": "patterns.computed",
    "Month": "patterns.rollup",
    "OldDocuments": "maintenance.lazy",
    "Outlier": "patterns.outlier",
    "ParentReference": "patterns.parent_reference",
    "Progress": "maintenance.verify",
    "Ran": "maintenance.schedule",
    "Rollup": "patterns.rollup",
    "Sample": "maintenance.migration",
    "SetAside": "maintenance.migration",
    "Store": "sync_api",
    "Subset": "patterns.subset",
    "Sum": "patterns.computed",
    "Summary": "buckets.reading",
    "TimeSeries": "patterns.time_series",
    "TreadleError": "errors",
    "UsageError": "errors",
    "Week": "patterns.rollup",
    "migration": "patterns.schema_versioning",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
