"""`treadle tree`: a model's tree, drawn, folded to a width and a depth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.application import models_named, open_store
from treadle.cli.options import AppOption, JsonOption
from treadle.cli.output import print_extended_json, say, stdout
from treadle.errors import UsageError
from treadle.model.shown import shown

if TYPE_CHECKING:
    from rich.tree import Tree as Drawing

    from treadle.patterns.tree.fields import Tree
    from treadle.plan import Plan, Raw

# Fields that usually hold the name of a node.
LABELS = ("name", "title", "label", "slug")


@dataclass(slots=True)
class Branch:
    """A node as it is drawn: how many nodes are below it, and how many of those are folded away."""

    id: Any
    label: str
    below: int
    folded: int = 0
    children: list[Branch] = field(default_factory=list)


def tree(
    app_name: AppOption,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model whose tree to draw.")],
    depth: Annotated[int, typer.Option("--depth", help="How many levels below a root.")] = 3,
    width: Annotated[int, typer.Option("--width", help="How many children of a node.")] = 10,
    root: Annotated[
        str | None, typer.Option("--root", metavar="ID", help="Only below this node.", show_default=False)
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="FIELD", help="What to call a node.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a tree, with counts of all nodes below each; the rest is folded. Writes nothing.

    \b
    Example:
      treadle tree --app shop.models:store Category --depth 2
    """
    from treadle.patterns.tree.moves import tree_of

    if depth < 0 or width < 1:
        raise UsageError("--depth is a whole number from 0, --width from 1", code="filter-invalid")
    with open_store(app_name) as (store, call):
        (named,) = models_named(store, [model])
        bound = tree_of(store.graph.entry(named))
        branches = call(store.runner.run, outline(bound, depth, width, _label_path(bound, label), root))
    if as_json:
        print_extended_json([asdict(branch) for branch in branches if branch.id is not None])
    else:
        show(branches, model)


def _label_path(tree: Tree, label: str | None) -> str:
    from treadle.query.paths import resolve

    codec = tree.entry.codec
    if label is not None:
        return resolve(codec, label, "--label", "source-field-missing").stored
    if tree.segment is not None:
        return tree.segment
    return next((codec.by_name[name].stored for name in LABELS if name in codec.by_name), "_id")


def outline(tree: Tree, depth: int, width: int, label: str, root: str | None) -> Plan[list[Branch]]:
    """The first levels of a tree, the first children of each node, and counts of all."""
    from treadle.patterns.tree import reads
    from treadle.patterns.tree.fields import node_missing
    from treadle.plan import find_one

    if root is not None:
        key = tree.entry.identity(root)
        node = yield from find_one(tree.entry.collection, {"_id": {"$eq": key}})
        if node is None:
            raise node_missing(tree, key)
        return [(yield from _branch(tree, node, depth, width, label))]
    nodes = yield from _nodes((yield from reads.roots(tree, limit=width + 1)))
    branches = []
    for node in nodes[:width]:
        branches.append((yield from _branch(tree, node, depth, width, label)))
    if len(nodes) > width:
        total = yield from reads.count(tree)
        drawn = sum(1 + branch.below for branch in branches)
        branches.append(Branch(None, f"more roots, with {total - drawn:,} nodes", 0))
    return branches


def _branch(tree: Tree, node: Raw, depth: int, width: int, label: str) -> Plan[Branch]:
    from treadle.patterns.tree import reads
    from treadle.query.paths import value_at

    below = yield from reads.count(tree, node["_id"])
    branch = Branch(node["_id"], str(value_at(node, label)), below)
    if not below or not depth:
        branch.folded = below
        return branch
    children = yield from _nodes((yield from reads.children(tree, node["_id"], limit=width + 1)))
    for child in children[:width]:
        branch.children.append((yield from _branch(tree, child, depth - 1, width, label)))
    if len(children) > width:
        branch.folded = below - sum(1 + child.below for child in branch.children)
    return branch


def _nodes(stream: Any) -> Plan[list[Raw]]:
    nodes: list[Raw] = stream if isinstance(stream, list) else (yield stream)
    return nodes


def show(branches: list[Branch], name: str) -> None:
    """Draw the branches; counts are of all nodes below."""
    from rich.markup import escape
    from rich.tree import Tree as Drawing

    if not branches:
        say(f"There is no {name}.")
        return
    drawing = Drawing(escape(name))
    for branch in branches:
        _draw(drawing, branch)
    stdout().print(drawing)


def _draw(above: Drawing, branch: Branch) -> None:
    from rich.markup import escape

    if branch.id is None:
        above.add(f"[dim]… {escape(shown(branch.label))}[/dim]")
        return
    count = f" [dim]({branch.below:,})[/dim]" if branch.below else ""
    node = above.add(escape(shown(branch.label)) + count)
    for child in branch.children:
        _draw(node, child)
    if branch.folded:
        node.add(f"[dim]… {branch.folded:,} more[/dim]")
