"""Updates of nodes that are stored: each by its own expressions, with what follows from them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.pipelines import TargetUpdate, derivation, store_derived, update_pipeline
from treadle.engine.references import follow_own
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.reads import nodes_by_key
from treadle.patterns.tree.segments import split
from treadle.plan import Plan, Raw, find, update_many
from treadle.plan.server_errors import DUPLICATE_KEY, refusals
from treadle.query.keys import freeze
from treadle.query.paths import overlap

# A length for $slice that takes the rest of any array.
_ALL = 1_000_000_000
NO_INDEXES: Mapping[Any, int] = {}


def rewrite(tree: Tree, updates: Sequence[tuple[Any, Raw]], changes: Changes) -> Plan[None]:
    """Set fields of nodes to expressions, each in its own way, and note the changes."""
    if updates:
        chosen = {"_id": {"$in": [key for key, _ in updates]}}
        each = [TargetUpdate(key, sets) for key, sets in updates]
        yield from _update(tree, chosen, store_derived(tree.entry, each), changes)


def rewrite_all(tree: Tree, chosen: Raw, sets: Raw, changes: Changes) -> Plan[None]:
    """Set fields of all nodes that meet a condition to the same expressions, and note the changes."""
    update = update_many(tree.collection, tree.living(chosen), update_pipeline(tree.entry, sets, {}))
    with segment_errors(tree):
        yield from _update(tree, chosen, update, changes)


def _update(tree: Tree, chosen: Raw, update: Plan[Any], changes: Changes) -> Plan[None]:
    """Perform an update of these nodes; note it where others, or the nodes' own copies, follow from it."""
    entry = tree.entry
    derived = derivation(entry)
    watched = entry.effects.followed if derived.feeds or derived.records else set()
    stored = tree.roles.values()
    feeds = watched is None or any(overlap(one, other) for one in watched for other in stored)
    copies = any(overlap(rule.on.path, path) for rule in derived.copies for path in stored)
    if not feeds and not copies:
        yield from update
        return
    befores = yield from find(entry.collection, tree.living(chosen))
    keys = [each["_id"] for each in befores]
    yield from update
    afters = yield from nodes_by_key(tree, keys)
    pairs = [(each, afters[freeze(each["_id"])]) for each in befores]
    finals = (yield from follow_own(entry, pairs)) if copies else [after for _, after in pairs]
    yield from changes.add(entry, zip(befores, finals, strict=True))


def new_path(tree: Tree, old: Any, new: Any) -> Raw:
    """The path of a node below the one with the path `old`, which becomes `new`; an expression."""
    if tree.path is None or split(old) is None:
        return {}
    stored = f"${tree.path}"
    rest = {"$substrBytes": [stored, len(old.encode()), -1]}
    begins = {"$eq": [{"$indexOfBytes": [{"$ifNull": [stored, ""]}, {"$literal": old}]}, 0]}
    return {tree.path: {"$cond": [begins, {"$concat": [{"$literal": new}, rest]}, stored]}}


def listing(tree: Tree, keys: Sequence[Any], at: Mapping[Any, int] = NO_INDEXES) -> Raw:
    """The fields of a parent that lists these as well: last, or at the index given for a frozen id.

    Without an index, a child that is listed already keeps its place. An index
    beyond the end means last.
    """
    stored = tree.roles["children"]
    present = {"$ifNull": [f"${stored}", []]}
    indexed = [{"key": key, "at": min(at[freeze(key)], _ALL)} for key in keys if freeze(key) in at]
    last = [key for key in keys if freeze(key) not in at]
    new = {"$filter": {"input": {"$literal": last}, "cond": {"$not": {"$in": ["$$this", present]}}}}
    whole: Raw = {"$concatArrays": [present, new]}
    if indexed:
        others = {"$filter": {"input": "$$value", "as": "each", "cond": {"$ne": ["$$each", "$$this.key"]}}}
        head, tail = {"$slice": ["$$others", "$$this.at"]}, {"$slice": ["$$others", "$$this.at", _ALL]}
        step = {"$concatArrays": [head, ["$$this.key"], tail]}
        whole = {
            "$reduce": {
                "input": {"$literal": indexed},
                "initialValue": whole,
                "in": {"$let": {"vars": {"others": others}, "in": step}},
            }
        }
    return {stored: whole}


def unlisting(tree: Tree, keys: Sequence[Any], instead: Sequence[Any] = ()) -> Raw:
    """The fields of a parent that lists these no more; `instead` takes the place of the first."""
    stored = tree.roles["children"]
    present: Any = {"$ifNull": [f"${stored}", []]}
    if instead:
        place = {"$indexOfArray": [present, {"$literal": keys[0]}]}
        head = {"$cond": [{"$gt": [place, 0]}, {"$slice": [present, 0, {"$max": [place, 1]}]}, []]}
        tail = {"$slice": [present, {"$max": [place, 0]}, _ALL]}
        present = {"$concatArrays": [head, {"$literal": list(instead)}, tail]}
    gone = {"$in": ["$$this", {"$literal": list(keys)}]}
    return {stored: {"$filter": {"input": present, "cond": {"$not": [gone]}}}}


def segment_error(tree: Tree, error: Exception) -> DataError | None:
    """The clear error where two siblings would have the same segment."""
    about = tree.path is not None and isinstance(error, OperationFailure) and _about_path(tree, error)
    return segment_taken(tree) if about else None


@contextmanager
def segment_errors(tree: Tree) -> Generator[None]:
    """Raise the clear error in place of the server's."""
    try:
        yield
    except OperationFailure as error:
        clear = segment_error(tree, error)
        if clear is None:
            raise
        raise clear from error


def _about_path(tree: Tree, error: OperationFailure) -> bool:
    taken = [each for each in refusals(error) if each.get("code") == DUPLICATE_KEY]
    return any(tree.path in (each.get("keyPattern") or {}) for each in taken)


def segment_taken(tree: Tree) -> DataError:
    return DataError(
        f"there is a {tree.entry.model.__name__} with this path already; siblings need different "
        f"{tree.segment!r}",
        code="tree-segment-taken",
    )
