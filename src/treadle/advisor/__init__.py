"""The advisor: which pattern does a database ask for?

`scan(database)` reads any MongoDB database, writes nothing, and reports what
to change, with evidence, cost and a declaration to copy. `decide` answers
embed or reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pymongo.database import Database

from treadle.advisor.decide import Decision, Relationship, decide
from treadle.advisor.facts import Limits, Scan
from treadle.advisor.profile import Reporter, Step, profile
from treadle.advisor.report import Report
from treadle.advisor.rule import Finding, Rule
from treadle.errors import UsageError

__all__ = [
    "Decision",
    "Finding",
    "Limits",
    "Relationship",
    "Report",
    "Rule",
    "Scan",
    "Step",
    "decide",
    "scan",
]


def scan(
    database: Database[Any],
    *,
    limits: Limits | None = None,
    workload: Iterable[Mapping[str, Any]] | None = None,
    secondary: bool = False,
    show_values: bool = False,
    progress: Reporter | None = None,
) -> Report:
    """Look at a database and say what to change. Reads only, one operation at a time.

    `workload` takes profiler documents; without it `system.profile` is read
    where there is one. `secondary` prefers a secondary member. No value of a
    document is kept unless `show_values` is set. Ctrl-C and a lost connection
    give a report of what was known by then, with `scan.complete` false.
    """
    if not isinstance(database, Database):
        raise UsageError(
            f"scan takes a PyMongo database, not a {type(database).__name__}; give it MongoClient()['shop']",
            code="database-invalid",
        )
    return Report.of(profile(database, limits or Limits(), workload, secondary, show_values, progress))
