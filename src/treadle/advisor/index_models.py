"""Declarations of a collection with its indexes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.advisor.declare import declaration, quote
from treadle.advisor.facts import CollectionFacts, IndexFacts

INDEXES_SHOWN_MAX = 64


def declare_without(facts: CollectionFacts, dropped: Iterable[str]) -> str:
    """The model with the indexes that stay, declared as they are.

    An index that the facts do not describe in full is left to the database.
    """
    names = {"_id_", *dropped}
    kept = [index for index in facts.indexes if index.name not in names and _is_plain(index)]
    models = [model(index.keys, index.name, ", unique=True" if index.unique else "") for index in kept]
    return declare_indexes(facts, models)


def declare_indexes(facts: CollectionFacts, models: Sequence[str]) -> str:
    lines = "".join(f"    {line},\n" for line in models[:INDEXES_SHOWN_MAX])
    return declaration(facts, [f"indexes=[\n{lines}]"] if lines else [])


def _is_plain(index: IndexFacts) -> bool:
    return not (index.special or index.partial or index.expires or index.collation_strength)


def free_name(facts: CollectionFacts, keys: Sequence[tuple[str, int]]) -> str | None:
    """A name for a new index; None where the default one is free."""
    default = name = "_".join(f"{path}_{way}" for path, way in keys)
    taken = {index.name for index in facts.indexes}
    number = 2
    while name in taken:
        name, number = f"{default}_{number}", number + 1
    return None if name == default else name


def model(keys: Iterable[tuple[str, int]], name: str | None = None, options: str = "") -> str:
    """The source of an `IndexModel`."""
    pairs = ", ".join(f"({quote(path)}, {way})" for path, way in keys)
    return f"IndexModel([{pairs}]{'' if name is None else f', name={quote(name)}'}{options})"
