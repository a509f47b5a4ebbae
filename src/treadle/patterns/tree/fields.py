"""What a tree's declaration says: which stored field has which part in it.

A representation is a set of roles, and every role is one field of the node:
`parent`, `ancestors` (root first), `path` with its `segment`, `children`. A
model may declare several representations, for example while it changes from one to
another; then the first is the truth and is read, and the others follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pymongo import ASCENDING, IndexModel

from treadle.errors import DataError, DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Owned
from treadle.graph.rule import REVISION, ClassPlace, Models, Place, Reads, Rule, Storage
from treadle.model.bson_types import RESERVED
from treadle.model.codec import StoredField, codec_of
from treadle.patterns.tree.segments import check_segment
from treadle.plan import Plan, Raw
from treadle.query.filters import Sort, sort_keys
from treadle.query.paths import Path, getter, model_of, overlap, resolve

# Nodes that are checked at a time.
TREE_CHECK_MAX = 10_000

Role: TypeAlias = Literal["parent", "ancestors", "path", "segment", "children"]


class _Unstated:
    def __repr__(self) -> str:
        return "UNSTATED"


UNSTATED: Final = _Unstated()
"""Where a node goes is for its own fields to say."""


class Stated(NamedTuple):
    """Where a caller wants a new node: below which parent, and at which index among its children."""

    parent: Any
    at: int | None


# The path that the descendants of a node still have while a large move of it is under way.
MOVING = f"{RESERVED}.moving"
# The parent that a deleted node had, where its own fields do not say so.
ABOVE = f"{RESERVED}.above"


@dataclass(frozen=True)
class TreePlace(ClassPlace):
    """The place of a declaration that stands on the class itself."""

    @property
    def label(self) -> str:
        return f"{self.entry.model.__name__} (tree=)"


class TreeRule(Rule):
    """One representation of a tree, with the fields of its roles."""

    tree: Tree

    def __init__(self, place: Place, graph: Models, roles: Mapping[Role, str]) -> None:
        super().__init__(place)
        self.roles: dict[Role, Path] = {}
        for role, name in roles.items():
            self.roles[role] = _bound(place, graph, role, name)
        stored = [path.stored for path in self.roles.values()]
        if any(overlap(one, other) for n, one in enumerate(stored) for other in stored[n + 1 :]):
            raise DeclarationError(
                f"{place.label} names one field for two parts of a tree; each needs its own",
                code="tree-field-type",
            )
        self.path = stored[0]

    def reads(self) -> Reads:
        return {self.target.collection: {"_id"}}

    def owns(self) -> Sequence[Owned]:
        tree = f"store.tree({self.target.model.__name__})"
        move = f"; move the node with {tree}.move(id, parent)"
        rename = f"; the paths below it follow from it: rename the node with {tree}.rename(id, segment)"
        return [
            Owned(
                path.stored,
                rename if role == "segment" else move,
                insert_may_set=role in ("parent", "segment"),
                shared=True,
            )
            for role, path in self.roles.items()
        ]

    def storage(self) -> Storage:
        # With the id, so that pages of descendants and siblings come in order from the index.
        listed = [self.roles[role] for role in ("parent", "ancestors", "children") if role in self.roles]
        keys = [[(path.stored, ASCENDING), ("_id", ASCENDING)] for path in listed]
        return Storage(indexes=[(self.target, IndexModel(each)) for each in keys])


def _bound(place: Place, graph: Models, role: Role, name: Any) -> Path:
    entry = place.entry
    if not isinstance(name, str):
        raise DeclarationError(
            f"{place.label} has {role}={name!r}; it takes the name of a field", code="tree-field-missing"
        )
    path = resolve(entry.codec, name, f"{place.label} {role}=", "tree-field-missing")
    field = _last_field(entry, path)
    if any(step.array for step in path.steps[:-1]):
        raise _mistyped(entry, role, name, "lies in a list, where a node would have many")
    if role in ("ancestors", "children"):
        if field.shape.kind != "list":
            raise _mistyped(entry, role, name, "is not a list of ids")
        graph.check_reference(path, entry, f"{place.label} {role}=")
    elif role == "parent":
        if path.steps[-1].array or not field.shape.optional:
            raise _mistyped(entry, role, name, "cannot be None, as the parent of a root is")
        graph.check_reference(path, entry, f"{place.label} {role}=")
    elif path.steps[-1].array or path.shape.kind != "scalar" or path.shape.python is not str:
        raise _mistyped(entry, role, name, "is not text")
    if path.stored == "_id":
        raise _mistyped(entry, role, name, "is the node's own id")
    return path


def _mistyped(entry: ModelEntry, role: str, name: str, wrong: str) -> DeclarationError:
    return DeclarationError(
        f"{entry.model.__name__} has a tree with {role}={name!r}, but {entry.model.__name__}.{name} {wrong}",
        code="tree-field-type",
    )


def _last_field(entry: ModelEntry, path: Path) -> StoredField:
    codec = entry.codec
    for step in path.steps[:-1]:
        model = model_of(codec.by_name[step.name].shape)
        assert model is not None
        codec = codec_of(model)
    return codec.by_name[path.steps[-1].name]


class Tree:
    """The tree of one model: all its representations, with stored paths."""

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.collection = entry.collection
        self.rules: list[TreeRule] = []
        # Finishes a move or removal that goes in chunks; set when the first rule is bound.
        self.finish: Callable[[], Plan[None]]
        # Stored paths; those of the representation that is read; and the role from which all others follow.
        self.roles: dict[Role, str] = {}
        self.lead: dict[Role, Path] = {}
        self.truth: Literal["parent", "path", "children"] = "children"
        # How siblings are read where the caller does not say.
        self.sort: Sort = "_id"

    def sort_by(self, sort: Sort | None, label: str) -> None:
        """Take in how siblings are sorted, which one of the representations says."""
        if sort is None:
            return
        if "children" in self.lead:
            raise DeclarationError(
                f"{label} has sort=, but child lists are in an order of their own; "
                "leave it out, or use AncestorArray or ParentReference",
                code="tree-declaration",
            )
        sort_keys(sort, self.entry.paths.fields)
        self.sort = sort

    def add(self, rule: TreeRule) -> None:
        for role, path in rule.roles.items():
            if self.roles.setdefault(role, path.stored) != path.stored:
                raise DeclarationError(
                    f"{self.entry.model.__name__} names {self.roles[role]!r} and {path.stored!r} as the "
                    f"{role} of one tree; its representations share their fields",
                    code="tree-declaration",
                )
        if any(other.pattern == rule.pattern for other in self.rules):
            raise DeclarationError(
                f"{self.entry.model.__name__} declares {rule.pattern} twice", code="tree-declaration"
            )
        self.rules.append(rule)
        self.lead = self.rules[0].roles
        if "parent" in self.lead or "path" in self.lead:
            self.truth = "parent" if "parent" in self.lead else "path"
        self.parent, self.ancestors = self.roles.get("parent"), self.roles.get("ancestors")
        self.path, self.segment = self.roles.get("path"), self.roles.get("segment")
        self.children = self.roles.get("children")
        self._getters = {role: getter(path) for role, path in self.roles.items()}
        # What plans read of a node.
        self.projection: Raw = dict.fromkeys(["_id", REVISION, MOVING, *self.roles.values()], 1)
        if self.children and self.truth == "path":
            raise DeclarationError(
                f"{self.entry.model.__name__} is to have its child lists from its paths; add parent= to "
                "MaterializedPath first, and rebuild",
                code="tree-declaration",
            )

    def get(self, raw: Raw | None, role: Role) -> Any:
        """The value of a role in a stored node."""
        return None if raw is None or role not in self.roles else self._getters[role](raw)

    def listed_children(self, raw: Raw | None) -> list[Any]:
        """Return the ids in a node's child list.

        Raises `DataError` where the tree is defined by these lists and another program stored something
        else; a derived list is empty then, and will be repaired.
        """
        children = self.get(raw, "children")
        if isinstance(children, list):
            return children
        if children is None or self.truth != "children":
            return []
        raise DataError(
            f"the child list of a stored {self.entry.model.__name__} is {type(children).__name__}, not a "
            "list; repair the document",
            code="document-invalid",
        )

    @property
    def alive(self) -> Raw:
        """What a node must have that was not deleted; nothing where deleted nodes are not kept."""
        return {} if self.entry.paths.deletion is None else {self.entry.paths.deletion: None}

    def living(self, condition: Raw) -> Raw:
        """A condition on the nodes of the tree; those that are deleted and still stored are none."""
        return condition if self.entry.paths.deletion is None else {**condition, **self.alive}

    def segment_of(self, raw: Raw) -> str:
        """The node's own segment, or an error that says why it has none."""
        field = self.segment
        assert field is not None
        return check_segment(self.get(raw, "segment"), f"{self.entry.model.__name__}.{field}")

    def pattern_of(self, stored: str) -> str:
        """The pattern that a finding about a stored field belongs to."""
        return next(rule.pattern for rule in self.rules if any(owned.path == stored for owned in rule.owns()))

    def declares(self, rule: TreeRule) -> bool:
        """Whether a rule is the one that answers for what all representations share."""
        return self.rules[0] is rule

    def unique_indexes(self) -> list[IndexModel]:
        """Two nodes with one path could not be told apart."""
        if self.path is None:
            return []
        # Not of documents that have no path yet.
        beyond = self.living({self.path: {"$gt": ""}})
        return [IndexModel([(self.path, ASCENDING)], unique=True, partialFilterExpression=beyond)]


def node_missing(tree: Tree, key: Any) -> DataError:
    return DataError(
        f"{tree.entry.model.__name__} {key!r} is not in the tree; somebody may have removed it",
        code="tree-node-missing",
    )


def parent_missing(tree: Tree, key: Any) -> DataError:
    restored = ", or restore it" if tree.alive else ""
    return DataError(
        f"there is no {tree.entry.model.__name__} {key!r} to be the parent; insert it first{restored}",
        code="tree-parent-missing",
    )


def not_rebuilt(tree: Tree, key: Any, role: Role) -> DataError:
    return DataError(
        f"{tree.entry.model.__name__} {key!r} has no {tree.roles[role]!r} yet; run `treadle rebuild`, or "
        f"store.rebuild({tree.entry.model.__name__})",
        code="tree-not-rebuilt",
    )
