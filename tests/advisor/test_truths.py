"""What is so in databases of other people's making, and how the advisor names it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from bson import Decimal128, ObjectId
from gridfs import GridFSBucket

from tests.advisor.symptoms import at, finding_of, profiled
from tests.advisor.tables import table
from tests.advisor.test_rules import check_declarations, compiled
from treadle import Store
from treadle.advisor import Limits, Report, scan


def relations(report: Report) -> set[tuple[str, str, str, str]]:
    return {(each.child, each.path, each.parent, each.key) for each in report.scan.relations}


def where(report: Report, code: str) -> list[str]:
    return [each.where for each in finding_of(report.findings, code)]


# -- references by a natural key ------------------------------------------------------------


def airline(database: Any, flights: int = 900) -> None:
    chance = random.Random(5)
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    codes = sorted({chance.choice(letters) + chance.choice(letters) for _ in range(16)})
    places = sorted({"".join(chance.choices(letters, k=3)) for _ in range(150)})
    database["airlines"].insert_many([{"code": each, "name": f"Air {each}"} for each in codes])
    database["airports"].insert_many([{"faa": each, "name": f"at {each}", "alt": 9} for each in places])
    database["planes"].insert_many([{"tailnum": f"N{n * 37:05}", "seats": 100 + n % 90} for n in range(200)])
    database["flights"].insert_many(
        [
            {
                "carrier": codes[n % len(codes)],
                "tailnum": f"N{n % 200 * 37:05}",
                "origin": places[n % 3],
                "dest": places[n * 7 % len(places)],
                "delay": n % 60 - 10,
                "gate": f"g{n % 30}",
            }
            for n in range(flights)
        ]
    )


def test_values_of_a_unique_field_that_is_no_id_are_references(database: Any) -> None:
    """Without any index, and whatever the field is called."""
    airline(database)
    report = scan(database)
    assert {
        ("flights", "carrier", "airlines", "code"),
        ("flights", "tailnum", "planes", "tailnum"),
        ("flights", "origin", "airports", "faa"),
        ("flights", "dest", "airports", "faa"),
    } == relations(report)
    carrier = next(each for each in report.scan.relations if each.path == "carrier")
    assert (900, 0, "values") == (carrier.references, carrier.orphans, carrier.found_by)


def test_numbers_in_an_array_are_references_by_their_name(database: Any) -> None:
    chance = random.Random(6)
    numbers = chance.sample(range(100_000, 999_999), 400)
    database["accounts"].insert_many([{"account_id": each, "limit": 9_000} for each in numbers])
    database["customers"].insert_many(
        [{"username": f"u{n}", "accounts": numbers[3 * n : 3 * n + 1 + n % 3]} for n in range(120)]
    )
    database["visits"].insert_many([{"rooms": n % 40, "guests": n % 3} for n in range(120)])
    assert {("customers", "accounts[]", "accounts", "account_id")} == relations(scan(database))


def test_the_same_words_in_two_collections_are_no_reference(database: Any) -> None:
    """Names, states and small numbers coincide without meaning each other."""
    database["rooms"].insert_many([{"name": f"n{n}", "floor": n} for n in range(60)])
    database["guests"].insert_many(
        [{"name": f"n{n}", "status": ["new", "old"][n % 2], "level": n % 20} for n in range(60)]
    )
    database["words"].insert_many([{"text": each, "n": 1} for each in ("new", "old", "big", "red")])
    assert set() == relations(scan(database))


def test_a_pattern_on_a_natural_key_says_to(database: Any) -> None:
    airline(database)
    with profiled(database):
        for _ in range(20):
            list(
                database["flights"].aggregate(
                    [
                        {"$limit": 3},
                        {
                            "$lookup": {
                                "from": "airlines",
                                "localField": "carrier",
                                "foreignField": "code",
                                "as": "a",
                            }
                        },
                    ]
                )
            )
    report = scan(database)
    (found,) = finding_of(report.findings, "extended-reference")
    assert "flights.carrier" == found.where
    assert 'by="carrier", to="code"' in found.declaration
    check_declarations(report, database)
    with Store(database, models=compiled(found.declaration)) as store:
        store.setup()
        store.rebuild()
    assert "Air " in str(database["flights"].find_one())


def test_a_large_collection_is_not_read_whole_to_look_for_keys(database: Any) -> None:
    database["logs"].insert_many([{"code": f"c{n}", "level": n % 3} for n in range(20_100)])
    database["codes"].insert_many([{"code": f"c{n}", "text": f"t{n}"} for n in range(50)])
    with profiled(database):
        scan(database)
    returned = database["system.profile"].find({"command.comment": "treadle scan"}, {"nreturned": 1})
    assert max(each.get("nreturned", 0) for each in returned) < 10_000


# -- series ------------------------------------------------------------------------------------


def weather(database: Any, hours: int, by_number: bool = False) -> None:
    chance = random.Random(7)
    rows = []
    for hour in range(hours):
        moment = at(hour / 24)
        for place in ("EWR", "JFK", "LGA"):
            if chance.random() < 0.02:
                continue
            rows.append(
                {
                    "origin": place,
                    "year": moment.year,
                    "month": moment.month,
                    "day": moment.day,
                    "hour": moment.hour,
                    "temp": round(chance.uniform(10, 90), 2),
                    "humid": round(chance.uniform(10, 99), 2),
                    "gust": None if chance.random() < 0.7 else 12.5,
                    "sky": chance.choice(["clear", "rain", "fog"]),
                    "time_hour": moment,
                }
            )
    database["weather"].insert_many(rows)


def test_hourly_readings_of_places_with_gaps_ask_for_a_bucket(database: Any) -> None:
    weather(database, 1_000)
    report = scan(database)
    (found,) = finding_of(report.findings, "bucket")
    assert "weather.time_hour" == found.where
    assert (3, "60 minutes") == (found.evidence["series"], found.evidence["at whole steps of"])
    assert 'key="origin"' in found.declaration
    assert 'stats=("temp", "humid", "gust",)' in found.declaration
    check_declarations(report, database)


def test_a_time_that_is_text_is_a_time(database: Any) -> None:
    database["air"].insert_many(
        [
            {"station": f"s{n % 10}", "observed_at": at(n // 10 / 24).isoformat(), "dust": n / 7}
            for n in range(2_400)
        ]
    )
    report = scan(database)
    (found,) = finding_of(report.findings, "bucket")
    assert "air.observed_at" == found.where
    check_declarations(report, database)
    (model,) = compiled(found.declaration)
    with Store(database, models=[model]) as store:
        store.setup()
        rows = database["air"].find({}, {"_id": 0}).limit(30)
        store.insert_many([model(**row) for row in rows])
        assert 30 == store.count(model, {})


def test_a_figure_per_day_is_a_summary_and_no_reading(database: Any) -> None:
    database["totals"].insert_many(
        [{"shop": f"s{n % 10}", "day": at(n // 10), "total": n / 7} for n in range(3_000)]
    )
    assert [] == where(scan(database), "bucket")


def test_what_happens_at_any_moment_with_a_description_is_no_series(database: Any) -> None:
    chance = random.Random(8)
    database["calls"].insert_many(
        [
            {
                "line": f"l{n % 3}",
                "at": at(n / 50 + chance.random() / 60),
                "seconds": n % 300,
                "cost": n % 7,
                "outcome": chance.choice(["answered", "missed"]),
            }
            for n in range(3_000)
        ]
    )
    assert [] == where(scan(database), "bucket")


# -- laid out like tables ----------------------------------------------------------------------


def invoices(database: Any, key: str = "_id") -> None:
    """Of a track there are fewer lines than of an invoice; and lists of tracks are many-to-many."""
    chance = random.Random(9)
    database["artists"].insert_many([{key: n, "name": f"a{n}"} for n in range(1, 41)])
    database["tracks"].insert_many(
        [{key: n, "title": f"t{n}", "artist_id": n % 40 + 1} for n in range(1, 2_001)]
    )
    database["invoices"].insert_many([{key: n, "placed": at(n), "total": 3.5} for n in range(1, 201)])
    database["invoice_lines"].insert_many(
        [
            {"invoice_id": n, "track_id": (n * 14 + place) % 2_000 + 1, "price": 0.99, "quantity": 1}
            for n in range(1, 201)
            for place in range(1 + n % 9)
        ]
    )
    database["playlists"].insert_many([{key: n, "name": f"p{n}"} for n in range(1, 31)])
    database["playlist_tracks"].insert_many(
        [
            {"playlist_id": n, "track_id": track}
            for n in range(1, 31)
            for track in chance.sample(range(1, 2_001), 20)
        ]
    )


@pytest.mark.parametrize("key", ["_id", "number"])
def test_lines_are_told_into_which_parent_they_belong(key: str, database: Any) -> None:
    """By their ids, and by numbers beside an id that nobody uses."""
    invoices(database, key)
    report = scan(database)
    (found,) = finding_of(report.findings, "normalised-everything")
    assert "invoice_lines.invoice_id" == found.where
    assert "invoice_lines in invoices" == found.evidence["children that could be embedded"]
    assert "belong into invoices" in found.summary
    assert ["playlist_tracks"] == where(report, "links")
    check_declarations(report, database)


def test_parts_are_found_by_how_they_are_read(database: Any) -> None:
    """The names say nothing, and parents are read with up to two hundred parts each time."""
    database["deliveries"].insert_many([{"_id": n, "to": {"city": "c"}, "on": at(n)} for n in range(40)])
    database["contents"].insert_many(
        [{"delivery": n, "what": f"w{place}"} for n in range(40) for place in range(60)]
    )
    database["contents"].create_index("delivery")
    with profiled(database):
        for n in range(20):
            database["deliveries"].find_one({"_id": n})
            list(database["contents"].find({"delivery": n}))
    report = scan(database)
    assert ["contents.delivery"] == where(report, "normalised-everything")


def test_what_merely_refers_is_not_embedded(database: Any) -> None:
    """Employees of departments and orders of customers are few, and yet no parts of them."""
    database["customers"].insert_many([{"_id": n, "name": f"c{n}"} for n in range(60)])
    database["departments"].insert_many([{"_id": n, "name": f"d{n}"} for n in range(20)])
    database["employees"].insert_many(
        [{"_id": n, "department_id": n % 20, "name": f"e{n}"} for n in range(100)]
    )
    database["orders"].insert_many(
        [{"_id": n, "customer_id": n % 60, "placed": at(n), "total": n} for n in range(240)]
    )
    with profiled(database):
        for n in range(20):
            order = database["orders"].find_one({"_id": n})
            database["customers"].find_one({"_id": order and order["customer_id"]})
    assert [] == where(scan(database), "normalised-everything")


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("newer", ["object", "text"])
def test_a_field_that_is_text_here_and_an_object_there_is_two_versions(newer: str, database: Any) -> None:
    def address(n: int) -> Any:
        is_text = n < 120 if newer == "object" else n >= 80
        return f"street {n}" if is_text else {"street": f"street {n}", "city": "c"}

    moment = int(at(0).timestamp())
    table(
        database,
        "people",
        "_id name address",
        [(ObjectId((moment + n).to_bytes(4, "big") + bytes(8)), f"n{n}", address(n)) for n in range(200)],
    )
    report = scan(database)
    (found,) = finding_of(report.findings, "schema-versioning")
    assert "people.address" == found.where
    older, newest = (120, 80) if newer == "object" else (80, 120)
    assert (older, newest) == (found.evidence["of the older shape"], found.evidence["of the newer shape"])
    assert ("string" if newer == "object" else "object") == found.evidence["older type"]
    assert [] == where(report, "mixed-types")
    check_declarations(report, database)
    (model,) = compiled(found.declaration)
    with Store(database, models=[model]) as store:
        store.setup()
        assert 200 == len(list(store.find(model, {})))


def test_a_few_slips_are_mixed_types(database: Any) -> None:
    database["people"].insert_many(
        [{"name": "n", "address": "a" if n < 4 else {"street": "s"}} for n in range(200)]
    )
    report = scan(database)
    assert (["people.address"], []) == (where(report, "mixed-types"), where(report, "schema-versioning"))


# -- GridFS ----------------------------------------------------------------------------------------


def test_gridfs_is_known_and_what_only_has_its_name_is_not(database: Any) -> None:
    bucket = GridFSBucket(database, chunk_size_bytes=90_000)
    for n in range(4):
        bucket.upload_from_stream(f"f{n}", bytes(300_000))
    database["photos.chunks"].insert_many([{"title": f"t{n}", "content": bytes(60_000)} for n in range(20)])
    database["photos.files"].insert_many([{"title": f"t{n}"} for n in range(20)])
    report = scan(database)
    assert ["photos.chunks.content"] == where(report, "blobs")
    kinds = {name: facts.kind for name, facts in report.scan.collections.items()}
    assert {"fs.files": "GridFS", "fs.chunks": "GridFS"} == {
        name: kind for name, kind in kinds.items() if kind != "collection"
    }


# -- copies and numbers by hand ----------------------------------------------------------------------


def orders(database: Any, stale: int, camel: bool = True) -> None:
    customers = [{"_id": ObjectId(), "name": f"name {n}", "tier": "gold"} for n in range(50)]
    database["customers"].insert_many(customers)
    database["orders"].insert_many(
        [
            {
                "customerId" if camel else "customer_id": customers[n % 50]["_id"],
                "customerName" if camel else "customer_name": f"name {n % 50}" if n >= stale else f"old {n}",
                "total": n,
            }
            for n in range(600)
        ]
    )


@pytest.mark.parametrize("camel", [True, False])
def test_a_copy_by_hand_is_said_to_be_stale_and_declared_under_its_name(camel: bool, database: Any) -> None:
    orders(database, 37, camel)
    report = scan(database)
    (found,) = finding_of(report.findings, "extended-reference")
    name, by = ("customerName", "customerId") if camel else ("customer_name", "customer_id")
    assert f"orders.{name}" == found.where
    assert (600, 37) == (found.evidence["copies compared"], found.evidence["stale"])
    assert f'{name}: Annotated[str | None, ExtendedReference(Customer, by="{by}", field="name")] = None' in (
        found.declaration
    )
    check_declarations(report, database)
    models = compiled(found.declaration)
    with Store(database, models=models) as store:
        store.setup()
        assert 37 == len(store.verify())
        store.repair()
    assert [] == where(scan(database), "extended-reference")


def test_a_copy_by_hand_in_a_large_collection_is_judged_by_a_sample(database: Any) -> None:
    orders(database, 150)
    report = scan(database, limits=Limits(structure_documents=200, sample_documents=200))
    (found,) = finding_of(report.findings, "extended-reference")
    assert 600 == found.evidence["sample of"]
    assert found.summary.count("in a sample")


@pytest.mark.parametrize("shape", ["card", "card with its id", "items"])
def test_cards_and_copies_in_items_are_compared_too(shape: str, database: Any) -> None:
    products = [{"_id": n, "title": f"title {n}", "price": n / 3} for n in range(1, 61)]
    database["products"].insert_many(products)

    def held(n: int) -> dict[str, Any]:
        product = products[n % 60]
        title = product["title"] if n % 20 else "old"
        if shape == "card":
            return {"product_id": product["_id"], "product": {"title": title}}
        if shape == "card with its id":
            return {"product": {"_id": product["_id"], "title": title}}
        # The price at which it was sold differs from today's.
        return {"lines": [{"productId": product["_id"], "productTitle": title, "price": n * 1.5}]}

    database["sales"].insert_many([{"at": at(n), **held(n)} for n in range(400)])
    report = scan(database)
    (found,) = finding_of(report.findings, "extended-reference")
    path = {"card": "product.title", "card with its id": "product.title", "items": "lines[].productTitle"}[
        shape
    ]
    assert (f"sales.{path}", 20) == (found.where, found.evidence["stale"])
    check_declarations(report, database)
    with Store(database, models=compiled(found.declaration)) as store:
        store.setup()
        assert 20 == len([each for each in store.verify() if each.pattern == "extended-reference"])


def test_what_is_alike_by_chance_is_no_copy(database: Any) -> None:
    """An order's own state is not the customer's, though both are mostly the same word."""
    chance = random.Random(10)
    database["customers"].insert_many(
        [{"_id": n, "language": chance.choice(["de", "en"]), "name": f"c{n}"} for n in range(50)]
    )
    database["letters"].insert_many(
        [{"customer_id": n % 50, "customer_language": chance.choice(["de", "en"])} for n in range(500)]
    )
    report = scan(database)
    assert ([], ()) == (where(report, "extended-reference"), report.scan.copies)


def test_a_counter_that_has_drifted_is_declared_under_its_name(database: Any) -> None:
    database["products"].insert_many(
        [
            {"_id": n, "name": f"p{n}", "reviewCount": 6 + (n % 10 == 0), "pointsTotal": Decimal128(str(n))}
            for n in range(60)
        ]
    )
    database["reviews"].insert_many([{"productId": n % 60, "rating": n % 5 + 1} for n in range(360)])
    report = scan(database)
    (found,) = finding_of(report.findings, "computed")
    assert "products.reviewCount" == found.where
    assert (60, 6) == (found.evidence["documents compared"], found.evidence["drifted"])
    assert 'reviewCount: Annotated[int, Count(Review, by="productId")] = 0' in found.declaration
    check_declarations(report, database)
    with Store(database, models=compiled(found.declaration)) as store:
        store.setup()
        assert 6 == len(store.verify())
        store.repair()
    assert [] == where(scan(database), "computed")


def test_a_count_of_some_is_no_count_that_has_drifted(database: Any) -> None:
    """Nine of ten remarks are approved, and their number is right; another name with the same end is not."""
    chance = random.Random(11)
    remarks = [{"page_id": n % 60, "approved": chance.random() < 0.9} for n in range(360)]
    counts = [sum(each["approved"] for each in remarks if each["page_id"] == n) for n in range(60)]
    database["pages"].insert_many(
        [{"_id": n, "approved_remark_count": counts[n], "num_site_remarks": 6 + (n < 3)} for n in range(60)]
    )
    database["remarks"].insert_many(remarks)
    assert ["pages.num_site_remarks"] == where(scan(database), "computed")


def test_values_of_pairs_may_be_of_any_type(database: Any) -> None:
    database["things"].insert_many(
        [{"specs": [{"k": "color", "v": "red"}, {"k": "size", "v": n}]} for n in range(60)]
    )
    assert [] == where(scan(database), "mixed-types")


# -- history in arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [True, False])
def test_former_states_in_an_array_are_a_history(states: bool, database: Any) -> None:
    """A list of what happened, or of one status, is none."""
    database["articles"].insert_many(
        [
            {
                "title": f"t{n}",
                "body": "b",
                "status": "draft",
                "history": [
                    {"at": at(place), **({"title": "old", "body": "x"} if states else {"status": "draft"})}
                    for place in range(n % 5)
                ],
            }
            for n in range(80)
        ]
    )
    report = scan(database)
    assert (["articles.history"] if states else []) == where(report, "history")
    check_declarations(report, database)


def test_numbered_collections_of_the_same_documents_are_a_history(database: Any) -> None:
    for name in ("policies", "policies_v1", "policies_v2"):
        database[name].insert_many([{"_id": n, "holder": "h", "premium": n} for n in range(60)])
    database["clients_v2"].insert_many([{"_id": n, "name": "h", "city": "c"} for n in range(60, 120)])
    database["clients"].insert_many([{"_id": n, "name": "h", "city": "c"} for n in range(60)])
    report = scan(database)
    assert ["policies_v1", "policies_v2"] == where(report, "history")
    check_declarations(report, database)


# -- references by unlike names and into large collections -----------------------------------------------


def test_a_join_in_the_workload_is_a_reference_whatever_the_names_are(database: Any) -> None:
    """Small numbers coincide; that somebody joins them does not."""
    database["depots"].insert_many([{"_id": n, "town": f"t{n}"} for n in range(1, 9)])
    database["vans"].insert_many([{"_id": n, "home": n % 8 + 1, "seats": n % 8 + 1} for n in range(1, 81)])
    assert set() == relations(scan(database))
    with profiled(database):
        lookup = {"from": "depots", "localField": "home", "foreignField": "_id", "as": "d"}
        list(database["vans"].aggregate([{"$limit": 3}, {"$lookup": lookup}]))
    assert {("vans", "home", "depots", "_id")} == relations(scan(database))


def test_a_role_is_a_reference_only_if_one_collection_can_be_meant(database: Any) -> None:
    database["staff"].insert_many([{"_id": n, "name": f"s{n}"} for n in range(1, 9)])
    database["tickets"].insert_many(
        [{"_id": n, "agentId": n % 5 + 2, "closed_by": n % 12, "levelId": n % 3 + 1} for n in range(1, 61)]
    )
    assert {("tickets", "agentId", "staff", "_id")} == relations(scan(database))
    database["members"].insert_many([{"_id": n, "name": f"m{n}"} for n in range(1, 90)])
    assert set() == relations(scan(database))


@pytest.mark.parametrize("twins", [0, 20_500])
def test_keys_of_a_large_collection_are_found_without_an_index(twins: int, database: Any) -> None:
    """Unless its values occur twice there."""
    database["parts"].insert_many(
        [{"part_no": f"p{n if n < 20_500 else n - twins:06}", "weight": n % 90} for n in range(21_000)]
    )
    database["uses"].insert_many([{"component": f"p{n * 37 % 400:06}", "n": n % 3} for n in range(2_000)])
    expected = set() if twins else {("uses", "component", "parts", "part_no")}
    assert expected == relations(scan(database))
