"""One field, several types."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declaration
from treadle.advisor.facts import Scan
from treadle.advisor.field_types import STRUCTURES, families, has_versions, is_mixed, retyped
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.wording import share

RULE = Rule(
    "mixed-types",
    "anti-pattern",
    "Mixed types in one field",
    "A field holds text in some documents and a number or a date in others.",
    "Convert the minority, and declare the type so that it stays consistent.",
    "A one-time conversion.",
    'Queries and sorts see every document: 5 and "5" no longer differ.',
    "Not where both types are intended and programs handle both.",
)


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        for each in facts.fields.values():
            if not is_mixed(facts, each):
                continue
            found = families(each)
            # Kinds of a polymorphic collection, and numbered versions, may use a name for different things.
            if (facts.kinds is not None or has_versions(facts)) and STRUCTURES & set(found):
                continue
            # Two versions of a schema are for the rule of that name.
            if retyped(facts, each) is not None:
                continue
            ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
            (main, _), *others = ordered
            evidence: Evidence = {"documents looked at": each.looked_at}
            evidence.update((kind, f"{number:,} ({share(number, each.present)})") for kind, number in ordered)
            yield Finding(
                RULE,
                facts.name,
                each.path,
                f"{each.path} is {main} in most documents and {', '.join(kind for kind, _ in others)} in "
                f"{sum(number for _, number in others):,}.",
                evidence,
                declaration(facts),
                ("Convert the minority with an update pipeline ($convert), then run setup().",),
            )
