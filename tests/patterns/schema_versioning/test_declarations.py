"""Migrations that cannot work are refused when the Store is made."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from tests.patterns.schema_versioning.users import Review, split_phone
from treadle import Count, DeclarationError, Document, Id, Rollup, Store, UsageError, migration
from treadle.graph.graph import Graph
from treadle.graph.watched import Watched


def test_gaps_are_found_when_the_store_is_made(database):
    class Gap(Document, collection="gaps", version=4): ...

    migration(Gap, 1, up=lambda document: document)
    migration(Gap, 3, up=lambda document: document)
    with pytest.raises(DeclarationError, match="2 to 3") as caught:
        Store(database, [Gap])
    assert "migration-missing" == caught.value.code


def test_migrations_that_cannot_work_are_refused():
    class Some(Document, collection="some", version=2): ...

    def code(make: Any) -> str:
        with pytest.raises(DeclarationError) as caught:
            make()
        return caught.value.code

    migration(Some, 1, up=lambda document: document)
    assert "migration-twice" == code(lambda: migration(Some, 1, up=[{"$set": {"a": 1}}]))
    assert "version-invalid" == code(lambda: migration(Some, 0, up=[{"$set": {"a": 1}}]))
    assert "migration-invalid" == code(lambda: migration(Some, 2, up=[{"$match": {}}]))
    assert "migration-invalid" == code(lambda: migration(Some, 2, up=[]))
    assert "version-invalid" == code(lambda: migration(dict, 2, up=[{"$set": {"a": 1}}]))

    def no_version() -> None:
        class Bad(Document, collection="bad", version="2"): ...

    assert "version-invalid" == code(no_version)


@pytest.mark.parametrize("keyword", [{"version": 1}, {"discriminator": "kind"}], ids=str)
def test_the_groups_of_a_rollup_have_no_versions_or_kinds(keyword):
    with pytest.raises(DeclarationError, match="rollup= and"):

        class PerProduct(
            Document, collection="per_product", rollup=Rollup(Review, keys={"id": "product_id"}), **keyword
        ):
            id: Id
            n: Annotated[int, Count()] = 0

        Graph([Review, PerProduct])


def test_code_in_a_pipeline_is_refused():
    class Some(Document, collection="some", version=2): ...

    with pytest.raises(UsageError, match="function"):
        migration(Some, 1, up=[{"$set": {"a": {"$function": {"body": "x", "args": [], "lang": "js"}}}}])


def test_a_function_may_be_called_as_it_is():
    assert {"phones": ["1"]} == split_phone({"phone": "1"})


@pytest.mark.parametrize(
    "look",
    [
        dict,
        list,
        len,
        lambda document: {**document},
        lambda document: document | {},
        lambda document: {} | document,
        lambda document: document.copy(),
        lambda document: list(document.items()),
        sorted,
        lambda document: document == {},
        repr,
        bool,
        lambda document: __import__("copy").deepcopy(document),
        lambda document: __import__("copy").copy(document),
        lambda document: __import__("pickle").dumps(document),
        lambda document: __import__("json").dumps(document),
    ],
)
def test_whatever_looks_at_the_whole_has_read_all(look):
    watched = Watched({"a": 1, "b": 2})
    look(watched)
    assert watched.read is None


def test_single_looks_are_noted():
    watched = Watched({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    _ = watched["a"], watched.get("b"), "x" in watched, watched.pop("c"), watched.setdefault("y", 1)
    watched["d"] = 5
    del watched["e"]
    assert {"a", "b", "x", "c", "y", "d", "e"} == watched.read
    watched.update(z=1)
    watched |= {"w": 1}
    assert {"z", "w"} <= watched.read
