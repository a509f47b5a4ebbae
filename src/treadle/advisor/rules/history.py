"""Former states of documents that are kept by hand, in arrays or in collections of their own."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source, has_one_identity, quote
from treadle.advisor.facts import CollectionFacts, FieldFacts, Past, Scan
from treadle.advisor.former_states import STATES_MIN, states_in
from treadle.advisor.interface import Finding, Rule, length_evidence
from treadle.advisor.wording import names

RULE = Rule(
    "history",
    "History",
    "History kept by hand",
    "Documents carry their former states in an array, or a second collection holds them.",
    "Declare the history: each state is written in the same commit as the write that ends it.",
    "A second write with each change, and the storage of the states.",
    "No state is lost or out of order; what held at a moment is one query; documents stay small.",
    "Not for a log of events, nor for a status with its times, which belong into the document.",
)


def find(scan: Scan) -> Iterator[Finding]:
    for past in scan.pasts:
        if has_one_identity(scan.collections[past.of]):
            yield _collection(scan, past)
    for facts in scan.plain():
        for each in facts.top():
            shared = states_in(facts, each) if "array" in each.types else ()
            if shared and each.present >= STATES_MIN and has_one_identity(facts):
                yield _array(scan, facts, each, shared)


def _collection(scan: Scan, past: Past) -> Finding:
    of = scan.collections[past.of]
    return Finding(
        RULE,
        past.collection,
        "",
        f"{past.collection} holds former states of {past.of}, written by hand.",
        {
            "former states": past.states,
            "documents": of.count,
            "states per document, mean": round(past.states / max(1, of.count), 1),
            "fields that both have": names(list(past.shared)),
            "named by": past.by,
        },
        _declaration(scan, of),
        (f"Run setup(); from then on each state is kept. {past.collection} can stay for what was before.",),
        (past.of,),
        severity="info",
        confidence="high" if past.by != "_id" else "medium",
    )


def _array(scan: Scan, facts: CollectionFacts, array: FieldFacts, shared: tuple[str, ...]) -> Finding:
    lengths = array.lengths
    return Finding(
        RULE,
        facts.name,
        array.path,
        f"{array.path} keeps former states of the document inside it, by hand.",
        {
            **(length_evidence(lengths) if lengths else {}),
            "fields that the states repeat": names(list(shared)),
        },
        _declaration(scan, facts, frozenset({array.name})),
        (f"Run setup(); from then on each state is kept. Remove {array.path} when it is no longer read.",),
        severity="info",
        confidence="medium",
    )


def _declaration(scan: Scan, facts: CollectionFacts, without: frozenset[str] = frozenset()) -> str:
    name = f"{facts.name}_history"
    if name in scan.names:
        name = f"{facts.name}_states"
    source = Source()
    source.document(facts, keywords=[f"history=History(collection={quote(name)})"], without=without)
    return source.text()
