"""What a tree's declaration says: which stored field has which part in it.

A representation is a set of roles, and every role is one field of the node:
`parent`, `ancestors` (root first), `path` with its `segment`, `children`. A
model may declare several representations, for example while it changes from one to
another; then the first is the truth and is read, and the others follow it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from pymongo import ASCENDING, IndexModel

from treadle.errors import DataError, DeclarationError
from treadle.graph.pattern import REVISION, ClassPlace, Entry, Models, Place, Rule
from treadle.model.bson_types import RESERVED
from treadle.model.codec import StoredField, codec_of
from treadle.patterns.tree.segments import check_segment
from treadle.plan import Raw
from treadle.query.paths import Path, getter, model_of, overlap, resolve, value_at
from treadle.query.safety import Sort, sort_keys
from treadle.values import frozen

Role: TypeAlias = Literal["parent", "ancestors", "path", "segment", "children"]


class _Unstated:
    def __repr__(self) -> str:
        return "UNSTATED"


UNSTATED: Final = _Unstated()
"""Where a node goes is for its own fields to say."""

# The path that the descendants of a node still have while a large move of it is under way.
MOVING = f"{RESERVED}.moving"
# The parent that a deleted node had, where its own fields do not say so.
ABOVE = f"{RESERVED}.above"


@frozen
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

    def watches(self) -> Mapping[str, set[str] | None]:
        return {self.target.collection: {"_id"}}

    def maintained(self) -> set[str]:
        shared = (self.tree.order, self.tree.within) if self.tree.declares(self) else ()
        return {path.stored for path in self.roles.values()} | {each for each in shared if each is not None}

    def shares(self, path: str, other: Rule) -> bool:
        return isinstance(other, TreeRule)

    def brought(self) -> set[str]:
        own = {self.roles[role].stored for role in ("parent", "segment") if role in self.roles}
        return own if self.tree.within is None else own | {self.tree.within}

    def advice(self, maintained: str) -> str:
        tree = f"store.tree({self.target.model.__name__})"
        segment = self.roles.get("segment")
        if segment is not None and segment.stored == maintained:
            return f"; the paths below it follow from it: rename the node with {tree}.rename(id, segment)"
        if maintained == self.tree.order:
            return f"; move the node with {tree}.move(id, before=other)"
        if maintained == self.tree.within:
            return "; a node stays in its tree: insert it anew in the other one, and remove it here"
        return f"; move the node with {tree}.move(id, parent)"

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        # With the id, so that pages of descendants and siblings come in order from the index.
        listed = [self.roles[role] for role in ("parent", "ancestors", "children") if role in self.roles]
        keys = [[(path.stored, ASCENDING), ("_id", ASCENDING)] for path in listed]
        if self.tree.order is not None and self.tree.parent is not None and self.tree.declares(self):
            keys.append([(self.tree.parent, ASCENDING), (self.tree.order, ASCENDING), ("_id", ASCENDING)])
        if self.tree.within is not None and self.tree.parent is not None and self.tree.declares(self):
            # The roots of each tree.
            roots = [self.tree.within, self.tree.parent, self.tree.order, "_id"]
            keys.append([(path, ASCENDING) for path in roots if path is not None])
        return [(self.target, IndexModel(each)) for each in keys]


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


def _mistyped(entry: Entry[Any], role: str, name: str, wrong: str) -> DeclarationError:
    return DeclarationError(
        f"{entry.model.__name__} has a tree with {role}={name!r}, but {entry.model.__name__}.{name} {wrong}",
        code="tree-field-type",
    )


def _last_field(entry: Entry[Any], path: Path) -> StoredField:
    codec = entry.codec
    for step in path.steps[:-1]:
        model = model_of(codec.by_name[step.name].shape)
        assert model is not None
        codec = codec_of(model)
    return codec.by_name[path.steps[-1].name]


class Tree:
    """The tree of one model: all its representations, with stored paths.

    Where a field keeps several trees apart, it is about all of them, or with
    `of` confined to one.
    """

    def __init__(self, entry: Entry[Any]) -> None:
        self.entry = entry
        self.collection = entry.collection
        self.rules: list[TreeRule] = []
        # Stored paths; those of the representation that is read; and the role from which all others follow.
        self.roles: dict[Role, str] = {}
        self.lead: dict[Role, Path] = {}
        self.truth: Literal["parent", "path", "children"] = "children"
        # The stored path of the number by which siblings are in an order of their own.
        self.order: str | None = None
        # How siblings are read where the caller does not say.
        self.sort: Sort = "_id"
        # The stored path of the field that keeps several trees apart; and the condition that tells this one.
        self.within: str | None = None
        self.confined: Raw = {}

    def separate(self, within: str | None, label: str) -> None:
        """Take in the field that keeps several trees apart, which one of the representations names."""
        if within is None:
            return
        if not isinstance(within, str):
            raise DeclarationError(
                f"{label} has within={within!r}; it takes the name of a field", code="tree-field-missing"
            )
        path = resolve(self.entry.codec, within, f"{label} within=", "tree-field-missing")
        if path.in_array or path.shape.kind != "scalar":
            raise _mistyped(self.entry, "within", within, "is no single value, such as a text or an id")
        if path.stored == "_id":
            raise _mistyped(self.entry, "within", within, "is the node's own id")
        if any(overlap(path.stored, other) for other in self.roles.values()):
            raise _mistyped(self.entry, "within", within, "has another part in the tree")
        if self.within not in (None, path.stored):
            raise DeclarationError(
                f"{label} has within={within!r}, and another representation {self.within!r}; name one field",
                code="tree-declaration",
            )
        self.within = path.stored
        self.projection[path.stored] = 1

    def of(self, raw: Raw) -> Tree:
        """The one tree that a node stands in."""
        return self if self.within is None else self.confine(value_at(raw, self.within))

    def confine(self, value: Any) -> Tree:
        """The one tree whose nodes have this value."""
        assert self.within is not None
        own = copy.copy(self)
        own.confined = {self.within: {"$eq": value}}
        return own

    @property
    def value(self) -> Any:
        """What the nodes of the one tree have in common; UNSTATED where this is about all."""
        return self.confined[self.within]["$eq"] if self.within in self.confined else UNSTATED

    @property
    def lock(self) -> Any:
        """The id of the document that all moves of one tree share."""
        if self.within is None:
            return self.collection
        assert self.confined, "which of the trees is to be locked is not known"
        return {"collection": self.collection, "tree": self.value}

    def arrange(self, order: str | None, sort: Sort | None, label: str) -> None:
        """Take in how siblings are ordered, which one of the representations says."""
        if order is None and sort is None:
            return
        if order is not None and sort is not None:
            raise DeclarationError(
                f"{label} has order= and sort=; siblings have an order of their own, or are sorted: keep one",
                code="tree-declaration",
            )
        if self.children is not None and "children" in self.lead:
            raise DeclarationError(
                f"{label} has {'order' if order else 'sort'}=, but child lists are in an order of their own; "
                "leave it out, or use AncestorArray or ParentReference",
                code="tree-declaration",
            )
        if sort is not None:
            sort_keys(sort, self.entry.codec)
            self.sort = sort
            return
        if self.parent is None:
            raise DeclarationError(
                f"{label} has order={order!r}, for which nodes must name their parent; add parent=",
                code="tree-declaration",
            )
        path = resolve(self.entry.codec, str(order), f"{label} order=", "tree-field-missing")
        if path.in_array or path.shape.kind != "scalar" or path.shape.python is not int:
            raise _mistyped(self.entry, "order", str(order), "is no int")
        self.order = path.stored
        self.sort = [(path.stored, ASCENDING), ("_id", ASCENDING)]
        self.projection[path.stored] = 1

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
        shared = [each for each in (self.order, self.within) if each is not None]
        self.projection: Raw = dict.fromkeys(["_id", REVISION, MOVING, *self.roles.values(), *shared], 1)
        if self.children and self.truth == "path":
            raise DeclarationError(
                f"{self.entry.model.__name__} is to have its child lists from its paths; add parent= to "
                "MaterializedPath first, and rebuild",
                code="tree-declaration",
            )

    def get(self, raw: Raw | None, role: Role) -> Any:
        """The value of a role in a stored node."""
        return None if raw is None or role not in self.roles else self._getters[role](raw)

    @property
    def alive(self) -> Raw:
        """What a node must have that was not deleted; nothing where deleted nodes are not kept."""
        return {} if self.entry.tombstone is None else {self.entry.tombstone: None}

    def living(self, condition: Raw) -> Raw:
        """A condition on the nodes of the tree; those that are deleted and still stored are none."""
        if self.entry.tombstone is None and not self.confined:
            return condition
        return {**condition, **self.alive, **self.confined}

    def segment_of(self, raw: Raw) -> str:
        """The node's own segment, or an error that says why it has none."""
        field = self.segment
        assert field is not None
        return check_segment(self.get(raw, "segment"), f"{self.entry.model.__name__}.{field}")

    def pattern_of(self, stored: str) -> str:
        """The pattern that a finding about a stored field belongs to."""
        return next(rule.pattern for rule in self.rules if stored in rule.maintained())

    def declares(self, rule: TreeRule) -> bool:
        """Whether a rule is the one that answers for what all representations share."""
        return self.rules[0] is rule

    def unique_indexes(self) -> list[IndexModel]:
        """Two nodes with one path could not be told apart."""
        if self.path is None:
            return []
        # Not of documents that have no path yet.
        beyond = self.living({self.path: {"$gt": ""}})
        keys = [(each, ASCENDING) for each in (self.within, self.path) if each is not None]
        return [IndexModel(keys, unique=True, partialFilterExpression=beyond)]


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
