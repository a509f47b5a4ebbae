"""Set-up, proof and repair, the stream worker, schedules, status.

Whoever writes and reads documents needs none of it, so a module is imported
when `upkeep.<module>` is first asked for. Half of Treadle's own modules are
here, or are needed from here alone. Signatures of a Store name its types in
the same way (`upkeep.jobs.Throttle`), so that `typing.get_type_hints` finds them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.upkeep import (
        aside,
        controls,
        findings,
        jobs,
        migrate,
        proof,
        rebuild,
        retries,
        schedule,
        set_up,
        setup_record,
        status,
        stream,
        teardown,
    )

__all__ = [
    "aside",
    "controls",
    "findings",
    "jobs",
    "migrate",
    "proof",
    "rebuild",
    "retries",
    "schedule",
    "set_up",
    "setup_record",
    "status",
    "stream",
    "teardown",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
