"""The advisor: which pattern does a database ask for?

`scan(database)` reads any MongoDB database, writes nothing, and reports what
to change, with evidence, cost and a declaration to copy. `decide` answers
embed or reference.
"""

from __future__ import annotations

from treadle.advisor.decide import Decision, Relationship, decide
from treadle.advisor.facts import Limits, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.profile import Step, scan
from treadle.advisor.report import Report

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
