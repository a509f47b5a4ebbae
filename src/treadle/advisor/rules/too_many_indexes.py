"""More indexes than a collection can pay for."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.facts import CollectionFacts, Scan
from treadle.advisor.index_models import keeping
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.wording import share, size

RULE = Rule(
    "too-many-indexes",
    "anti-pattern",
    "Too many indexes",
    "A collection has more than a dozen indexes, or one for nearly every field.",
    "Keep those that queries use; combine single ones into compound ones.",
    "Finding out which queries need which.",
    "Each write touches fewer indexes; more of the data stays in memory.",
    "Not for a collection that is written once and then only searched.",
)
INDEXES_MAX = 12
FIELDS_MIN = 5
FIELD_SHARE_MAX = 0.8
DOCUMENTS_MIN = 100


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        own = [index for index in facts.indexes if index.name != "_id_"]
        fields = facts.top()
        indexed = {index.fields[0] for index in own if index.fields}
        every = len(fields) >= FIELDS_MIN and len(
            indexed & {each.path for each in fields}
        ) > FIELD_SHARE_MAX * len(fields)
        if facts.count >= DOCUMENTS_MIN and (len(own) > INDEXES_MAX or every):
            yield _finding(facts, len(own), len(indexed))


def _finding(facts: CollectionFacts, own: int, indexed: int) -> Finding:
    unused = frozenset(
        index.name for index in facts.indexes if index.uses == 0 and not index.unique and not index.expires
    )
    used = sum(bool(index.uses) for index in facts.indexes)
    return Finding(
        RULE,
        "warning",
        "medium",
        facts.name,
        "",
        f"{facts.name} has {own} indexes beside _id, on {indexed} of its {len(facts.top())} fields.",
        {
            "indexes": own,
            "fields": len(facts.top()),
            "used since the server counts": used,
            "size": size(facts.index_bytes),
            "size in data size": share(facts.index_bytes, facts.data_bytes),
        },
        keeping(facts, unused if len(unused) < own else frozenset()),
        ("Look at the use of each index over a week before dropping any.",),
    )
