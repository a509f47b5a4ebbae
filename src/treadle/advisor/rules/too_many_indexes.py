"""More indexes than a collection can pay for."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import declare_without
from treadle.advisor.facts import Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.wording import share, size

RULE = Rule(
    "too-many-indexes",
    "anti-pattern",
    "Too many indexes",
    "A collection has more than a dozen indexes, or one for nearly every field.",
    "Keep those that queries use; combine single ones into compound ones.",
    "The work of finding out which queries need which index.",
    "Each write touches fewer indexes; more of the data stays in memory.",
    "Not for a collection that is written once and then only searched.",
)
INDEXES_MAX = 12
FIELDS_MIN = 5
FIELD_SHARE_MAX = 0.8
DOCUMENTS_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        fields = {each.path for each in facts.top()}
        own = [index for index in facts.indexes if index.name != "_id_"]
        indexed = {index.fields[0] for index in own if index.fields}
        too_wide = len(fields) >= FIELDS_MIN and len(indexed & fields) > FIELD_SHARE_MAX * len(fields)
        if facts.count < DOCUMENTS_MIN or (len(own) <= INDEXES_MAX and not too_wide):
            continue
        unused = [index.name for index in own if index.uses == 0 and not index.unique and not index.expires]
        yield Finding(
            RULE,
            facts.name,
            "",
            f"{facts.name} has {len(own)} indexes beside _id, on {len(indexed)} of its {len(fields)} fields.",
            {
                "indexes": len(own),
                "fields": len(fields),
                "used since the server began to count": sum(bool(index.uses) for index in facts.indexes),
                "size": size(facts.index_bytes),
                "size, share of data size": share(facts.index_bytes, facts.data_bytes),
            },
            declare_without(facts, unused if len(unused) < len(own) else ()),
            ("Look at the use of each index over a week before dropping any.",),
            confidence="medium",
        )
