"""Set-up, proof and repair, the stream worker, schedules, status.

Writing and reading documents needs none of it, so a module is imported when
`upkeep.<module>` is first asked for. Half of Treadle's own modules are
here, or are needed from here alone. Signatures of a Store name its types in
the same way (`upkeep.jobs.Throttle`), so that `typing.get_type_hints` finds them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.upkeep import (
        controls,
        findings,
        jobs,
        migrate,
        quarantine,
        rebuild,
        retries,
        schedule,
        set_up,
        setup_record,
        status,
        stream,
        teardown,
        verification,
    )

__all__ = [
    "controls",
    "findings",
    "jobs",
    "migrate",
    "quarantine",
    "rebuild",
    "retries",
    "schedule",
    "set_up",
    "setup_record",
    "status",
    "stream",
    "teardown",
    "verification",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
