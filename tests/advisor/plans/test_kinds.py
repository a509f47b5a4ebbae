"""What becomes of each kind of finding, and plans on databases that Treadle maintains already."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import pytest

from tests.advisor.plans.shops import everything, plan_for, shop, tried
from tests.advisor.plans.test_apply import CODES, code_of
from tests.advisor.symptoms import contracts
from treadle import Count, Document, Id
from treadle.advisor import scan
from treadle.advisor.interface import Finding
from treadle.advisor.plans import before, kinds
from treadle.advisor.plans.apply import Application
from treadle.advisor.plans.make import make
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.prove import Proof
from treadle.advisor.plans.settle import verified
from treadle.advisor.plans.text import readme
from treadle.advisor.plans.undo import Undoing
from treadle.advisor.rules import load
from treadle.engine.set_aside import note_aside
from treadle.errors import DataError
from treadle.graph.outcomes import Progress
from treadle.store.blocking.store import Store

APPLIED = {"extended-reference", "computed", "subset", "query-without-index", "history", "no-validation"}


def test_every_rule_is_applied_or_left_to_the_application_with_a_reason() -> None:
    assert set(load()) == APPLIED | set(kinds.BY_APPLICATION)
    assert not APPLIED & set(kinds.BY_APPLICATION)


def test_what_the_application_must_do_is_named_with_its_declaration(database: Any) -> None:
    shop(database)
    report = scan(database)
    others = [
        Finding(load()[code][0], "products", code, "It is so.", {}, f"# declares {code}", (f"Do {code}.",))
        for code in kinds.BY_APPLICATION
    ]
    report = replace(report, findings=(*report.findings, *others))
    plan = make(report, tried(report, "computed", *kinds.BY_APPLICATION), identity="x", made="now")
    assert {f"{code}@products.{code}" for code in kinds.BY_APPLICATION} == {
        each.key for each in plan.by_application if "products" in each.key
    }
    text = readme(plan)
    for code, why in kinds.BY_APPLICATION.items():
        assert f"### `{code}@products.{code}`\n\nNot applied: {why}" in text
        assert f"1. Do {code}.\n\n```python\n# declares {code}\n```" in text
    assert ("computed@reviews.product_id",) == plan.findings
    # Those that were neither tried nor asked for are no part of it.
    assert {"It was not tried: --only names other findings."} == {each.reason for each in plan.left_out}


def test_histories_and_validators_are_applied_on_request_and_taken_back(database: Any) -> None:
    """Raw writers are followed; a validator only warns."""
    contracts(database, True)
    plan = plan_for(database, also=("history", "no-validation"))
    assert {"history", "no-validation"} == {each.partition("@")[0] for each in plan.asked}
    assert 'maintain="stream"' in plan.models
    assert Proof((), (), (), 0, False, measured=False).holds
    was = everything(database)
    Application(database, plan).run()
    (states,) = set(database.list_collection_names()) - set(was) - treadle_names(database)
    identity = database["contracts"].find_one_and_update({}, {"$inc": {"premium": 1}})["_id"]
    # It does not fit, and is let in.
    database["contract_history"].insert_one({"_id": 1, "contract_id": "text"})
    store = Store(database, models=load_models(plan.models))
    assert [] == [each for each in verified(store) if each.pattern != "validation"]
    rows = database[states].find({"document_id": identity}).sort("revision", 1)
    before_it, after_it = (each["document"]["premium"] for each in rows)
    assert before_it + 1 == after_it
    (options,) = database.list_collections(filter={"name": "contract_history"})
    assert "warn" == options["options"]["validationAction"]
    database["contracts"].update_one({"_id": identity}, {"$inc": {"premium": -1}})
    database["contract_history"].delete_one({"_id": 1})
    Undoing(database, plan).run()
    now = everything(database)
    # The server keeps its defaults in the options of a collection that once had a validator.
    assert {"validationLevel": "strict", "validationAction": "error"} == now["contract_history"][1]
    now["contract_history"] = (now["contract_history"][0], {}, *now["contract_history"][2:])
    assert was == now


def treadle_names(database: Any) -> set[str]:
    return {each for each in database.list_collection_names() if each.startswith("treadle.")}


def test_a_plan_on_top_of_another_is_undone_without_it(database: Any) -> None:
    shop(database)
    first = plan_for(database, "computed")
    was = everything(database)
    Application(database, first).run()
    once = everything(database)
    second = plan_for(database, *CODES, applied=before.applied(database))
    left_out = {each.key.partition("@")[0]: each.reason for each in second.left_out}
    assert "A plan that is applied already has it." == left_out["computed"]
    assert 1 == second.models.count('"""Models of')
    assert (first.id,) == second.on
    assert {"recent_reviews", "product"} == {each.field for each in second.places}
    assert "Count(Review" in second.models
    Application(database, second).run()
    product = database["products"].find_one()
    assert (3, True) == (len(product["recent_reviews"]), product["review_count"] > 0)
    assert "plan-treadle-in-use" == code_of(lambda: Undoing(database, first))
    Undoing(database, second).run()
    left = everything(database)
    # The first plan only reads these; of those that it writes to, Treadle's own revisions went on.
    assert once["reviews"] == left["reviews"]
    assert once["products"][:3] == left["products"][:3]
    assert None is database["products"].find_one({"recent_reviews": {"$exists": True}})
    assert [] == verified(Store(database, models=load_models(first.models)))
    database["reviews"].delete_one({})
    assert [] == verified(Store(database, models=load_models(first.models)))
    # One that was made before, or on one that is gone, is refused.
    assert "plan-treadle-in-use" == code_of(lambda: Application(database, replace(second, on=())).run())
    Application(database, second).run()
    assert [] == verified(Store(database, models=load_models(second.models)))
    Undoing(database, second).run()
    Undoing(database, first).run()
    assert "plan-treadle-in-use" == code_of(lambda: Application(database, second).run())
    assert set(was) == set(everything(database))
    assert was["products"] == everything(database)["products"]


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
    Application(database, plan).run()
    assert database["products"].find_one()["review_count"]
    Undoing(database, plan).run()
    assert was == everything(database)
    # One worker follows a database.
    with_worker = Store(database, models=[Note, Watched])
    with_worker.setup()
    with_worker.worker().run_until_idle()
    with pytest.raises(Exception, match="one worker follows a database") as refused:
        Application(database, plan).run()
    assert "plan-treadle-in-use" == refused.value.code  # type: ignore[attr-defined]


def test_too_many_documents_that_are_set_aside_stop_a_fill_before_its_end(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    steps = tuple(replace(each, stop_set_aside=2) for each in plan.steps)
    store = Store(database, models=load_models(plan.models))
    pages: list[Progress] = []

    def aside(progress: Progress) -> None:
        pages.append(progress)
        for number in range(3):
            store.runner.run(note_aside("Product.review_count", "products", number, "It is too large."))

    with pytest.raises(DataError, match="3 documents of products were set aside") as stopped:
        Application(database, replace(plan, steps=steps), progress=aside).run()
    assert ("plan-stopped", 1) == (stopped.value.code, len(pages))
    Undoing(database, plan).run()


def test_set_up_stops_at_its_threshold_too(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    steps = tuple(replace(each, stop_seconds=1e-6) for each in plan.steps)
    was = everything(database)
    assert "plan-stopped" == code_of(lambda: Application(database, replace(plan, steps=steps)).run())
    Undoing(database, plan).run()
    assert was == everything(database)


def test_undo_goes_on_where_others_dropped_or_changed_things_meanwhile(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed", "subset")
    was = everything(database)
    Application(database, plan).run()
    for name in list(database["reviews"].index_information()):
        if name.startswith("product_id"):
            database["reviews"].drop_index(name)
    # Another index under a name of the plan is somebody else's.
    database["reviews"].create_index([("rating", -1)], name="product_id_1")
    schema = {"$jsonSchema": {"required": ["rating"]}}
    database.command({"collMod": "reviews", "validator": schema})
    database.drop_collection("products")
    assert any("reviews" in line for line in Undoing(database, plan).dry_run())
    Undoing(database, plan).run()
    left = everything(database)
    assert {"reviews"} == set(left)
    assert was["reviews"][3] == left["reviews"][3]
    assert {"_id_", "rating_1", "product_id_1"} == {each["name"] for each in left["reviews"][2]}
    assert schema == left["reviews"][1]["validator"]
    assert "plan-not-applied" == code_of(lambda: Undoing(database, plan))


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
    Application(database, plan).run()
    applied = everything(database)
    assert was["products"][1] == applied["products"][1]
    assert images.items() <= applied["reviews"][1].items()
    Undoing(database, plan).run()
    assert was == everything(database)
