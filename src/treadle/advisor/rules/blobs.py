"""Files kept inside documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.advisor.declare import Source, camel_case, snake_case
from treadle.advisor.facts import CollectionFacts, FieldFacts, Scan
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.naming import subject
from treadle.advisor.wording import share, size

RULE = Rule(
    "blobs",
    "anti-pattern",
    "Large blobs in documents",
    "A field holds large binary data or text, so every read of the document transfers it.",
    "Keep the file in a collection of its own, in GridFS or in a file store, and its address in the "
    "document.",
    "A second request where the file itself is needed.",
    "Small documents; a cache full of data instead of files.",
    "Not for small thumbnails, hashes or keys.",
)
MEAN_BYTES_MIN = 16_000
MAXIMUM_BYTES_MIN = 500_000


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        for each in facts.fields.values():
            mean, most = each.bytes_mean or 0, each.bytes_max or 0
            if each.in_array or (mean < MEAN_BYTES_MIN and most < MAXIMUM_BYTES_MIN):
                continue
            yield Finding(
                RULE,
                facts.name,
                each.path,
                f"{each.path} holds {size(mean)} on average, up to {size(most)}.",
                {
                    "documents with it": each.present,
                    "type": each.type,
                    "size, mean": size(mean),
                    "size, max": size(most),
                    "share of the document": share(min(mean, facts.mean_bytes), facts.mean_bytes),
                },
                _declaration(facts, each),
                ("Copy the field into the new collection under the same _id, then remove it.",),
                confidence="high" if "binData" in each.types else "medium",
            )


def _declaration(facts: CollectionFacts, each: FieldFacts) -> str:
    source = Source()
    # With the object around it, if any, which describes the file.
    blob = each.steps[0]
    parent = source.document(facts, without=frozenset({blob}))
    source.document(
        replace(facts, name=f"{snake_case(facts.name, 'document')}_{blob}"),
        only=frozenset({blob}),
        name=f"{parent}{camel_case(subject(blob)) or 'Content'}",
    )
    return source.text()
