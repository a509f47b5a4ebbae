"""Embed or reference? The decision as a function, with the questions that led to it.

Few children are embedded. Many are embedded where they are always read with
the parent or must change together with it, as long as they fit; otherwise
they are referenced. Millions are referenced from the child. Many-to-many
becomes arrays of ids. Factors are what matters beyond the decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from treadle.advisor.facts import CollectionFacts, Relation, Scan
from treadle.advisor.naming import singular, subject, words
from treadle.advisor.wording import size
from treadle.errors import UsageError

FEW_CHILDREN = 50
MILLIONS = 1_000_000
# Half of the server's limit: arrays are rewritten, and tomorrow's document is larger.
EMBEDDED_BYTES_MAX = 8 * 1024 * 1024
ALWAYS_TOGETHER_SHARE = 0.8
READS_MIN = 10
READ_TOGETHER_SHARE_MIN = 0.2
CHILD_BYTES_DEFAULT = 500
# How long a chain of parts of parts may be.
CHAIN_MAX = 3
# More than so many are something of their own, unless their name or the workload says otherwise.
PARTS_MAX = 10
PART_NAMES = frozenset(
    {"line", "lines", "item", "items", "detail", "details", "row", "rows", "entry", "entries", "position"}
    | {"positions", "part", "parts", "element", "elements", "option", "options"}
)
HEADS = frozenset({("header",), ("head",), ("master",)})
ENTITY_WORDS = frozenset({"name", "title", "email", "username", "status", "password", "created", "slug"})
LINK_FIELDS_MAX = 2
LINK_PAYLOAD_WORDS = frozenset(
    {"status", "state", "reason", "text", "comment", "message", "title", "name", "note", "body", "subject"}
)
LINK_PAYLOAD_TYPES = frozenset({"int", "long", "double", "decimal", "object", "array", "binData", "string"})

Choice = Literal["embed", "reference", "reference-from-child", "arrays-of-ids"]
ADVICE: dict[Choice, str] = {
    "embed": "Embed the children in the parent.",
    "reference": "Keep the children in a collection of their own, and refer to them.",
    "reference-from-child": "Keep the children in a collection of their own, each with its parent's id.",
    "arrays-of-ids": "Keep both in collections of their own, with an array of ids where there are fewer.",
}


@dataclass(frozen=True, slots=True)
class Relationship:
    """What is known about parents and their children; None is unknown."""

    children_max: int
    children_typical: int | None = None
    many_to_many: bool = False
    read_together: bool | None = None
    atomic: bool = False
    child_bytes: int | None = None
    children_change_often: bool | None = None
    grows: bool | None = None
    referred_to_by_others: bool | None = None

    def __post_init__(self) -> None:
        numbers = (self.children_max, self.children_typical, self.child_bytes)
        if any(number is not None and number < 0 for number in numbers):
            raise UsageError("a relationship's numbers cannot be negative", code="relationship-invalid")
        if self.children_typical is not None and self.children_typical > self.children_max:
            raise UsageError(
                f"typically {self.children_typical} children cannot be more than at most {self.children_max}",
                code="relationship-invalid",
            )

    @classmethod
    def of(cls, relation: Relation, child: CollectionFacts, others: bool | None = None) -> Relationship:
        """What a scan measured of a relation; `others` is whether others refer to the children."""
        together = None
        if relation.child_reads:
            reads = max(relation.read_together, relation.read_by_parent)
            together = reads >= ALWAYS_TOGETHER_SHARE * relation.child_reads
        return cls(
            children_max=int(relation.children.maximum),
            children_typical=int(relation.children.median),
            many_to_many=relation.many,
            read_together=together,
            child_bytes=round(child.mean_bytes),
            referred_to_by_others=others,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One question on the way to a decision, and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, the questions that led to it, and what else to weigh."""

    choice: Choice
    path: tuple[Answer, ...]
    factors: tuple[str, ...]

    @property
    def advice(self) -> str:
        return ADVICE[self.choice]


def decide(relationship: Relationship) -> Decision:
    """Embed or reference, for one relationship."""
    path: list[Answer] = []
    choice = _choose(relationship, path)
    return Decision(choice, tuple(path), tuple(_factors(relationship, choice)))


def _choose(about: Relationship, path: list[Answer]) -> Choice:
    def ask(question: str, yes: bool, answer: str | None = None) -> bool:
        path.append(Answer(question, answer or ("yes" if yes else "no")))
        return yes

    most, total = f"at most {about.children_max:,}", _bytes(about)
    if ask("Does a child belong to several parents?", about.many_to_many):
        return "arrays-of-ids"
    if ask("Are there millions of children to a parent?", about.children_max >= MILLIONS, most):
        return "reference-from-child"
    fits = total <= EMBEDDED_BYTES_MAX
    if not ask("Do the children fit into one document?", fits, f"{size(total)} at most"):
        return "reference-from-child"
    few = about.children_max < FEW_CHILDREN
    if ask(f"Are there fewer than {FEW_CHILDREN} children to a parent?", few, most):
        return "embed"
    if ask("Must children change together with their parent, in one write?", about.atomic):
        return "embed"
    unknown = "not known" if about.read_together is None else None
    if ask("Are children always read together with their parent?", bool(about.read_together), unknown):
        return "embed"
    return "reference-from-child" if about.children_max >= 1_000 else "reference"


def _bytes(about: Relationship) -> int:
    return about.children_max * (CHILD_BYTES_DEFAULT if about.child_bytes is None else about.child_bytes)


def _factors(about: Relationship, choice: Choice) -> Iterator[str]:
    embedded = choice == "embed"
    if about.children_change_often and embedded:
        yield "Children change often: each change rewrites the parent."
    if about.children_change_often is False and not embedded:
        yield "Children hardly change: an Extended Reference can copy what readers want."
    if about.grows and embedded:
        yield "Children keep coming: bound the array (Outlier), or embed only the newest (Subset)."
    if about.grows and not embedded:
        yield "Children keep coming: a Subset keeps the newest few in the parent."
        yield "Where the old ones are no longer read, an Archive moves them away and still counts them."
    if choice == "arrays-of-ids":
        yield "Read from both sides: Links keeps the ids at both ends, in one collection."
    if about.referred_to_by_others and embedded:
        yield "Others refer to the children: keep them apart and copy the hot fields (Extended Reference)."
    if embedded and about.children_max >= FEW_CHILDREN:
        yield f"Watch the limit of 16 MB: at most {size(_bytes(about))} by these numbers."
    typical = about.children_typical
    if typical is not None and about.children_max >= 100 * max(typical, 1):
        yield "A few parents have a hundred times more than the rest: see Outlier."
    if about.atomic and not embedded:
        yield "One write for both needs a transaction when they are apart."
    if about.read_together and not embedded:
        yield "Read together: copy the fields that readers want (Extended Reference), or use $lookup."
    if not embedded and choice != "arrays-of-ids":
        yield "Counts and sums over the children can be kept in the parent (Computed)."


def could_embed(scan: Scan, relation: Relation, depth: int = 0) -> bool:
    """Whether the children are parts of their parents, by the decision's numbers and by how they are read.

    Nothing else may refer to them, unless that in turn is part of them.
    """
    child = scan.collections[relation.child]
    if relation.many or relation.child == relation.parent or depth > CHAIN_MAX:
        return False
    # Former states would make the document grow with each change.
    if any(each.collection == relation.child for each in scan.pasts):
        return False
    referring = [each for each in scan.relations if each.parent == relation.child]
    if not all(could_embed(scan, each, depth + 1) for each in referring):
        return False
    if _owner(scan, child) != relation or link_ends(scan, child) is not None:
        return False
    # What expires by itself cannot do so inside another document.
    expires = any(index.expires for index in child.indexes)
    # The workload may show that children are mostly read without their parent.
    reads = relation.child_reads
    together = max(relation.read_together, relation.read_by_parent)
    read_alone = reads >= READS_MIN and together < READ_TOGETHER_SHARE_MIN * reads
    if expires or has_own_key(child) or read_alone:
        return False
    about = Relationship.of(relation, child)
    return decide(replace(about, read_together=_is_read_by_parent(relation))).choice == "embed"


def _is_read_by_parent(relation: Relation) -> bool:
    """Whether nearly all reads of the children begin at their parent."""
    reads = relation.child_reads
    return reads >= READS_MIN and relation.read_by_parent >= ALWAYS_TOGETHER_SHARE * reads


def _owner(scan: Scan, child: CollectionFacts) -> Relation | None:
    """The parent that the children are part of, if any: read from there, called a part of it, or its list.

    Invoice lines name an invoice and a track. Of a track there are fewer
    lines, and yet they belong to the invoice.
    """
    relations = [each for each in scan.relations if each.child == child.name and not each.many]
    words_of = {word for each in child.top() for word in words(each.name)[-1:]}
    is_thing = bool(words_of & ENTITY_WORDS)
    read = [each for each in relations if _is_read_by_parent(each)]
    named = [each for each in relations if each.numbered or _is_named_part(each.child, each.parent)]
    among = [each for each in named if each in read] or named or ([] if is_thing else read)
    if among:
        return min(among, key=lambda each: (-each.read_by_parent, each.childless / max(1, each.parents)))
    if len(relations) != 1 or relations[0].children.maximum > PARTS_MAX:
        return None
    # A few addresses or phone numbers: with no name and no time of their own, and nothing refers to them.
    is_referred_to = any(each.parent == child.name for each in scan.relations)
    happens = any("date" in each.types for each in child.top())
    return None if is_referred_to or is_thing or happens else relations[0]


def _is_named_part(child: str, parent: str) -> bool:
    """Whether `order_lines`, `OrderDetails` or `orderitems` are named after `orders`."""
    parts, owner = words(child.rpartition(".")[2] or child), subject(parent)
    # SalesOrderDetail is part of SalesOrderHeader.
    owner = owner[:-1] if owner[-1:] in HEADS else owner
    if not owner or parts == owner or singular(parts) == owner:
        return False
    if parts[: len(owner)] == owner and len(parts) > len(owner):
        return True
    joined, prefix = "".join(parts), "".join(owner)
    return joined.startswith(prefix) and joined[len(prefix) :] in PART_NAMES


def link_ends(scan: Scan, facts: CollectionFacts) -> tuple[Relation, Relation] | None:
    """The two relations of a collection whose documents do nothing but link; None for any other."""
    relations = [each for each in scan.relations if each.child == facts.name]
    if len(relations) != 2 or any(each.many or each.parent == facts.name for each in relations):
        return None
    ends = {each.path for each in relations}
    others = [each for each in facts.top() if each.path not in ends]
    # A number, a state, a text or anything with parts is more than that two things belong together.
    is_more = any(
        set(each.value_types) & LINK_PAYLOAD_TYPES or LINK_PAYLOAD_WORDS & set(words(each.name))
        for each in others
    )
    if len(others) > LINK_FIELDS_MAX or is_more or len(ends) != 2 or has_own_key(facts):
        return None
    if any(each.parent == facts.name for each in scan.relations):
        return None
    first, second = relations
    # Where each belongs to one only, it is no link but a child.
    return (first, second) if min(first.children.maximum, second.children.maximum) >= 2 else None


def has_own_key(facts: CollectionFacts) -> bool:
    """Whether its documents are looked up by a unique key beside their id."""
    return any(index.unique and index.fields != ("_id",) and len(index.keys) == 1 for index in facts.indexes)
