"""Old and new releases as real processes, migrations that are killed, and models of random shapes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deployed import IDS, NewUser, OldUser
from tests.kit.tiers import IS_FULL
from tests.support import annotated_values
from treadle import Document, Store, migration
from treadle.engine import lease

SECONDS = 3.0
KILLS = 10 if IS_FULL else 2


def process(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.deployed", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


def finished(running: subprocess.Popen[str]) -> Any:
    out, error = running.communicate(timeout=120)
    assert 0 == running.returncode, error[-2000:]
    return json.loads(out)


@pytest.mark.heavy
def test_two_releases_write_while_a_migration_goes_up_and_down(server, database):
    """No acknowledged write is lost, both releases read everything, and both validators are content."""
    new, old = Store(database, [NewUser]), Store(database, [OldUser])
    old.setup()
    new.setup()
    database["users"].insert_many(
        [{"_id": each, "name": "x", "phone": "1", "old": 0, "new": 0, "by_hand": 0} for each in IDS]
    )
    writers = {
        role: process(role, server.uri, database.name, SECONDS, number)
        for number, role in enumerate(("old", "new", "hand"))
    }
    rounds = 0
    while any(each.poll() is None for each in writers.values()):
        new.migrate(NewUser, batch=5)
        old.migrate(OldUser, to=1, batch=5)
        rounds += 1
        assert len(IDS) == len(list(new.find(NewUser))) == len(list(old.find(OldUser)))
    assert rounds > 1
    done = {role: finished(running) for role, running in writers.items()}
    for raw in database["users"].find():
        key = str(raw["_id"])
        assert (done["old"][key], done["new"][key], done["hand"][key]) == (
            raw["old"],
            raw["new"],
            raw["by_hand"],
        )
    assert sum(done["old"].values()) > 20
    assert sum(done["new"].values()) > 20
    for store, model in ((new, NewUser), (old, OldUser)):
        assert [] == store.verify()
        assert {type(each) for each in store.find(model)} == {model}
    assert [] == old.setup(), "the old release leaves the newer validator alone"


@pytest.mark.heavy
def test_a_migration_that_is_killed_often_ends_as_if_it_was_not(server, database):
    count = 2500
    originals = [
        {"_id": ObjectId(f"{number:024x}"), "name": "x", "phone": f"{number},{number % 7}"}
        for number in range(count)
    ]
    database["users"].insert_many(originals)
    chance = random.Random(7)
    killed = 0
    positions = []
    while killed < KILLS:
        before = database["users"].count_documents({"schema_version": 2})
        running = process("migrate", server.uri, database.name, 2, 20)
        wanted = before + chance.randrange(20, count // (KILLS + 2))
        for _ in range(2000):
            if (
                running.poll() is not None
                or database["users"].count_documents({"schema_version": 2}) >= wanted
            ):
                break
            time.sleep(0.002)
        assert running.poll() is None, "it ended before it could be killed"
        running.kill()
        running.communicate()
        killed += 1
        row = database[lease.COLLECTION].find_one({"_id": "migrate:users"}) or {}
        positions.append(((row.get("progress") or {}).get("after") or [None])[0])
    assert positions == sorted(positions, key=lambda each: each or ObjectId("0" * 24)), "each goes on further"
    result = Store(database, [NewUser]).migrate(NewUser)
    assert (0, True) == (result.remaining, result.finished)
    expected = [
        {"_id": raw["_id"], "name": "x", "schema_version": 2, "phones": raw["phone"].split(",")}
        for raw in originals
    ]
    assert expected == list(database["users"].find().sort("_id"))


# -- models of random fields, kinds and versions --------------------------------------------------


@st.composite
def families(draw: Any) -> tuple[list[type[Document]], list[Document], int]:
    """A family of random kinds and versions, some documents of it, and a version to write."""
    version = draw(st.integers(1, 3))
    naming = draw(st.sampled_from(["snake", "camel"]))
    field_name = draw(st.sampled_from(["type", "_cls", "kind of thing"]))
    shared = draw(st.lists(annotated_values(1), max_size=2))

    def make(name: str, bases: tuple[type, ...], fields: list[Any], prefix: str, **keywords: Any) -> Any:
        annotations = {
            f"{prefix}_field_{number}": annotation for number, (annotation, _) in enumerate(fields)
        }
        body = {"__annotations__": annotations, "__module__": __name__}
        return type(Document)(name, bases, body, **keywords)

    base = make(
        "Base", (Document,), shared, "shared",
        collection="families", discriminator=field_name, naming=naming, validation="strict",
        version=version, version_field=draw(st.sampled_from(["schema_version", "v"])),
    )  # fmt: skip
    for number in range(1, version):
        # Each version wraps one more thing around the document, and takes it off again.
        def up(document: dict[str, Any], name: str = f"wrapped {number}") -> dict[str, Any]:
            rest = {key: value for key, value in document.items() if key not in ("_id", field_name)}
            return {"_id": document["_id"], field_name: document[field_name], **rest.pop(name, {}), **rest}

        def down(document: dict[str, Any], name: str = f"wrapped {number}") -> dict[str, Any]:
            rest = {key: value for key, value in document.items() if key not in ("_id", field_name)}
            return {"_id": document["_id"], field_name: document[field_name], name: rest}

        migration(base, number, up=up, down=down)
    models, documents = [base], []
    for number in range(draw(st.integers(1, 3))):
        fields = draw(st.lists(annotated_values(1), max_size=3))
        parent = draw(st.sampled_from(models))
        kind = draw(st.sampled_from([f"kind {number}", number]))
        model = make(f"Kind{number}", (parent,), fields, f"own_{number}", kind=kind)
        strategies = {f"shared_field_{n}": values for n, (_, values) in enumerate(shared)}
        strategies |= getattr(parent, "__strategies__", {})
        strategies |= {f"own_{number}_field_{n}": values for n, (_, values) in enumerate(fields)}
        type.__setattr__(model, "__strategies__", strategies)
        models.append(model)
        for _ in range(draw(st.integers(1, 2))):
            documents.append(model(**{name: draw(values) for name, values in strategies.items()}))
    return models, documents, draw(st.integers(1, version))


@pytest.mark.heavy
@settings(max_examples=40 if IS_FULL else 10)
@given(made=families())
def test_whatever_is_written_validates_and_reads_back_equal(made, database):
    """And down(up(x)) == x: migrating down and up again changes no byte of what was stored."""
    models, documents, written = made
    database["families"].drop()
    current = Store(database, models)
    current.setup()
    older = Store(database, models, write_versions={models[0]: written})
    older.insert_many(documents)
    for store in (current, older):
        found = {each.id: each for each in store.find(models[0])}
        assert documents == [found[each.id] for each in documents]
        assert [type(each) for each in documents] == [type(found[each.id]) for each in documents]
    assert [] == current.verify()
    assert {written: len(documents)} == current.migration_status(models[0])
    before = {raw["_id"]: raw for raw in current.collection(models[0]).find()}
    version = models[0].__treadle__.version
    for to in (version, written, 1, written):
        assert current.migrate(models[0], to=to).finished
        assert [] == current.verify()
        assert documents == [current.get(models[0], each.id) for each in documents]
    assert before == {raw["_id"]: raw for raw in current.collection(models[0]).find()}
    database["treadle.leases"].drop()
