"""`treadle tree`: a model's tree, drawn, folded to a width and a depth."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from bson import json_util
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree as Drawing

from treadle.errors import UsageError
from treadle.patterns.tree import reads
from treadle.patterns.tree.fields import Tree, node_missing
from treadle.patterns.tree.moves import tree_of
from treadle.plan import Plan, Raw, find_one
from treadle.query.paths import resolve, value_at
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store

# Fields that usually say what a node is called.
LABELS = ("name", "title", "label", "slug")


@dataclass(slots=True)
class Branch:
    """A node as it is drawn: how many are below it, and how many of its children are folded away."""

    id: Any
    label: str
    below: int
    children: list[Branch] = field(default_factory=list)
    folded: int = 0


def tree(
    store: Store | AsyncStore, name: str, depth: int, width: int, label: str | None, root: str | None
) -> list[Branch]:
    """The branches to draw."""
    if depth < 0 or width < 1:
        raise UsageError("--depth is a whole number from 0, --width from 1", code="filter-invalid")
    known = {model.__name__: entry for model, entry in store.graph.entries.items()}
    if name not in known:
        raise UsageError(
            f"the store has no model {name!r}; it has {', '.join(sorted(known))}", code="model-unknown"
        )
    bound = tree_of(known[name])
    plan = outline(bound, depth, width, _label_path(bound, label), root)
    if isinstance(store, Store):
        return store.runner.run(plan)

    async def waited() -> list[Branch]:
        try:
            return await store.runner.run(plan)
        finally:
            await store.close()

    return asyncio.run(waited())


def _label_path(tree: Tree, label: str | None) -> list[str]:
    codec = tree.entry.codec
    if label is not None:
        return resolve(codec, label, "--label", "source-field-missing").stored.split(".")
    if tree.segment is not None:
        return tree.segment.split(".")
    return next((codec.by_name[name].stored for name in LABELS if name in codec.by_name), "_id").split(".")


def outline(tree: Tree, depth: int, width: int, label: list[str], root: str | None) -> Plan[list[Branch]]:
    """The first levels of a tree, the first children of each node, and counts of all."""
    if root is not None:
        key = tree.entry.identity(root)
        node = yield from find_one(tree.entry.collection, {"_id": {"$eq": key}})
        if node is None:
            raise node_missing(tree, key)
        return [(yield from _branch(tree, node, depth, width, label))]
    nodes = yield from _listed(tree, (yield from reads.roots(tree, limit=width + 1)))
    branches = []
    for node in nodes[:width]:
        branches.append((yield from _branch(tree, node, depth, width, label)))
    if len(nodes) > width:
        total = yield from reads.count(tree)
        shown = sum(1 + branch.below for branch in branches)
        branches.append(Branch(None, f"more roots, with {total - shown:,} nodes", 0))
    return branches


def _branch(tree: Tree, node: Raw, depth: int, width: int, label: list[str]) -> Plan[Branch]:
    below = yield from reads.count(tree, node["_id"])
    branch = Branch(node["_id"], str(value_at(node, label)), below)
    if not below or not depth:
        branch.folded = below
        return branch
    children = yield from _listed(tree, (yield from reads.children(tree, node["_id"], limit=width + 1)))
    for child in children[:width]:
        branch.children.append((yield from _branch(tree, child, depth - 1, width, label)))
    if len(children) > width:
        branch.folded = below - sum(1 + child.below for child in branch.children)
    return branch


def _listed(tree: Tree, stream: Any) -> Plan[list[Raw]]:
    if isinstance(stream, list):
        return stream
    found: list[Raw] = yield stream
    return found


def show(branches: list[Branch], name: str, console: Console) -> None:
    """Draw the branches; counts are of all nodes below."""
    if not branches:
        console.print(f"There is no {name}.")
        return
    drawing = Drawing(escape(name))
    for branch in branches:
        _draw(drawing, branch)
    console.print(drawing)


def _draw(above: Drawing, branch: Branch) -> None:
    if branch.id is None:
        above.add(f"[dim]… {escape(branch.label)}[/dim]")
        return
    count = f" [dim]({branch.below:,})[/dim]" if branch.below else ""
    drawn = above.add(escape(_one_line(branch.label)) + count)
    for child in branch.children:
        _draw(drawn, child)
    if branch.folded:
        drawn.add(f"[dim]… {branch.folded:,} more[/dim]")


def _one_line(text: str) -> str:
    # Whatever the data holds, it must not steer the terminal.
    return "".join(character if character.isprintable() else "�" for character in text)


def as_json(branches: list[Branch]) -> str:
    """The same as Extended JSON."""
    return json_util.dumps(
        [_json(branch) for branch in branches if branch.id is not None],
        json_options=json_util.RELAXED_JSON_OPTIONS,
        indent=2,
    )


def _json(branch: Branch) -> Raw:
    return {
        "id": branch.id,
        "label": branch.label,
        "below": branch.below,
        "folded": branch.folded,
        "children": [_json(child) for child in branch.children],
    }
