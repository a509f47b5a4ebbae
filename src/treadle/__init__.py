"""Treadle keeps MongoDB's schema design patterns true."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.engine.lazy import OldDocuments
    from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
    from treadle.graph.limits import Limits
    from treadle.graph.outcomes import Action, FieldSummary, Finding, Progress, Summary
    from treadle.model.bson_types import Id
    from treadle.model.document import Document
    from treadle.model.indexed import Indexed
    from treadle.patterns.approximation.rule import Approximate
    from treadle.patterns.bucket.rule import Bucket
    from treadle.patterns.bucket.time_series import TimeSeries
    from treadle.patterns.computed import Average, Count, Formula, Max, Min, Sum
    from treadle.patterns.extended_reference import ExtendedReference
    from treadle.patterns.outlier.rule import Outlier
    from treadle.patterns.rollup import Day, Hour, Month, Rollup, Week
    from treadle.patterns.schema_versioning import Migration, migration
    from treadle.patterns.subset import Subset
    from treadle.patterns.tree.ancestor_array import AncestorArray
    from treadle.patterns.tree.child_references import ChildReferences
    from treadle.patterns.tree.materialized_path import MaterializedPath
    from treadle.patterns.tree.parent_reference import ParentReference
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking.store import Store
    from treadle.upkeep.migrations.run import Migrated, Sample, SetAside
    from treadle.upkeep.schedule import Ran

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
    "Limits",
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
    "Action": "graph.outcomes",
    "AncestorArray": "patterns.tree.ancestor_array",
    "Approximate": "patterns.approximation.rule",
    "AsyncStore": "store.async_store",
    "Average": "patterns.computed",
    "Bucket": "patterns.bucket.rule",
    "ChildReferences": "patterns.tree.child_references",
    "Count": "patterns.computed",
    "DataError": "errors",
    "Day": "patterns.rollup",
    "DeclarationError": "errors",
    "Document": "model.document",
    "ExtendedReference": "patterns.extended_reference",
    "FieldSummary": "graph.outcomes",
    "Finding": "graph.outcomes",
    "Formula": "patterns.computed",
    "Hour": "patterns.rollup",
    "Id": "model.bson_types",
    "Indexed": "model.indexed",
    "Limits": "graph.limits",
    "MaterializedPath": "patterns.tree.materialized_path",
    "Max": "patterns.computed",
    "Migrated": "upkeep.migrations.run",
    "Migration": "patterns.schema_versioning",
    "Min": "patterns.computed",
    "Month": "patterns.rollup",
    "OldDocuments": "engine.lazy",
    "Outlier": "patterns.outlier.rule",
    "ParentReference": "patterns.tree.parent_reference",
    "Progress": "graph.outcomes",
    "Ran": "upkeep.schedule",
    "Rollup": "patterns.rollup",
    "Sample": "upkeep.migrations.run",
    "SetAside": "upkeep.migrations.run",
    "Store": "store.blocking.store",
    "Subset": "patterns.subset",
    "Sum": "patterns.computed",
    "Summary": "graph.outcomes",
    "TimeSeries": "patterns.bucket.time_series",
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
