"""Embed or reference? The decision as a function, with the questions that led to it.

Few children are embedded. Many are embedded where they are always read with
the parent or must change together with it, as long as they fit; otherwise
they are referenced. Millions are referenced from the child. Many-to-many
becomes arrays of ids. Factors are what matters beyond the decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from treadle.advisor.facts import CollectionFacts, Relation, Scan
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
            together = relation.read_together >= ALWAYS_TOGETHER_SHARE * relation.child_reads
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


def could_embed(scan: Scan, relation: Relation) -> bool:
    """Whether parents have few children, to which nobody else refers."""
    child = scan.collections[relation.child]
    if relation.many or relation.child == relation.parent or relation.key != "_id":
        return False
    if any(each.parent == relation.child for each in scan.relations):
        return False
    # A join table's rows have several parents; they belong to the one with the fewest children.
    siblings = [each for each in scan.relations if each.child == relation.child and not each.many]
    if relation != min(siblings, key=lambda each: (each.children.maximum, each.path)):
        return False
    # What expires by itself cannot do so inside another document.
    expires = any(index.expires for index in child.indexes)
    # The workload may show that children are mostly read without their parent.
    reads = relation.child_reads
    read_alone = reads >= READS_MIN and relation.read_together < READ_TOGETHER_SHARE_MIN * reads
    if expires or has_own_key(child) or read_alone:
        return False
    return decide(Relationship.of(relation, child)).choice == "embed"


def has_own_key(facts: CollectionFacts) -> bool:
    """Whether its documents are looked up by a unique key beside their id."""
    return any(index.unique and index.fields != ("_id",) and len(index.keys) == 1 for index in facts.indexes)
