"""How large the collections of a trial are, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo.database import Database

from treadle.advisor.loop.results import Storage

# Bytes of the documents and of the indexes, and the names of the indexes.
Sizes = tuple[int, int, list[str]]


def compared_storage(one: Mapping[str, Sizes], after: Database[Any]) -> Storage:
    """Sizes of the collections concerned, in which those that the pattern made are counted too."""
    made = [
        name
        for name in after.list_collection_names(filter={"type": "collection"})
        if not name.startswith(("system.", "treadle."))
    ]
    checkpoint(after)
    other = {name: collection_sizes(after, name) for name in made}
    first, second = (
        {f"{name}.{index}" for name, (_, _, indexes) in sizes.items() for index in indexes}
        for sizes in (one, other)
    )
    return Storage(
        sum(each[0] for each in one.values()),
        sum(each[0] for each in other.values()),
        sum(each[1] for each in one.values()),
        sum(each[1] for each in other.values()),
        tuple(sorted(second - first)),
        tuple(sorted(first - second)),
    )


def checkpoint(database: Database[Any]) -> None:
    """The server counts an index by its file, in which it has written little before a checkpoint."""
    database.client.admin.command("fsync")


def collection_sizes(database: Database[Any], name: str) -> Sizes:
    (row,) = database[name].aggregate([{"$collStats": {"storageStats": {}}}])
    stats = row["storageStats"]
    return int(stats.get("size", 0)), int(stats.get("totalIndexSize", 0)), list(stats.get("indexSizes", {}))
