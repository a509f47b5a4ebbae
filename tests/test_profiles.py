"""What a server lacks is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import pytest
from pymongo import MongoClient

from tests.cli.invoke import invoke
from tests.profiles import HISTORY_FIELDS, HOSTED, Profile, ProfileProxy, lacks_options
from tests.test_every_pattern import SAMPLES
from treadle import Count, DeclarationError, Document, ExtendedReference, Id, Store, Sum, TreadleError
from treadle.cli.gaps import capability_rows
from treadle.graph.graph import Graph
from treadle.server.local import LocalServer

TREES = {"ancestor_array", "child_references", "materialized_path", "parent_reference"}
# Which patterns each engine cannot have. All others are accepted.
REFUSED = {
    "azure-documentdb": {"time_series"},
    "aws-documentdb": {*TREES, "time_series"},
}


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int = 0


class Shop(Document, collection="shops"):
    name: str = ""
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0


class Plain(Document, collection="plains"):
    name: str = ""


class Label(Document, collection="labels"):
    plain_id: Id
    name: Annotated[str | None, ExtendedReference(Plain, by="plain_id", field="name", maintain="stream")] = (
        None
    )


@pytest.mark.parametrize("engine", HOSTED)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_hosted_engine_has_a_pattern_or_refuses_it(name, engine):
    graph = Graph(SAMPLES[name].models)
    if name not in REFUSED[engine]:
        assert HOSTED[engine] == graph.check_server(HOSTED[engine])
        return
    with pytest.raises(DeclarationError) as refused:
        graph.check_server(HOSTED[engine])
    assert "capability-missing" == refused.value.code


@pytest.mark.parametrize(
    ("engine", "code"),
    [("azure-documentdb", "streams-unavailable"), ("aws-documentdb", "capability-missing")],
)
def test_a_hosted_engine_refuses_aggregates_by_stream(engine, code):
    with pytest.raises(DeclarationError) as refused:
        Graph([Sale, Shop]).check_server(HOSTED[engine])
    assert code == refused.value.code


@pytest.mark.parametrize("engine", HOSTED)
def test_each_gap_of_a_hosted_engine_has_a_meaning(engine):
    rows = {name: (found, meaning) for name, found, meaning in capability_rows(asdict(HOSTED[engine]))}
    assert ("no", 'maintain="stream"') == (
        rows["pre-images in change streams"][0],
        rows["pre-images in change streams"][1].partition(":")[0],
    )
    assert ("25000", "") == rows["operations in one batch"]
    assert all(meaning for found, meaning in rows.values() if found == "no")


# -- a server behind a proxy --------------------------------------------------------------------------


@contextmanager
def lacking(server: LocalServer, profile: Profile, name: str) -> Iterator[Any]:
    """A database of the server, as if the server lacked what the profile says."""
    with ProfileProxy(server, profile) as proxy, MongoClient[dict[str, Any]](proxy.uri) as client:
        yield client[name]


WITHOUT_PRE_IMAGES = Profile(
    "no pre-images", lambda body: lacks_options(body, "changeStreamPreAndPostImages")
)
WITHOUT_CLUSTER_TIME = Profile("no cluster time", hidden=HISTORY_FIELDS)
MONGODB_5 = Profile("mongodb-5.0", hello=(("maxWireVersion", 13),))


@pytest.mark.parametrize(
    ("profile", "code", "advice"),
    [
        (
            WITHOUT_PRE_IMAGES,
            "capability-missing",
            "use MongoDB 6.0 or newer, which keeps them, or declare maintain='write' or maintain='schedule'",
        ),
        (WITHOUT_CLUSTER_TIME, "streams-unavailable", "declare maintain='write'"),
        (MONGODB_5, "server-too-old", "upgrade it: Treadle needs MongoDB 6.0 or newer"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_aggregates_by_stream_are_refused_with_advice(server, database, profile, code, advice):
    with lacking(server, profile, database.name) as remote:
        store = Store(remote, [Sale, Shop])
        for call in (store.setup, lambda: store.worker().run_until_idle(), lambda: store.insert(Shop())):
            with pytest.raises(TreadleError) as refused:
                call()
            assert code == refused.value.code
            assert advice in str(refused.value)
    assert [] == database.list_collection_names()


def test_copies_by_id_follow_without_pre_images(server, database):
    with lacking(server, WITHOUT_PRE_IMAGES, database.name) as remote:
        store = Store(remote, [Plain, Label])
        store.setup()
        plain = store.insert(Plain(name="old"))
        label = store.insert(Label(plain_id=plain.id))
        store.worker().run_until_idle()
        database["plains"].update_one({"_id": plain.id}, {"$set": {"name": "new"}})
        store.worker().run_until_idle()
        assert "new" == store.get(Label, label.id).name
        assert [] == store.verify()


def test_the_doctor_names_a_server_that_is_too_old(server, tmp_path):
    with ProfileProxy(server, MONGODB_5) as proxy:
        done = invoke(tmp_path, "doctor", proxy.uri)
    assert 1 == done.returncode
    assert "Treadle needs MongoDB 6.0 or newer" in " ".join(done.stdout.split())
