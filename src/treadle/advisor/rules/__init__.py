"""The rules: one file each, found by their being here.

Each has a `RULE`, which `treadle explain` tells, and `find`, which takes the
facts of a scan and yields findings. They are pure: no clock, no chance, no
server.
"""

from __future__ import annotations

import importlib
import pkgutil

from treadle.advisor.rule import Find, Rule


def load() -> dict[str, tuple[Rule, Find]]:
    """All rules by their code, in the order of their files."""
    found: dict[str, tuple[Rule, Find]] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        found[loaded.RULE.code] = (loaded.RULE, loaded.find)
    return found
