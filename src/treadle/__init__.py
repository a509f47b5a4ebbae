"""Treadle keeps MongoDB's schema design patterns true."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.async_api import AsyncStore
    from treadle.bson_types import Id
    from treadle.document import Document
    from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
    from treadle.indexes import Indexed
    from treadle.maintenance.lazy import OldDocuments
    from treadle.maintenance.migration import Migrated, Sample, SetAside
    from treadle.maintenance.verify import Finding, Progress
    from treadle.patterns.computed import Average, Count, Formula, Max, Min, Sum
    from treadle.patterns.extended_reference import ExtendedReference
    from treadle.patterns.schema_versioning import Migration, migration
    from treadle.patterns.subset import Subset
    from treadle.set_up import Action
    from treadle.sync_api import Store

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AsyncStore",
    "Average",
    "Count",
    "DataError",
    "DeclarationError",
    "Document",
    "ExtendedReference",
    "Finding",
    "Formula",
    "Id",
    "Indexed",
    "Max",
    "Migrated",
    "Migration",
    "Min",
    "OldDocuments",
    "Progress",
    "Sample",
    "SetAside",
    "Store",
    "Subset",
    "Sum",
    "TreadleError",
    "UsageError",
    "migration",
]

# Imported when first asked for: `treadle --help` would otherwise wait for the
# driver and for Pydantic, which take longer to import than all the rest.
_HOMES = {
    "Action": "set_up",
    "AsyncStore": "async_api",
    "Average": "patterns.computed",
    "Count": "patterns.computed",
    "DataError": "errors",
    "DeclarationError": "errors",
    "Document": "document",
    "ExtendedReference": "patterns.extended_reference",
    "Finding": "maintenance.verify",
    "Formula": "patterns.computed",
    "Id": "bson_types",
    "Indexed": "indexes",
    "Max": "patterns.computed",
    "Migrated": "maintenance.migration",
    "Migration": "patterns.schema_versioning",
    "Min": "patterns.computed",
    "OldDocuments": "maintenance.lazy",
    "Progress": "maintenance.verify",
    "Sample": "maintenance.migration",
    "SetAside": "maintenance.migration",
    "Store": "sync_api",
    "Subset": "patterns.subset",
    "Sum": "patterns.computed",
    "TreadleError": "errors",
    "UsageError": "errors",
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
