"""The same count or sum, computed again at each read; and one that is kept by hand and has drifted."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import (
    Source,
    can_declare,
    quote,
    reference_keywords,
    snake_case,
    with_reference_type,
)
from treadle.advisor.facts import NUMBERS, WRITES, CollectionFacts, Query, Relation, Scan, Tally
from treadle.advisor.interface import Evidence, Finding, Rule, children_evidence
from treadle.advisor.model_text import render
from treadle.advisor.naming import words
from treadle.advisor.proposals import Derived, Draft, Operator
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import number, share
from treadle.advisor.workload import of_children

RULE = Rule(
    "computed",
    "Computed",
    "Counted or summed on every read",
    "The workload counts or sums the documents of one parent again and again, or a number kept by hand "
    "is no longer right.",
    "Keep the result in the parent and update it with each write.",
    "Each write of a source also updates its parent.",
    "A read of one field instead of an aggregation over all sources.",
    "Not where writes outnumber the reads, nor where the result is needed once a day.",
)
READS_MIN = 10
# The server's operator -> that of a proposal, and the ending of the field's name.
_OPERATORS: dict[str, tuple[Operator, str]] = {
    "$sum": ("sum", "total"),
    "$avg": ("average", "average"),
    "$min": ("min", "min"),
    "$max": ("max", "max"),
}


def find(scan: Scan) -> Iterator[Finding]:
    for tally in scan.tallies:
        if tally.drifted and is_plain_name(tally.by):
            yield _drifted(scan, tally)
    if scan.workload is None:
        return
    for relation in scan.relations:
        if relation.child == relation.parent or not can_declare(scan, relation):
            continue
        if any((each.child, each.by) == (relation.child, relation.path) for each in scan.tallies):
            continue
        asked = (*scan.queries, *of_children(scan.queries))
        queries = [query for query in asked if _computes(query, relation)]
        reads = sum(query.count for query in queries)
        writes = scan.workload.count(relation.child, WRITES)
        if reads >= READS_MIN and writes < reads:
            yield _finding(scan, relation, queries, reads, writes)


def _computes(query: Query, relation: Relation) -> bool:
    counts = query.kind == "count" or (query.kind == "aggregate" and query.grouped)
    return query.collection == relation.child and counts and query.filter_paths == (relation.path,)


def _finding(scan: Scan, relation: Relation, queries: list[Query], reads: int, writes: int) -> Finding:
    child, parent = scan.ends(relation)
    operations = {_operation(child, text) for query in queries for text in query.sums or [""]}
    draft = Draft(tuple(_derived(child, parent, relation, *each) for each in sorted(operations)))
    return Finding(
        RULE,
        child.name,
        relation.path,
        f"{child.name} was counted or summed by {relation.path} {reads:,} times, and written "
        f"{writes:,} times.",
        {
            "aggregating reads": reads,
            "writes of the sources": writes,
            "documents examined per read": number(sum(query.examined for query in queries) / reads),
            "milliseconds per read": round(sum(query.milliseconds for query in queries) / reads, 1),
            **children_evidence(relation),
        },
        render(scan, draft),
        ("Run setup(), then rebuild() to fill the values.",),
        draft=draft,
    )


def _derived(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, operator: str, path: str
) -> Derived:
    about, after = snake_case(child.name, "child"), f"by_{'_'.join(words(relation.path))}"
    kind: Operator = "count"
    preferred = [f"{about}_count"]
    if path:
        kind, ending = _OPERATORS[operator]
        value = "_".join(words(path))
        preferred = [f"{value}_{ending}", f"{about}_{value}_{ending}"]
    name = Source.new_name(parent, *preferred, f"{preferred[-1]}_{after}")
    return Derived(
        parent.name,
        name,
        child.name,
        relation.path,
        relation.key,
        kind,
        (path,) if path else (),
        other_name=Source.new_name(parent, "_".join([*words(name), after])),
    )


def _operation(child: CollectionFacts, text: str) -> tuple[str, str]:
    """The operator and the field; a plain count where the field is none that a pattern can compute from."""
    operator, _, path = text.partition(":")
    field = child.fields.get(path)
    if field is None or operator not in _OPERATORS or path not in Source.names(child):
        return "$sum", ""
    is_number = set(field.value_types) <= NUMBERS
    is_scalar = not {"array", "object"} & set(field.types)
    return (operator, path) if is_scalar and (is_number or operator in ("$min", "$max")) else ("$sum", "")


# -- numbers kept by hand ------------------------------------------------------------------------


def _drifted(scan: Scan, tally: Tally) -> Finding:
    kind = "average" if tally.is_average else "sum"
    what = (
        f"the number of {tally.child}"
        if tally.field is None
        else f"the {kind} of {tally.child}.{tally.field}"
    )
    part = share(tally.drifted, tally.compared)
    evidence: Evidence = {
        "kept by hand": what,
        "reference": tally.by,
        "documents compared": tally.compared,
        "drifted": tally.drifted,
        "drifted, share": part,
        "maintained by": "nothing",
    }
    drifted = f"{tally.drifted:,} of {tally.compared:,} ({part}) are wrong"
    if tally.sampled_of is not None:
        evidence["sample of"] = tally.sampled_of
        drifted = f"in a sample, {drifted}"
    return Finding(
        RULE,
        tally.parent,
        tally.path,
        f"{tally.path} is {what}, kept by hand, and nothing maintains it: {drifted}.",
        evidence,
        _tally_declaration(scan, tally),
        (
            "Run setup(), then repair() to correct the numbers.",
            *(
                ("Averages are kept as they are, not rounded; round where they are shown.",)
                if tally.is_average
                else ()
            ),
        ),
        (tally.child,),
    )


def _tally_declaration(scan: Scan, tally: Tally) -> str:
    source = Source()
    child, parent = scan.collections[tally.child], scan.collections[tally.parent]
    child = with_reference_type(child, tally.by, parent, tally.key)
    child_class = source.document(child)
    names, own = Source.names(child), Source.names(parent)
    by = reference_keywords(names[tally.by], parent, tally.key)
    name, kind, pattern = own[tally.path], "int", f"Count({child_class}, {by})"
    if tally.field is not None:
        kind = source.annotation(child, child.fields[tally.field], child_class)
        operator = "Average" if tally.is_average else "Sum"
        pattern = f"{operator}({child_class}, {quote(names[tally.field])}, {by})"
    default = "Decimal(0)" if kind == "Decimal" else "0"
    if tally.is_average:
        kind, default = f"{kind if kind == 'Decimal' else 'float'} | None", "None"
    if name != tally.path:
        default = f"Field({default}, alias={quote(tally.path)})"
    line = f"{name}: Annotated[{kind}, {pattern}] = {default}"
    source.document(parent, without=frozenset({tally.path}), added=[line])
    return source.text()
