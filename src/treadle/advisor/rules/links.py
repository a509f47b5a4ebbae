"""Many-to-many through documents that do nothing but link."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.advisor.decide import link_ends
from treadle.advisor.declare import Source, class_name, has_one_key, quote, snake_case
from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.interface import Evidence, Finding, Rule
from treadle.advisor.wording import names

RULE = Rule(
    "links",
    "Links",
    "Many-to-many through link documents",
    "A collection holds nothing but pairs of ids, and each page goes through it from one side to the other.",
    "Keep both sides in one collection, each with the ids of the others in one indexed array; or, where "
    "they stay apart, an array of ids on the side that has fewer.",
    "Both ends are written with each link; arrays must stay bounded.",
    "One indexed query for a thing and all that belongs to it; no link is known at one end only.",
    "Not where a link has values of its own that are queried, nor where one side has thousands of links.",
)
LINKS_MIN = 50
LINKS_PER_END_MAX = 1_000
READS_MIN = 10


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        ends = link_ends(scan, facts)
        if ends is None or facts.count < LINKS_MIN:
            continue
        if max(each.children.maximum for each in ends) > LINKS_PER_END_MAX:
            continue
        if not all(has_one_key(scan.collections[each.parent], each.key) for each in ends):
            continue
        if not any(index.expires for index in facts.indexes):
            yield _finding(scan, facts, ends)


def _finding(scan: Scan, facts: CollectionFacts, ends: tuple[Relation, Relation]) -> Finding:
    reads = sum(each.read_together for each in ends)
    evidence: Evidence = {"link documents": facts.count, "between": names([each.parent for each in ends])}
    for each in ends:
        evidence[f"links per {each.path}, median"] = each.children.median
        evidence[f"links per {each.path}, max"] = each.children.maximum
    if scan.workload is not None:
        evidence["reads through them in the workload"] = reads
    first, second = ends
    return Finding(
        RULE,
        facts.name,
        "",
        f"{facts.count:,} documents of {facts.name} do nothing but link {first.parent} and {second.parent}.",
        evidence,
        _declaration(scan, ends),
        (
            f"Copy {first.parent} and {second.parent} into the new collection, each with its kind and the "
            "ids that its link documents name; ids that both use must be made different first.",
        ),
        tuple(dict.fromkeys(each.parent for each in ends)),
        severity="warning" if reads >= READS_MIN else "info",
        confidence="high" if reads >= READS_MIN else "medium",
    )


def _declaration(scan: Scan, ends: tuple[Relation, Relation]) -> str:
    source = Source()
    parents = list({each.parent: scan.collections[each.parent] for each in ends}.values())
    kinds = {_identity(scan.collections[each.parent], each.key) for each in ends}
    identity = next(iter(kinds)) if len(kinds) == 1 else "str"
    subjects = [snake_case(each.name, "node") for each in parents]
    place = _free_name(parents, "links")
    head = [f"collection={quote('_and_'.join(each.name for each in parents))}", 'discriminator="type"']
    if len(parents) == 1 and ends[0].key == "_id":
        # Both ends are of one collection, which can have links of its own.
        source.document(
            parents[0], keywords=[f"links=Links({quote(place)})"], added=[_field(place, identity)]
        )
        return source.text()
    base = source.name("".join(map(class_name, (each.name for each in parents))))
    lines = [] if identity == "Id" else [f"    id: {identity}"]
    source.blocks.append(
        "\n".join(
            [
                f"class {base}(Document, {', '.join(head)}, links=Links({quote(place)})):",
                *lines,
                f"    {_field(place, identity)}",
            ]
        )
    )
    for parent, kind in zip(parents, subjects, strict=True):
        without = frozenset({"type"})
        source.document(parent, keywords=[f"kind={quote(kind)}"], base=base, without=without)
    return source.text()


def _identity(parent: CollectionFacts, key: str) -> str:
    """The type of what the link documents hold, which becomes the id."""
    return Source.identity(parent) if key == "_id" else Source.scalar(parent.fields[key].kind)


def _field(place: str, identity: str) -> str:
    return f"{place}: list[{identity}] = []"


def _free_name(parents: list[CollectionFacts], preferred: str) -> str:
    """A name that none of the collections uses."""
    taken = {name for each in parents for name in Source.names(each).values()}
    return preferred if preferred not in taken else f"{preferred}_ids"
