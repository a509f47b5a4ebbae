"""A trial: both ways answer the same, the numbers are there, and the scanned database is as it was.

Covers: advisor/loop/trial, advisor/loop/write_cost, advisor/loop/copying, advisor/loop/families, advisor/loop/results
Covers: advisor/loop/statistics, advisor/loop/verdict, advisor/loop/following, advisor/loop/storage, advisor/loop/trial_text
"""

from __future__ import annotations

import datetime as dt
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bson import ObjectId
from rich.console import Console

from tests.advisor.drafts import chosen, draft_of
from tests.advisor.loop.shop_models import MODELS
from tests.advisor.loop.test_workload_file import write
from tests.cli.invoke import run_verb
from treadle.advisor import scan
from treadle.advisor.facts import Distribution, Relation, Scan
from treadle.advisor.loop import workload_file
from treadle.advisor.loop.answers import without
from treadle.advisor.loop.compare import compare_reads
from treadle.advisor.loop.copying import Copier, clone
from treadle.advisor.loop.families import steps, touched
from treadle.advisor.loop.results import Measured, RequestResult, Side, report_from_json
from treadle.advisor.loop.statistics import predicted, quantile, ratio, tamed
from treadle.advisor.loop.trial import select, try_findings
from treadle.advisor.loop.trial_text import show
from treadle.advisor.loop.units import Group, collect
from treadle.advisor.loop.verdict import Trial, judge
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.loop.write_cost import WriteCounter, watched_fields, write_costs
from treadle.cli import main
from treadle.demo.data import FIRST, fill
from treadle.errors import UsageError
from treadle.store.blocking.store import Store

TRIED = ("computed", "extended-reference", "subset")
LEFT_TO_THE_APPLICATION = ("approximation", "outlier")


def shop_requests(database: Any, times: int = 12) -> Iterator[Request]:
    """What the demo's shop does, as it would be recorded."""
    products = [each["_id"] for each in database["products"].find({}, {"_id": 1}).limit(times)]
    sellers = [each["_id"] for each in database["sellers"].find({}, {"_id": 1}).limit(times)]
    customers = [each["_id"] for each in database["customers"].find({}, {"_id": 1}).limit(times)]
    orders = list(database["orders"].find({}, {"customer_id": 1}).limit(times))
    join = {"from": "customers", "localField": "customer_id", "foreignField": "_id", "as": "customer"}
    sums = {"_id": None, "count": {"$sum": 1}, "average": {"$avg": "$rating"}}
    for number, product in enumerate(products):
        at = number * 0.5
        newest = [{"$sort": {"placed_at": -1, "_id": 1}}, {"$limit": 50}, {"$lookup": join}]
        yield Request("aggregate", "orders", {"pipeline": newest}, at, session=1)
        grouped = [{"$match": {"product_id": product}}, {"$group": sums}]
        yield Request("aggregate", "reviews", {"pipeline": grouped}, at, session=1)
        newest_of = {"filter": {"product_id": product}, "sort": {"date": -1, "_id": 1}, "limit": 5}
        yield Request("find", "reviews", newest_of, at, session=1)
        yield Request(
            "find", "orders", {"filter": {"_id": orders[number]["_id"]}, "limit": 1}, at + 0.2, session=1
        )
        follow = {"filter": {"_id": orders[number]["customer_id"]}, "limit": 1}
        yield Request("find", "customers", follow, at + 0.21, session=1)
        yield Request("find", "sellers", {"filter": {"_id": sellers[number]}, "limit": 1}, at, session=1)
        review = {"_id": ObjectId(), "product_id": product, "rating": 4, "text": "SECRETTEXT", "date": FIRST}
        if number % 4 == 0:
            yield Request("insert", "reviews", {"document": review}, at)
        change = {"q": {"_id": customers[number]}, "u": {"$set": {"tier": "SECRETTIER"}}}
        yield Request("update", "customers", change, at)
        for _ in range(12):
            yield Request("update", "products", {"q": {"_id": product}, "u": {"$inc": {"views": 1}}}, at)
    yield from canaries(products[0], customers[0])


SECRET = "SECRETCANARY"


def canaries(product: Any, customer: Any) -> Iterator[Request]:
    """Requests of every kind that carry a value which nobody may see in a report, some refused by a server."""
    join = {"from": "reviews", "localField": "_id", "foreignField": "product_id", "as": "r"}
    shown = {"n": {"$size": "$r"}, "secret": {"$literal": SECRET}, "SECRETALIAS": "$name"}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("find", "reviews", {"filter": {"product_id": product, "text": {"$regex": SECRET, "$options": "i"}}}),
        ("find", "reviews", {"filter": {"$text": {"$search": SECRET}}}),
        ("find", "reviews", {"filter": {"$where": SECRET}}),
        ("find", "customers", {"filter": {"name": SECRET}, "collation": {"locale": "en"}}),
        ("count", "reviews", {"query": {"product_id": SECRET}}),
        ("distinct", "reviews", {"key": "text", "query": {"text": SECRET}}),
        ("aggregate", "reviews", {"pipeline": [{"$match": {"product_id": SECRET}}, {"$count": "n"}]}),
        ("aggregate", "products", {"pipeline": [{"$lookup": join}, {"$project": shown}]}),
        ("aggregate", "orders", {"pipeline": [{"$match": {"status": SECRET}}, {"$out": "elsewhere"}]}),
        ("update", "customers", {"q": {"_id": customer}, "u": [{"$set": {"name": SECRET}}]}),
        ("update", "customers", {"q": {"name": SECRET}, "u": {"$set": {"tier": SECRET}}, "upsert": True}),
        ("update", "customers", {"q": {"name": SECRET}, "u": {"$bad": {"name": SECRET}}}),
        ("update", "customers", {"q": {"_id": customer}, "u": {"$set": {"name": SECRET, "name.x": SECRET}}}),
        ("modify", "customers", {"query": {"_id": customer}, "update": {"$set": {"tier": SECRET}}}),
        ("insert", "reviews", {"document": {"product_id": product, "rating": SECRET, "text": SECRET}}),
        ("delete", "reviews", {"q": {"text": SECRET}, "limit": 0}),
    ]
    for operation, collection, body in bodies:
        yield Request(operation, collection, body, 5.0, plan="COLLSCAN")


@pytest.fixture
def target(database: Any) -> Iterator[Any]:
    """A database for a copy."""
    copied = database.client[f"{database.name}_copy"]
    yield copied
    database.client.drop_database(copied.name)


@pytest.fixture
def shop(database: Any, tmp_path: Path) -> Path:
    """The demo's naive shop, and a recording of it; gives the recording."""
    fill(database, 0.01, lambda *progress: None)
    path = tmp_path / "shop.workload"
    write(path, *shop_requests(database))
    text = path.read_text().replace('"database": "shop"', f'"database": "{database.name}"')
    path.write_text(text.replace('"seconds": 60.0', '"seconds": 5.0'))
    return path


def test_findings_are_tried_on_a_copy(database, shop, caplog):
    caplog.set_level("DEBUG", "treadle")
    workload = workload_file.read(shop)
    hashed = database.command("dbHash")["md5"]
    oplog = database.client["local"]["oplog.rs"]
    begin = database.command("ping")["operationTime"]
    report = scan(database, workload=workload.profile_documents())
    trial = try_findings(database, report, workload, only=(*TRIED, *LEFT_TO_THE_APPLICATION), rounds=2)
    # The scanned database is as it was, and nobody wrote to it meanwhile.
    assert hashed == database.command("dbHash")["md5"]
    written = {"ts": {"$gt": begin}, "ns": {"$regex": f"^{database.name}\\."}}
    assert [] == list(oplog.find(written))
    assert 0 == database.command({"profile": -1})["was"]
    results = {each.code: each for each in trial.results}
    assert {*TRIED, *LEFT_TO_THE_APPLICATION} == set(results)
    for code in LEFT_TO_THE_APPLICATION:
        left = results.pop(code)
        assert ("no evidence", ()) == (left.verdict, left.requests)
        assert left.reason.startswith("It is left to the application.")
    for code, result in results.items():
        assert result.verdict in ("do", "do not"), (code, result.reason)
        gaining = [each for each in result.requests if each.compared]
        assert gaining, code
        assert 0 == sum(each.different for each in gaining), code
        assert all(each.costs_before.p50_ms.value > 0 < each.costs_after.p99_ms.value for each in gaining)
        assert result.storage is not None
        assert result.ratio is not None
        assert result.ratio.low <= result.ratio.value <= result.ratio.high
        assert result.declaration
        assert result.change_seconds > 0
    # What the server did, which no clock disturbs.
    counted = next(each for each in results["computed"].requests if each.recorded == 12)
    assert counted.costs_before.documents_examined > 10 * counted.costs_after.documents_examined
    page = next(each for each in results["extended-reference"].requests if "then customers" in each.request)
    assert (2, 1) == (page.costs_before.commands, page.costs_after.commands)
    inserted = next(each for each in results["computed"].requests if each.request == "reviews: insert")
    # Clients write as they did, and a worker follows.
    assert inserted.costs_after.commands == inserted.costs_before.commands == 1
    assert inserted.upkeep_ms is not None
    assert 'maintain="stream"' in results["computed"].declaration
    assert all(each.documents == each.of for each in trial.copied)
    # No value that was recorded or stored is in any report.
    text = json.dumps(trial.as_json())
    printed = Console(file=io.StringIO(), width=80)
    show(trial, printed)
    shown = (text, printed.file.getvalue(), caplog.text)
    for value in ("SECRET", "Ada", "Loom", "example.org", str(database["products"].find_one()["_id"])):
        assert [] == [each for each in shown if value in each]
    assert trial == report_from_json(json.loads(text))


@pytest.mark.all
def test_the_verb_prints_json(uri, database, shop, tmp_path, capsys):
    only = ["--only", "computed@reviews.product_id", "--only", "no-validation"]
    result = run_verb("trial", uri, "--workload", str(shop), *only, "--json")
    assert 0 == result.exit_code, result.output
    report = report_from_json(json.loads(result.stdout))
    assert ["computed", "no-validation"] == sorted({each.code for each in report.results})
    assert {"no evidence"} == {each.verdict for each in report.results if each.code == "no-validation"}
    assert 2 == main(["trial", uri, "--workload", str(shop), "--only", "computd@reviews.product_id"])
    assert "no finding 'computd@reviews.product_id'" in capsys.readouterr().err
    assert 2 == main(["trial", uri])
    (tmp_path / "other").write_text("no workload")
    assert 2 == main(["trial", uri, "--workload", str(tmp_path / "other")])


def test_answers_that_differ_are_counted(database, shop):
    workload = workload_file.read(shop)
    models = [each for each in MODELS if each.__name__ in ("Review", "Product")]
    patterns = draft_of(models)
    groups = chosen(workload, patterns)
    with Store(database, models=models) as store:
        store.setup()
        store.rebuild()
        right, _ = compare_reads(database, database, groups, patterns, 5.0, rounds=1)
        assert 0 == sum(each.different for each in right)
        product = workload_product(groups)
        database["products"].update_one({"_id": product}, {"$inc": {"review_count": 1}})
        results, notes = compare_reads(database, database, groups, patterns, 5.0, rounds=3)
        # Where others write, a value may be late: it is waited for, and the answers are compared again.
        followed = compare_reads(
            database,
            database,
            groups,
            patterns,
            5.0,
            rounds=3,
            settle=lambda: database["products"].update_one({"_id": product}, {"$inc": {"review_count": -1}}),
        )[0]
    assert [] == notes
    assert 1 == sum(each.different for each in results)
    assert 0 == sum(each.different for each in followed)
    assert "do not" == judge(Trial("computed", "x", "", results, None, 1.0)).verdict


def test_a_copy_that_programs_write_themselves_is_not_tried(database, tmp_path):
    """It has to become part of the application's own models."""
    customers = [ObjectId() for _ in range(50)]
    database["customers"].insert_many([{"_id": each, "name": f"n{n}"} for n, each in enumerate(customers)])
    database["orders"].insert_many(
        [
            {"customerId": customers[n % 50], "customerName": f"n{n % 50}" if n % 10 else "stale", "total": n}
            for n in range(500)
        ]
    )
    empty = workload_file.read(write(tmp_path / "empty"))
    (tried,) = try_findings(database, scan(database), empty, only=["extended-reference"]).results
    assert "no evidence" == tried.verdict
    assert tried.reason.startswith("Programs write its fields themselves")


def test_writes_are_measured_on_both_copies_and_put_back(database, target):
    """Both copies hold the same afterwards as before, and every value is right."""
    keys = [ObjectId() for _ in range(3)]
    database["products"].insert_many([{"_id": key, "name": "p", "price": 1.0} for key in keys])
    database["reviews"].insert_many(
        [{"product_id": keys[n % 3], "rating": n % 4, "text": "t", "date": FIRST} for n in range(30)]
    )
    models = [each for each in MODELS if each.__name__ in ("Review", "Product")]
    draft = draft_of(models)
    stored = list(database["reviews"].find())
    counter = WriteCounter(watched_fields(draft))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("insert", {}),
        ("update", {"q": {"_id": stored[0]["_id"]}, "u": {"$set": {"rating": 4}}}),
        ("update", {"q": {"product_id": keys[2]}, "u": {"$set": {"text": "x"}}, "multi": True}),
        ("update", {"q": {}, "u": {"$set": {"other": 1}}}),
        ("modify", {"query": {"_id": stored[1]["_id"]}, "remove": True}),
        ("delete", {"q": {"rating": 77}, "limit": 0}),
    ]
    collect([Request(operation, "reviews", body, returned=3) for operation, body in bodies], [counter])
    assert {("reviews", "insert"): 3, ("reviews", "update"): 6, ("reviews", "delete"): 6} == counter.documents
    clone(database, target, ["products", "reviews"])
    with Store(target, models=models) as store:
        store.setup()
        store.rebuild()
        results, notes = write_costs(database, store, counter, 1.0, rounds=2)
        assert [] == notes
        assert [] == store.verify()
    assert [6, 3, 6] == [each.recorded for each in results]
    assert {"reviews: delete", "reviews: insert", "reviews: update of rating, text"} == {
        each.request for each in results
    }
    order = [("_id", 1)]
    assert stored == list(database["reviews"].find().sort(order))
    left = list(target["reviews"].find({}, {"_treadle": 0}).sort(order))
    assert [without(each) for each in stored] == [without(each) for each in left]


def test_an_index_is_tried_with_the_reads_that_scan(database, tmp_path):
    products = [{"_id": ObjectId(), "sku": f"s{number}"} for number in range(1_200)]
    database["products"].insert_many(products)
    requests = [
        Request(
            "find", "products", {"filter": {"sku": f"s{number}"}}, number / 10, 1.0, 1_200, 1, 50, "COLLSCAN"
        )
        for number in range(15)
    ]
    path = write(tmp_path / "scans", *requests)
    path.write_text(path.read_text().replace('"database": "shop"', f'"database": "{database.name}"'))
    workload = workload_file.read(path)
    report = scan(database, workload=workload.profile_documents())
    only = ["query-without-index@products.sku"]
    ((request,),) = (
        each.requests for each in try_findings(database, report, workload, only=only, rounds=1).results
    )
    assert 0 == request.different
    assert request.costs_before.documents_examined > 10 * request.costs_after.documents_examined


def test_what_cannot_be_used_is_counted_and_not_kept():
    group = Group(kept_max=4)
    for number in range(100):
        group.add((Request("find", "a", {"filter": {"_id": number}}),), usable=number % 3 == 0)
    assert 100 == group.recorded
    assert 2 <= len(group.units) <= 4
    assert all(unit[0].body["filter"]["_id"] % 3 == 0 for unit in group.units)


def workload_product(groups: Any) -> Any:
    group = next(each for each in groups if each.first.operation == "aggregate")
    return group.first.body["pipeline"][0]["$match"]["product_id"]


# -- drawing ----------------------------------------------------------------------------------


def test_families_are_whole_and_the_largest_is_among_them(database, target):
    parents = [{"_id": ObjectId(), "name": f"p{number}"} for number in range(3_000)]
    children = [
        {"_id": ObjectId(), "parent_id": parents[number % 3_000]["_id"], "other_id": number % 2_500}
        for number in range(6_000)
    ]
    children += [{"_id": ObjectId(), "parent_id": parents[7]["_id"], "other_id": 1} for _ in range(500)]
    database["parents"].insert_many(parents)
    database["children"].insert_many(children)
    database["others"].insert_many([{"_id": number} for number in range(2_500)])
    database["children"].create_index("parent_id", name="by_parent", expireAfterSeconds=10)
    report = scan(database)
    named = touched([Request("find", "children", {"filter": {"parent_id": parents[11]["_id"]}})])[1]
    copier = Copier(database, target, report.scan, 1_500, named, lambda *step: None)
    copied = {each.collection: each for each in copier.run(["children", "others", "parents"], [])}
    assert 100 < copied["parents"].documents < 1_500
    kept = {each["_id"] for each in target["parents"].find({}, {"_id": 1})}
    assert {parents[7]["_id"], parents[11]["_id"]} <= kept
    expected = Counter(each["parent_id"] for each in children if each["parent_id"] in kept)
    assert expected == Counter(each["parent_id"] for each in target["children"].find())
    # Whoever is named by a child that was copied is there too.
    others = {each["other_id"] for each in target["children"].find()}
    assert others <= {each["_id"] for each in target["others"].find()}
    index = target["children"].index_information()["by_parent"]
    assert "expireAfterSeconds" not in index


def test_families_that_do_not_fit_are_left_out_whole(database, target):
    """However many a workload names: the largest is there, and each that is there is complete."""
    parents = [{"_id": number, "name": f"p{number}"} for number in range(60)]
    sizes = {number: 200 if number == 41 else 20 + number % 30 for number in range(60)}
    children = [{"parent_id": number, "n": n} for number, size in sizes.items() for n in range(size)]
    notes = [{"parent_id": number, "n": n} for number in range(60) for n in range(40)]
    database["parents"].insert_many(parents)
    database["children"].insert_many(children)
    database["notes"].insert_many(notes)
    report = scan(database)
    named = touched(
        [Request("find", "children", {"filter": {"parent_id": each["_id"]}}) for each in parents]
    )[1]
    copier = Copier(database, target, report.scan, 1_000, named, lambda *step: None)
    copied = {each.collection: each for each in copier.run(["children", "notes", "parents"], [])}
    kept = {each["_id"] for each in target["parents"].find()}
    assert 41 in kept
    assert 5 < len(kept) < 40
    for name, size in (("children", sizes), ("notes", dict.fromkeys(range(60), 40))):
        found = Counter(each["parent_id"] for each in target[name].find())
        assert {key: size[key] for key in kept} == found
        assert found.total() == copied[name].documents
    assert sum(each.documents for each in copied.values()) <= 1_500
    assert not any("cut off" in note for note in copier.notes)
    # Only requests about what is there are tried.
    for number in range(60):
        about = [
            Request("count", "children", {"query": {"parent_id": number}}),
            Request("insert", "notes", {"document": {"parent_id": number, "n": 1}}),
            Request("find", "parents", {"filter": {"_id": number}}),
            Request("find", "children", {"filter": {"parent_id": {"$in": [number, 99]}}}),
        ]
        assert [number in kept] * 4 == [copier.holds(each) for each in about]
    assert copier.holds(Request("find", "children", {"filter": {"n": 1}}))


def relation(child: str, path: str, parent: str, references: int) -> Relation:
    return Relation(child, path, parent, "_id", False, references, Distribution((), 1.0), 1, 0, 0, 1)


def test_parents_come_before_children_and_circles_begin_somewhere():
    relations = (
        relation("lines", "order", "orders", 10),
        relation("orders", "customer", "customers", 5),
        relation("orders", "shop", "shops", 9),
        relation("shops", "owner", "customers", 2),
        relation("customers", "shop", "shops", 1),
    )
    made = steps(Scan("x", (8,), {}, relations), ["lines", "orders", "customers", "shops", "alone"])
    names = [each.collection for each in made]
    assert {"lines", "orders", "customers", "shops", "alone"} == set(names)
    assert names.index("shops") < names.index("orders") < names.index("lines")
    order = next(each for each in made if each.collection == "orders")
    assert order.main is not None
    assert ("shop", ["customer"]) == (order.main.path, [each.path for each in order.others])


# -- figures ----------------------------------------------------------------------------------


def result(
    kind: str, before: float, after: float, per_second: float = 1.0, different: int = 0
) -> RequestResult:
    def side(mean: float) -> Side:
        return Side(Measured(mean, mean, mean), Measured(mean, mean, mean), 1, 1, 1, mean)

    value = before / after
    spread = Measured(value, value / 1.25, value * 1.25)
    compared = 10 if kind == "read" else 0
    return RequestResult(
        kind, "a", "b", 10, per_second, 10, compared, different, side(before), side(after), spread
    )


@pytest.mark.parametrize(
    ("requests", "change", "verdict"),
    [
        ([result("read", 10, 1)], 60.0, "do"),
        ([result("read", 10, 1), result("write", 1, 3)], 60.0, "do"),
        ([result("read", 10, 1), result("write", 1, 30)], 60.0, "do not"),
        ([result("read", 10, 1, 0.1), result("write", 1, 3)], 60.0, "do not"),
        ([result("read", 1.1, 1)], 60.0, "do not"),
        ([result("read", 1, 2)], 60.0, "do not"),
        ([result("read", 10, 1, different=1)], 60.0, "do not"),
        ([result("read", 10, 1, 0.00001)], 60.0, "do not"),
        ([result("write", 1, 2)], 60.0, "no evidence"),
        ([], 60.0, "no evidence"),
    ],
)
def test_a_pattern_is_advised_only_where_it_pays(requests, change, verdict):
    assert verdict == judge(Trial("computed", "x", "", requests, None, change)).verdict


def test_the_break_even_is_the_change_over_what_is_saved():
    judged = judge(
        Trial("computed", "x", "", [result("read", 10, 1), result("write", 1, 3, 2.0)], None, 432.0)
    )
    # 9 ms saved once a second, 2 ms spent twice a second.
    assert (777.6, 345.6) == (
        pytest.approx(judged.gain_seconds_per_day),
        pytest.approx(judged.cost_seconds_per_day),
    )
    assert judged.break_even_days == pytest.approx(1.0)
    assert judged.score == pytest.approx(432.0 - 432.0 / 365)


def test_intervals_hold_what_rounds_show():
    assert [2.0] * 3 == [predicted([2.0]).value, *(each.value for each in [predicted([2.0, 2.0])] * 2)]
    wide, narrow = predicted([1.0, 2.0, 4.0]), predicted([2.0, 2.0, 2.0])
    assert wide.low < narrow.low < 2.0 < narrow.high < wide.high
    assert (2.0, 3.0) == (quantile([1, 2, 3], 0.5), quantile([1, 2, 3], 0.99))
    assert [[1.0], [1.0], [2.0]] == tamed([[1.0], [1.0], [100.0]])
    assert 2.0 == pytest.approx(ratio([[2.0, 4.0], [2.0, 4.0]], [[1.0, 2.0], [1.0, 2.0]]).value)


def test_only_names_findings_of_the_scan(database):
    report = scan(database)
    assert [] == select(report, [])
    with pytest.raises(UsageError) as refused:
        select(report, ["computed@nowhere"])
    assert "finding-unknown" == refused.value.code


def test_a_workload_without_requests_proves_nothing(database, shop, tmp_path):
    report = scan(database, workload=workload_file.read(shop).profile_documents())
    empty = workload_file.read(write(tmp_path / "empty"))
    trial = try_findings(database, report, empty, only=["subset"])
    assert ["no evidence"] == [each.verdict for each in trial.results]
    assert dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC) == empty.started
