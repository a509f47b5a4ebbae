"""The same count or sum, worked out anew at each read."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.declare import Source, has_one_identity, python_name, quoted, referring
from treadle.advisor.facts import WRITES, CollectionFacts, Query, Relation, Scan, Workload
from treadle.advisor.relations import subject
from treadle.advisor.rule import Finding, Rule
from treadle.advisor.structure import is_plain_name
from treadle.advisor.wording import number

RULE = Rule(
    "computed",
    "Computed",
    "Counted or summed on every read",
    "The workload counts or sums the documents that name one parent, again and again.",
    "Keep the result in the parent and bring it up to date with each write.",
    "Each write of a source also updates its parent.",
    "A read of one field instead of an aggregation over all sources.",
    "Not where writes outnumber the reads, nor where the result is wanted once a day.",
)
READS_MIN = 10


def find(scan: Scan) -> Iterator[Finding]:
    if scan.workload is None:
        return
    for relation in scan.relations:
        child = scan.collections[relation.child]
        if relation.many or relation.key != "_id" or not is_plain_name(relation.path):
            continue
        if relation.child == relation.parent or not has_one_identity(scan.collections[relation.parent]):
            continue
        queries = [query for query in scan.workload.queries if _computes(query, relation)]
        reads = sum(query.count for query in queries)
        writes = scan.workload.of(child.name, WRITES)
        if reads < READS_MIN or writes >= reads:
            continue
        yield _finding(scan, scan.workload, relation, queries, reads, writes)


def _computes(query: Query, relation: Relation) -> bool:
    counts = query.kind == "count" or (query.kind == "aggregate" and query.grouped)
    return query.collection == relation.child and counts and query.filtered == (relation.path,)


def _finding(
    scan: Scan, workload: Workload, relation: Relation, queries: list[Query], reads: int, writes: int
) -> Finding:
    child, parent = scan.collections[relation.child], scan.collections[relation.parent]
    examined = sum(query.examined for query in queries) / reads
    milliseconds = sum(query.milliseconds for query in queries) / reads
    return Finding(
        RULE,
        "warning",
        "high",
        child.name,
        relation.path,
        f"{child.name} was counted or summed by {relation.path} {reads:,} times, and written "
        f"{writes:,} times.",
        {
            "aggregating reads": reads,
            "writes of the sources": writes,
            "documents examined per read": number(examined),
            "milliseconds per read": round(milliseconds, 1),
            "children per parent, median": relation.children.median,
            "children per parent, max": relation.children.maximum,
        },
        _declaration(child, parent, relation, queries),
        ("Run setup(), then rebuild() to fill the values.",),
    )


def _declaration(
    child: CollectionFacts, parent: CollectionFacts, relation: Relation, queries: list[Query]
) -> str:
    source = Source()
    source.use("typing", "Annotated")
    child = referring(child, relation.path, parent)
    child_class = source.document(child)
    by = quoted(source.names(child)[relation.path])
    names = source.names(parent)
    taken = set(names.values())
    about = "_".join(subject(child.name)) or "child"
    added = []
    for operator, path in sorted(
        {_wanted(child, text) for query in queries for text in query.sums or ("$sum",)}
    ):
        if not path:
            source.use("treadle", "Count")
            added.append(
                f"{python_name(f'{about}_count', taken)}: Annotated[int, Count({child_class}, by={by})] = 0"
            )
            continue
        kind = source.annotation(child, child.fields[path], child_class)
        place = python_name(f"{path}_{_WORDS[operator]}", taken)
        name = quoted(source.names(child)[path])
        pattern = _PATTERNS[operator]
        source.use("treadle", pattern)
        if operator == "$sum":
            zero = "Decimal(0)" if kind == "Decimal" else "0"
            added.append(f"{place}: Annotated[{kind}, Sum({child_class}, {name}, by={by})] = {zero}")
        else:
            kind = "float" if operator == "$avg" and kind == "int" else kind
            added.append(
                f"{place}: Annotated[{kind} | None, {pattern}({child_class}, {name}, by={by})] = None"
            )
    source.document(parent, added=tuple(added))
    return source.text()


_WORDS = {"$sum": "total", "$avg": "average", "$min": "min", "$max": "max"}
_PATTERNS = {"$sum": "Sum", "$avg": "Average", "$min": "Min", "$max": "Max"}


def _wanted(child: CollectionFacts, text: str) -> tuple[str, str]:
    """The operator and the field, or a plain count where the field is none of the collection's numbers."""
    operator, _, path = text.partition(":")
    field = child.fields.get(path)
    numeric = field is not None and set(field.filled) <= {"int", "long", "double", "decimal"}
    usable = field is not None and len(field.steps) == 1 and is_plain_name(path)
    if (
        operator in _PATTERNS
        and usable
        and (numeric or operator in ("$min", "$max"))
        and not {"array", "object"} & set(field.types if field else ())
    ):
        return operator, path
    return "$sum", ""
