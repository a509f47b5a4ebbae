"""The rules, one file each; a file in this folder is a rule.

Each has a `RULE`, which `treadle explain` prints, and `find`, which takes the
facts of a scan and yields findings. They are pure: no clock, no randomness, no
server.
"""

from __future__ import annotations

import importlib
import pkgutil

from treadle.advisor.interface import Find, Rule


def load() -> dict[str, tuple[Rule, Find]]:
    """All rules by their code, in the order of their files."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return {module.RULE.code: (module.RULE, module.find) for module in modules}
