"""What becomes of each kind of finding, and plans on databases that an application uses as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import pytest

from tests.advisor.loop.shops import everything, plan_for, shop, tried
from tests.advisor.loop.test_apply import CODES, code_of, undone
from treadle import Count, Document, Id
from treadle.advisor import scan
from treadle.advisor.interface import Finding
from treadle.advisor.loop.apply import apply
from treadle.advisor.loop.plan import BY_APPLICATION, make
from treadle.advisor.loop.readme import readme
from treadle.advisor.loop.undo import undo
from treadle.advisor.rules import load
from treadle.patterns.approximation.add_amounts import BATCHES
from treadle.store.blocking.store import Store

APPLIED = {"extended-reference", "computed", "subset", "query-without-index"}


def test_every_rule_is_applied_or_left_to_the_application_with_a_reason() -> None:
    assert set(load()) == APPLIED | set(BY_APPLICATION)
    assert not APPLIED & set(BY_APPLICATION)


def test_what_the_application_must_do_is_named_with_its_declaration(database: Any) -> None:
    shop(database)
    report = scan(database)
    others = [
        Finding(load()[code][0], "products", code, "It is so.", {}, f"# declares {code}", (f"Do {code}.",))
        for code in BY_APPLICATION
    ]
    report = replace(report, findings=(*report.findings, *others))
    plan = make(report, tried(report, "computed", *BY_APPLICATION), identity="x", made="now")
    assert {f"{code}@products.{code}" for code in BY_APPLICATION} == {
        each.key for each in plan.by_application if "products" in each.key
    }
    text = readme(plan)
    for code, why in BY_APPLICATION.items():
        assert f"### `{code}@products.{code}`\n\nNot applied: {why}" in text
        assert f"1. Do {code}.\n\n```python\n# declares {code}\n```" in text
    assert ("computed@reviews.product_id",) == plan.findings
    # Those that were not tried are no part of it.
    assert {"It was not tried: --only names other findings."} == {each.reason for each in plan.left_out}


def treadle_names(database: Any) -> set[str]:
    return {each for each in database.list_collection_names() if each.startswith("treadle.")}


class Note(Document, collection="notes"):
    folder_id: Id


class Folder(Document, collection="folders"):
    name: str
    notes: Annotated[int, Count(Note, by="folder_id")] = 0


class Watched(Document, collection="folders"):
    name: str
    notes: Annotated[int, Count(Note, by="folder_id", maintain="stream")] = 0


def test_models_of_an_application_on_other_collections_stay_as_they_are(database: Any) -> None:
    store = Store(database, models=[Note, Folder])
    store.setup()
    folder = store.insert(Folder(name="one"))
    store.insert(Note(folder_id=folder.id))
    shop(database)
    plan = plan_for(database, "computed")
    was = everything(database)
    apply(database, plan)
    assert database["products"].find_one()["review_count"]
    undo(database, plan)
    assert was == everything(database)
    # One worker follows a database.
    with_worker = Store(database, models=[Note, Watched])
    with_worker.setup()
    with_worker.worker().run_until_idle()
    with pytest.raises(Exception, match="one worker follows a database") as refused:
        apply(database, plan)
    assert "plan-treadle-in-use" == refused.value.code  # type: ignore[attr-defined]


def test_what_an_application_has_noted_since_stays(database: Any) -> None:
    """Without its ledger, a counter could add the same amounts a second time."""
    shop(database)
    plan = plan_for(database, "computed")
    apply(database, plan)
    database[BATCHES].insert_one({"_id": "of an application"})
    undo(database, plan)
    assert {BATCHES} == treadle_names(database)


def test_undo_goes_on_where_others_dropped_or_changed_things_meanwhile(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed", "subset")
    was = everything(database)
    apply(database, plan)
    for name in list(database["reviews"].index_information()):
        if name.startswith("product_id"):
            database["reviews"].drop_index(name)
    # Another index under a name of the plan is somebody else's.
    database["reviews"].create_index([("rating", -1)], name="product_id_1")
    schema = {"$jsonSchema": {"required": ["rating"]}}
    database.command({"collMod": "reviews", "validator": schema})
    database.drop_collection("products")
    assert any("reviews" in line for line in undone(database, plan, dry_run=True))
    undo(database, plan)
    left = everything(database)
    assert {"reviews"} == set(left)
    assert was["reviews"][3] == left["reviews"][3]
    assert {"_id_", "rating_1", "product_id_1"} == {each["name"] for each in left["reviews"][2]}
    assert schema == left["reviews"][1]["validator"]
    assert "plan-not-applied" == code_of(lambda: undo(database, plan))


def test_views_validators_indexes_and_former_states_of_before_stay(database: Any) -> None:
    shop(database)
    database.create_collection("good", viewOn="reviews", pipeline=[{"$match": {"rating": 4}}])
    validator = {"$jsonSchema": {"required": ["name"]}}
    images = {"changeStreamPreAndPostImages": {"enabled": True}}
    database.command({"collMod": "products", "validator": validator, "validationLevel": "moderate"})
    database.command({"collMod": "reviews", **images})
    database["reviews"].create_index([("product_id", 1)], name="mine", collation={"locale": "de"})
    plan = plan_for(database, *CODES)
    was = everything(database)
    apply(database, plan)
    applied = everything(database)
    assert was["products"][1] == applied["products"][1]
    assert images.items() <= applied["reviews"][1].items()
    undo(database, plan)
    assert was == everything(database)
