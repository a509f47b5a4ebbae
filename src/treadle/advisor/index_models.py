"""Declarations of a collection with its indexes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.advisor.declare import Source, quoted
from treadle.advisor.facts import CollectionFacts, IndexFacts

INDEXES_SHOWN_MAX = 64


def keeping(facts: CollectionFacts, dropped: frozenset[str]) -> str:
    """The model with the indexes that stay; those that exist are declared as they are."""
    kept = [index for index in facts.indexes if index.name not in dropped and index.name != "_id_"]
    # What cannot be told in full from the facts is left to the database, where it stays.
    return declared(facts, [_kept(index) for index in kept if _is_plain(index)])


def declared(facts: CollectionFacts, indexes: Iterable[str]) -> str:
    source = Source()
    lines = list(indexes)[:INDEXES_SHOWN_MAX]
    keywords: list[str] = []
    if lines:
        source.use("pymongo", "IndexModel")
        keywords.append("indexes=[\n" + "".join(f"    {line},\n" for line in lines) + "]")
    source.document(facts, keywords=keywords)
    return source.text()


def _is_plain(index: IndexFacts) -> bool:
    return not (index.special or index.partial or index.expires or index.collation_strength)


def _kept(index: IndexFacts) -> str:
    return model(index.keys, index.name, ", unique=True" if index.unique else "")


def free_name(facts: CollectionFacts, keys: Sequence[tuple[str, int]]) -> str | None:
    """A name for a new index; None where the usual one is still free."""
    usual = name = "_".join(f"{path}_{way}" for path, way in keys)
    taken = {index.name for index in facts.indexes}
    number = 2
    while name in taken:
        name, number = f"{usual}_{number}", number + 1
    return None if name == usual else name


def model(keys: Iterable[tuple[str, int]], name: str | None = None, options: str = "") -> str:
    parts = ", ".join(f"({quoted(path)}, {way})" for path, way in keys)
    named = "" if name is None else f", name={quoted(name)}"
    return f"IndexModel([{parts}]{named}{options})"
