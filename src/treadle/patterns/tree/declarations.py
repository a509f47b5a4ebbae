"""The four declarations of a tree: which fields of a node hold its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.errors import DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import ClassPlace, Models, Pattern, Place
from treadle.model.codec import StoredField, codec_of
from treadle.patterns.tree.representations import (
    ByAncestors,
    ByChildren,
    ByParent,
    ByPath,
    ByPathAndParent,
    Representation,
)
from treadle.patterns.tree.rule import TreeRule
from treadle.patterns.tree.tree import Tree
from treadle.query.filters import Sort, sort_keys
from treadle.query.paths import Path, model_of, overlap, resolve


@dataclass(frozen=True)
class TreePlace(ClassPlace):
    """The place of a declaration that stands on the class itself."""

    @property
    def label(self) -> str:
        return f"{self.entry.model.__name__} (tree=)"


@dataclass(frozen=True, kw_only=True)
class TreePattern(Pattern):
    """The base of the four declarations; `sort` is how siblings are read unless a call says otherwise."""

    keyword: ClassVar[str | None] = "tree"

    sort: Sort | None = None

    def representation(self, fields: TreeFields) -> Representation:
        """Check the declared fields, and return what they make of a node."""
        raise NotImplementedError  # pragma: no cover

    def bind(self, place: Place, graph: Models) -> TreeRule:
        """Check the declaration; returns the rule that maintains the tree."""
        _refuse_others(place.entry)
        own = TreePlace(place.entry, place.owner, (), place.field, "tree")
        representation = self.representation(TreeFields(own, graph))
        if self.sort is not None:
            if isinstance(representation, ByChildren):
                raise DeclarationError(
                    f"{own.label} has sort=, but child lists are in an order of their own; leave it out, or "
                    "use AncestorArray or ParentReference",
                    code="tree-declaration",
                )
            sort_keys(self.sort, place.entry.paths.fields)
        return TreeRule(own, self.pattern, Tree(place.entry, representation, self.sort or "_id"))


def _refuse_others(entry: ModelEntry) -> None:
    """Refuse a tree of one kind, a second tree, and other ways to store the documents."""
    name = entry.model.__name__
    patterns = entry.model.__treadle__.patterns
    if entry.kinds.above:
        raise DeclarationError(
            f"{name} has tree=, and is a kind of {entry.kinds.root.model.__name__}; a tree has nodes of all "
            "kinds of its collection: declare it there",
            code="tree-declaration",
        )
    if len(patterns["tree"]) > 1:
        raise DeclarationError(
            f"{name} declares {len(patterns['tree'])} trees; its nodes hold their places in one way: keep "
            "one declaration",
            code="tree-declaration",
        )
    for keyword, declared in patterns.items():
        if keyword != "tree" and not all(each.beside for each in declared):
            raise DeclarationError(
                f"{name} has tree= and {keyword}=; a tree's nodes are plain documents of one model: drop one "
                "of the two, or keep the tree in a collection of its own",
                code="tree-declaration",
            )


# -- fields ------------------------------------------------------------------------------------------


class TreeFields:
    """The fields that a declaration names, checked one after another; their stored paths."""

    def __init__(self, place: Place, graph: Models) -> None:
        self.model = place.entry.model.__name__
        self.collection = place.entry.collection
        self._place = place
        self._graph = graph
        self._paths: list[str] = []

    def parent(self, name: str) -> str:
        """Return the stored path of the parent's id, which a root has not."""
        path = self._resolve("parent", name)
        if path.steps[-1].array or not _field_of(self._place.entry, path).shape.optional:
            raise self._mistyped("parent", name, "cannot be None, as the parent of a root is")
        self._graph.check_reference(path, self._place.entry, f"{self._place.label} parent=")
        return path.stored

    def ids(self, part: str, name: str) -> str:
        """Return the stored path of a list of ids."""
        path = self._resolve(part, name)
        if _field_of(self._place.entry, path).shape.kind != "list":
            raise self._mistyped(part, name, "is not a list of ids")
        self._graph.check_reference(path, self._place.entry, f"{self._place.label} {part}=")
        return path.stored

    def text(self, part: str, name: str) -> str:
        """Return the stored path of a text."""
        path = self._resolve(part, name)
        if path.steps[-1].array or path.shape.kind != "scalar" or path.shape.python is not str:
            raise self._mistyped(part, name, "is not text")
        return path.stored

    def _resolve(self, part: str, name: Any) -> Path:
        place = self._place
        if not isinstance(name, str):
            raise DeclarationError(
                f"{place.label} has {part}={name!r}; it takes the name of a field", code="tree-field-missing"
            )
        path = resolve(place.entry.codec, name, f"{place.label} {part}=", "tree-field-missing")
        if any(step.array for step in path.steps[:-1]):
            raise self._mistyped(part, name, "lies in a list, where a node would have many")
        if path.stored == "_id":
            raise self._mistyped(part, name, "is the node's own id")
        if any(overlap(path.stored, other) for other in self._paths):
            raise DeclarationError(
                f"{place.label} names one field for two parts of a tree; each needs its own",
                code="tree-field-type",
            )
        self._paths.append(path.stored)
        return path

    def _mistyped(self, part: str, name: str, wrong: str) -> DeclarationError:
        return DeclarationError(
            f"{self.model} has a tree with {part}={name!r}, but {self.model}.{name} {wrong}",
            code="tree-field-type",
        )


def _field_of(entry: ModelEntry, path: Path) -> StoredField:
    """Return the field in which a path ends."""
    codec = entry.codec
    for step in path.steps[:-1]:
        model = model_of(codec.by_name[step.name].shape)
        assert model is not None
        codec = codec_of(model)
    return codec.by_name[path.steps[-1].name]


# -- the declarations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class AncestorArray(TreePattern):
    """A tree whose nodes name their parent, and list all ancestors in the field `ancestors`."""

    pattern: ClassVar[str] = "ancestor-array"

    parent: str
    ancestors: str

    def representation(self, fields: TreeFields) -> Representation:
        parent, ancestors = fields.parent(self.parent), fields.ids("ancestors", self.ancestors)
        return ByAncestors(fields.model, fields.collection, parent, ancestors)


@dataclass(frozen=True)
class ParentReference(TreePattern):
    """A tree whose nodes name their parent in the field `parent`; None is a root."""

    pattern: ClassVar[str] = "parent-reference"

    parent: str

    def representation(self, fields: TreeFields) -> Representation:
        return ByParent(fields.model, fields.collection, fields.parent(self.parent))


@dataclass(frozen=True)
class ChildReferences(TreePattern):
    """A tree whose nodes list their children in the field `children`."""

    pattern: ClassVar[str] = "child-references"

    children: str

    def representation(self, fields: TreeFields) -> Representation:
        return ByChildren(fields.model, fields.collection, fields.ids("children", self.children))


@dataclass(frozen=True)
class MaterializedPath(TreePattern):
    """A tree whose nodes hold their whole path; `segment` is the field with a node's own part of it.

    With `parent=` the node holds its parent's id as well. Then children and
    roots are looked up instead of searched, and `repair` can derive the paths.
    """

    pattern: ClassVar[str] = "materialized-path"

    path: str
    segment: str
    parent: str | None = None

    def representation(self, fields: TreeFields) -> Representation:
        path, segment = fields.text("path", self.path), fields.text("segment", self.segment)
        if self.parent is None:
            return ByPath(fields.model, fields.collection, path, segment)
        return ByPathAndParent(fields.model, fields.collection, path, segment, fields.parent(self.parent))
