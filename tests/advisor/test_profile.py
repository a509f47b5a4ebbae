"""What a scan measures, how it is bounded, and what it does with odd databases; on real servers."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pymongo import AsyncMongoClient, MongoClient, monitoring

from tests.advisor.symptoms import scanning
from tests.kit.standalone import StandaloneServer
from treadle import UsageError
from treadle.advisor import Limits, Step, scan
from treadle.advisor.facts import CollectionFacts
from treadle.advisor.html import html
from treadle.advisor.measure import Measurer
from treadle.advisor.reading import COMMENT, TOO_LONG, Reader, Refused
from treadle.advisor.statistics import add_storage_statistics

PASSWORD = "hush"
READS = {
    "aggregate",
    "find",
    "getMore",
    "listCollections",
    "listIndexes",
    "buildInfo",
    "killCursors",
    "count",
}


class Watch(monitoring.CommandListener):
    """Notes commands, and whether two were ever in flight at once."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.running = 0
        self.most = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        if event.command_name not in ("hello", "endSessions", "saslStart", "saslContinue"):
            self.commands.append(event.command)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        self.running -= 1

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        self.running -= 1


def shop(database: Any) -> None:
    customers = [ObjectId() for _ in range(50)]
    database["customers"].insert_many([{"_id": each, "name": f"n{n}"} for n, each in enumerate(customers)])
    database["orders"].insert_many(
        [{"customer_id": customers[n % 50], "total": n, "tags": ["a"] * (n % 4)} for n in range(500)]
    )


def test_it_reads_only_one_operation_at_a_time_each_with_an_end(server: Any, database: Any) -> None:
    shop(database)
    watch = Watch()
    with MongoClient(server.uri, event_listeners=[watch]) as client:
        scan(client[database.name], limits=Limits(operation_seconds=7))
    assert 1 == watch.most
    assert 15 < len(watch.commands)
    for command in watch.commands:
        name = next(iter(command))
        assert name in READS
        if name not in ("getMore", "killCursors"):
            assert (7_000, COMMENT) == (command["maxTimeMS"], command["comment"]), name
        if name == "aggregate":
            assert command["allowDiskUse"] is False
            stages = {next(iter(stage)) for stage in command["pipeline"]}
            assert not stages & {"$out", "$merge"}


def test_nothing_is_written(server: Any, client: Any, database: Any) -> None:
    shop(database)
    oplog = client.local["oplog.rs"]
    written = {"op": {"$ne": "n"}, "ns": {"$not": {"$regex": r"^config\."}}}
    before = oplog.count_documents(written), sorted(client.list_database_names())
    scan(database)
    assert before == (oplog.count_documents(written), sorted(client.list_database_names()))


def test_fields_types_and_presence_are_exact(database: Any) -> None:
    database["things"].insert_many(
        [
            {
                "always": n,
                **({"sometimes": "x"} if n % 4 == 0 else {}),
                "mixed": None if n % 10 == 0 else 1.5 if n % 2 else Decimal128("1.5"),
                "inner": {"a": {"b": n}, **({"c": True} if n < 5 else {})},
                "rows": [{"x": 1}, {"y": "s"}] if n % 2 else [],
            }
            for n in range(200)
        ]
    )
    facts = scan(database).scan.collections["things"]
    types = {path: dict(each.types) for path, each in facts.fields.items()}
    assert {"int": 200} == types["always"]
    assert {"string": 50} == types["sometimes"]
    assert {"null": 20, "double": 100, "decimal": 80} == types["mixed"]
    assert {"object": 200} == types["inner"] == types["inner.a"]
    assert {"int": 200} == types["inner.a.b"]
    assert {"bool": 5} == types["inner.c"]
    assert {"array": 200} == types["rows"]
    # In documents, not in items.
    assert {"object": 100} == types["rows[]"]
    assert {"int": 100} == types["rows[].x"]
    assert 3 == facts.depth
    assert (200, 200) == (facts.count, facts.looked_at)


def test_sizes_are_the_servers_own(database: Any) -> None:
    database["things"].insert_many([{"_id": n, "text": "x" * n} for n in range(300)])
    sizes = scan(database).scan.collections["things"].sizes
    true = sorted(
        row["s"] for row in database["things"].aggregate([{"$project": {"s": {"$bsonSize": "$$ROOT"}}}])
    )
    assert sizes is not None
    assert (true[0], true[-1], 300) == (sizes.minimum, sizes.maximum, sizes.count)
    assert sum(true) / 300 == pytest.approx(sizes.mean)
    assert true[150] == pytest.approx(sizes.median, rel=0.1)


def test_the_one_long_array_is_not_missed(database: Any) -> None:
    """A sample of a thousand would miss it nineteen times in twenty."""
    database["people"].insert_many(
        [{"_id": n, "f": list(range(9_000 if n == 13_579 else n % 5))} for n in range(20_000)]
    )
    lengths = scan(database).scan.collections["people"].fields["f"].lengths
    assert lengths is not None
    assert (20_000, 9_000, 2, 4) == (lengths.count, lengths.maximum, lengths.median, lengths.p99)
    assert lengths.sampled_of is None
    assert 1 == lengths.above(4)


def test_beyond_the_budget_the_sample_is_uniform_and_said(database: Any) -> None:
    """The server's own $sample of so few prefers large documents: it would find several times the mean."""
    database["people"].insert_many(
        [{"_id": n, "f": list(range(400 if n % 50 == 7 else 1)), "in": {"x": 1}} for n in range(40_000)]
    )
    limits = Limits(full_pass_documents=10_000, structure_documents=5_000, sample_documents=2_000)
    facts = scan(database, limits=limits).scan.collections["people"]
    lengths = facts.fields["f"].lengths
    assert lengths is not None
    assert 40_000 == lengths.sampled_of
    assert 2_000 == pytest.approx(lengths.count, rel=0.15)
    # The truth is 8.98, and a mean of 2,000 strays from it by 1.25.
    assert 8.98 == pytest.approx(lengths.mean, abs=6)
    assert facts.looked_at == pytest.approx(2_000, rel=0.15)
    # Of just the documents that were looked at, not of about so many.
    assert 1 == facts.fields["in.x"].share
    assert any(f"uniform sample of {facts.looked_at:,}" in note for note in facts.notes)
    assert facts.sizes is not None
    assert 40_000 == facts.sizes.sampled_of
    assert facts.looked_at < facts.count


def test_an_operation_that_takes_too_long_is_said(database: Any) -> None:
    database["big"].insert_many([{"n": n, "a": {"b": "x" * 50}} for n in range(30_000)])
    database["small"].insert_one({"a": 1})
    found = scan(database, limits=Limits(operation_seconds=0.004)).scan
    assert {"big", "small"} == set(found.collections)
    big = found.collections["big"]
    assert "took too long" in str((big.skipped, big.notes))


def test_keys_that_are_data_are_shown_as_a_star(database: Any) -> None:
    database["maps"].insert_many(
        [{"name": "n", "by_mail": {f"ada{n}@example.org": {"n": n}, "total": n}} for n in range(300)]
    )
    database["bare"].insert_many([{f"key-{n}@example.org": n} for n in range(3_000)])
    # Few documents are enough where keys do not recur, or look like data.
    database["few"].insert_many([{"votes": {f"user-ada{n}@example": 1}} for n in range(9)])
    database["fewer"].insert_many([{"votes": {f"ada{n}{k}@example": 1 for k in range(4)}} for n in range(3)])
    database["dated"].insert_many([{"days": {"2025-01-01": n, "2025-01-02": n}} for n in range(90)])
    database["items"].insert_many(
        [{"rows": [{"m": {f"ada{n}-{k}@example": 1}} for k in range(30)]} for n in range(4)]
    )
    recorded = [
        scanning(database, "maps", filter={f"by_mail.{key}": 1})
        for key in ("ada1@example.org", "ada77", "total")
    ]
    report = scan(database, workload=recorded)
    assert {"_id", "votes", "votes.*"} == set(report.scan.collections["few"].fields)
    assert {"_id", "votes", "votes.*"} == set(report.scan.collections["fewer"].fields)
    assert {"_id", "days", "days.*"} == set(report.scan.collections["dated"].fields)
    # Nor do they come from the workload.
    unserved = [each.where for each in report.findings if each.code == "query-without-index"]
    assert ["maps.by_mail.total"] == unserved
    facts = report.scan.collections["maps"]
    assert {"_id", "name", "by_mail", "by_mail.*", "by_mail.*.n", "by_mail.total"} == set(facts.fields)
    assert facts.fields["by_mail"].is_map
    assert {"_id", "*"} == set(report.scan.collections["bare"].fields)
    assert "@example" not in json.dumps(report.as_json())
    assert "ada77" not in html(report)


ODD = {
    "a.b": 1,
    "$x": [1, 2, 3],
    "ünï ☃": "v",
    "<script>alert(1)</script>": {"<b>": [1]},
    "": 5,
    "class": 1,
    "id": 7,
}


def test_of_an_object_with_very_many_keys_the_first_are_looked_at(database: Any) -> None:
    """The server would take minutes for all keys of a document of 16 MB, whatever its time limit."""
    keys = {f"k{n}": {"first": 1} if n == 0 else n for n in range(1_200)}
    database["maps"].insert_many([{"n": n, "m": keys} for n in range(30)])
    fields = scan(database).scan.collections["maps"].fields
    assert "m.k0.first" in fields
    assert not any(path.startswith("m.k1100") for path in fields)


def test_odd_names_are_measured(database: Any) -> None:
    database['<img src=x onerror="alert(1)">'].insert_many([dict(ODD) for _ in range(120)])
    report = scan(database)
    facts = report.scan.collections['<img src=x onerror="alert(1)">']
    assert set(ODD) <= set(facts.fields)
    lengths = facts.fields["$x"].lengths
    assert lengths is not None
    assert 3 == lengths.maximum
    assert "<script>alert(1)</script>.<b>[]" in facts.fields
    assert () == report.failures


def test_views_series_capped_and_empty_collections_are_said(database: Any) -> None:
    shop(database)
    database.create_collection("big_orders", viewOn="orders", pipeline=[{"$match": {"total": {"$gt": 1}}}])
    database.create_collection("readings", timeseries={"timeField": "ts", "metaField": "sensor"})
    database["readings"].insert_one({"ts": dt.datetime(2025, 1, 1), "sensor": 1, "v": 2})
    database.create_collection("recent", capped=True, size=100_000)
    database["recent"].insert_many([{"n": n} for n in range(30)])
    database.create_collection("nothing")
    found = scan(database).scan
    assert {"customers", "orders", "big_orders", "readings", "recent", "nothing"} == set(found.collections)
    assert ("view", "a view on orders") == (
        found.collections["big_orders"].kind,
        found.collections["big_orders"].skipped,
    )
    assert "time series" == found.collections["readings"].kind
    assert "by ts" in found.collections["readings"].notes[0]
    assert found.collections["recent"].capped
    assert 30 == found.collections["recent"].count
    assert ("empty",) == found.collections["nothing"].notes
    assert 0 == found.collections["nothing"].count


def test_an_empty_database_is_no_error(database: Any) -> None:
    report = scan(database)
    assert () == report.findings
    assert "no collections" in report.scan.notes[0]
    assert "Nothing to change" in html(report)


def test_statistics_of_several_shards_are_added() -> None:
    """As a router answers $collStats: one row per shard."""
    rows = [
        {
            "count": 10,
            "size": 1_000,
            "storageSize": 5,
            "totalIndexSize": 7,
            "indexSizes": {"_id_": 7},
            "shard": "a",
        },
        {
            "count": 30,
            "size": 2_000,
            "storageSize": 6,
            "totalIndexSize": 9,
            "indexSizes": {"_id_": 9},
            "shard": "b",
        },
    ]
    facts = add_storage_statistics(CollectionFacts("orders"), rows)
    assert (40, 3_000, 16, True) == (facts.count, facts.data_bytes, facts.index_bytes, facts.sharded)
    assert "2 shards" in facts.notes[0]
    assert 16 == facts.indexes[0].bytes


def test_arrays_inside_arrays_are_measured(database: Any) -> None:
    """By the longest in each document."""
    database["books"].insert_many(
        [
            {"parts": [{"pages": [1] * n}, {"pages": [1] * (1_200 if n == 7 else 2)}, {"other": 1}]}
            for n in range(60)
        ]
    )
    report = scan(database)
    lengths = report.scan.collections["books"].fields["parts[].pages"].lengths
    assert lengths is not None
    assert (60, 2, 1_200) == (lengths.count, lengths.minimum, lengths.maximum)
    assert ["books.parts[].pages"] == [each.where for each in report.findings if each.code == "huge-array"]


class Slow(Reader):
    """A reader whose server takes too long for any pass over a whole collection."""

    def aggregate(self, collection: str, pipeline: Any, **options: Any) -> list[dict[str, Any]]:
        if next(iter(pipeline[0])) not in {"$sample", "$limit", "$collStats", "$indexStats"}:
            self.refused = getattr(self, "refused", 0) + 1
            raise Refused(TOO_LONG)
        return super().aggregate(collection, pipeline, **options)


def test_where_a_pass_takes_too_long_fields_come_from_a_quick_sample(database: Any) -> None:
    """Instead of nothing at all; no second pass is tried, and the sample is said not to be uniform."""
    database["big"].insert_many([{"n": n, "tags": ["a"], "in": {"x": n}} for n in range(400)])
    reader = Slow.on(database, 10, False)
    limits = Limits(sample_documents=100)
    facts = Measurer(reader, limits, (6, 0), False).collection("big", {"options": {}})
    assert facts.skipped is None
    assert {"_id", "n", "tags", "tags[]", "in", "in.x"} == set(facts.fields)
    assert 100 == facts.looked_at
    assert any("quick sample, which prefers large documents, of 100" in note for note in facts.notes)
    assert any("array lengths were not measured: it took too long" in note for note in facts.notes)
    assert 1 == reader.refused


def test_more_names_than_fit_are_not_all_held(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.advisor.measure.SHAPE_ENTRIES_MAX", 500)
    database["wide"].insert_many([{f"k{n}_{place}": 1 for place in range(30)} for n in range(50)])
    facts = scan(database).scan.collections["wide"]
    assert {"_id", "*"} == set(facts.fields)
    assert not facts.shapes_complete


# -- what goes wrong -------------------------------------------------------------------


def test_ctrl_c_gives_what_is_known(database: Any) -> None:
    shop(database)
    seen = itertools.count()

    def interrupt(step: Step) -> None:
        if next(seen) == 1:
            raise KeyboardInterrupt

    report = scan(database, progress=interrupt)
    assert ["customers"] == list(report.scan.collections)
    assert not report.scan.complete
    assert not report.scan.lost
    assert "Interrupted" in report.scan.notes[-1]
    assert report.as_json()["complete"] is False


@pytest.mark.server
def test_a_server_that_goes_away_leaves_what_is_known() -> None:
    with (
        StandaloneServer() as running,
        MongoClient[dict[str, Any]](running.uri, serverSelectionTimeoutMS=500) as client,
    ):
        shop(client["shop"])

        def stop(step: Step) -> None:
            if step.what == "orders":
                running.stop()

        report = scan(client["shop"], progress=stop)
    assert ["customers"] == list(report.scan.collections)
    assert report.scan.lost
    assert "connection was lost" in report.scan.notes[-1]


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """A server whose user may read all collections of `shop` but one, and only that."""
    with StandaloneServer(arguments=["--auth"]) as running:
        with MongoClient[dict[str, Any]](running.uri) as first:
            first.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[dict[str, Any]](running.uri, username="root", password=PASSWORD) as root:
            shop(root["shop"])
            root["shop"]["salaries"].insert_one({"amount": 1})
            may = [
                {
                    "resource": {"db": "shop", "collection": name},
                    "actions": ["find", "collStats", "indexStats", "listIndexes"],
                }
                for name in ("orders", "customers")
            ]
            may.append({"resource": {"db": "shop", "collection": ""}, "actions": ["listCollections"]})
            root["shop"].command("createRole", "most", privileges=may, roles=[])
            root["shop"].command(
                "createRole",
                "finds",
                privileges=[{"resource": {"db": "shop", "collection": "orders"}, "actions": ["find"]}],
                roles=[],
            )
            root["shop"].command("createUser", "clerk", pwd=PASSWORD, roles=["most"])
            root["shop"].command("createUser", "guest", pwd=PASSWORD, roles=["finds"])
        yield running.uri


def test_a_collection_without_rights_is_said_and_the_rest_goes_on(guarded: str) -> None:
    with MongoClient[dict[str, Any]](
        guarded, username="clerk", password=PASSWORD, authSource="shop"
    ) as client:
        found = scan(client["shop"]).scan
        # Which are the largest is told of those that it may see.
        largest = scan(client["shop"], limits=Limits(collections=1)).scan
    assert [("orders", "customer_id", "customers")] == [(r.child, r.path, r.parent) for r in found.relations]
    assert "no rights" == found.collections["salaries"].skipped
    assert (500, None) == (found.collections["orders"].count, found.collections["orders"].skipped)
    assert found.complete
    assert ["orders"] == list(largest.collections)


def test_a_login_that_may_only_find_gets_what_it_may_see(guarded: str) -> None:
    """Neither statistics nor a full list; nothing ends the scan."""
    with MongoClient[dict[str, Any]](
        guarded, username="guest", password=PASSWORD, authSource="shop"
    ) as client:
        report = scan(client["shop"])
    found = report.scan
    facts = found.collections["orders"]
    assert ["orders"] == list(found.collections)
    assert (500, None, 500) == (facts.count, facts.skipped, facts.looked_at)
    assert {"_id", "customer_id", "total", "tags", "tags[]"} == set(facts.fields)
    assert "its statistics were not seen: no rights" in facts.notes
    # Without a look at its options nobody can say that it has no validator.
    assert facts.validated is None
    assert [] == list(report.findings)


def test_of_very_many_collections_the_largest_are_looked_into(database: Any) -> None:
    for number in range(40):
        database[f"c{number}"].insert_many([{"n": 1}] if number % 10 else [{"n": n} for n in range(50)])
    database.create_collection("a_view", viewOn="c0", pipeline=[])
    found = scan(database, limits=Limits(collections=4)).scan
    assert {"c0", "c10", "c20", "c30"} == set(found.collections)
    assert 41 == len(found.names)
    assert "41 collections; the 4 largest" in found.notes[0]


@pytest.mark.all
@pytest.mark.heavy
def test_five_thousand_collections() -> None:
    """Empty ones, made in bulk; the scan names the pattern of their names and looks into the largest."""
    arguments = ["--storageEngine", "ephemeralForTest"]
    with (
        StandaloneServer(arguments=arguments) as running,
        MongoClient[dict[str, Any]](running.uri) as client,
    ):
        database = client["many"]
        database["tenant_17"].insert_many([{"n": n} for n in range(50)])
        names = [f"tenant_{n}" for n in range(5_000) if n != 17]
        for start in range(0, len(names), 250):
            made = [
                {"op": "c", "ns": "many.$cmd", "o": {"create": name}} for name in names[start : start + 250]
            ]
            client.admin.command({"applyOps": made})
        report = scan(database, limits=Limits(collections=20))
    assert 5_000 == len(report.scan.names)
    assert 20 == len(report.scan.collections)
    assert 50 == report.scan.collections["tenant_17"].count
    assert "5,000 collections; the 20 largest" in report.scan.notes[0]
    assert ["tenant_#"] == [each.where for each in report.findings if each.code == "too-many-collections"]


def test_an_asyncio_database_is_refused(server: Any) -> None:
    async def ask() -> None:
        async with AsyncMongoClient(server.uri) as client:
            scan(client["shop"])  # type: ignore[arg-type]

    with pytest.raises(UsageError) as caught:
        asyncio.run(ask())
    assert "database-invalid" == caught.value.code


def test_dates_beyond_pythons_do_not_end_the_scan(database: Any) -> None:
    from bson.datetime_ms import DatetimeMS

    database["far"].insert_many(
        [{"key": f"k{n % 3}", "at": DatetimeMS(400_000_000_000_000 + n), "v": n} for n in range(5_100)]
    )
    report = scan(database)
    assert 5_100 == report.scan.collections["far"].count
    assert report.scan.collections["far"].skipped is None
    assert () == report.failures


SECRET = "s3cr3t"


def test_no_value_is_in_any_output(database: Any) -> None:
    """Not in text, JSON or HTML; only --show-values names kinds."""
    kinds = [{"isbn": SECRET, "pages": 1}, {"volts": SECRET, "watts": 1}]
    database["items"].insert_many(
        [
            {
                "type": f"{SECRET}-{n % 2}",
                "title": SECRET,
                "tags": [SECRET],
                "in": {"x": SECRET},
                **kinds[n % 2],
            }
            for n in range(200)
        ]
    )
    database["items"].create_index("title", partialFilterExpression={"title": SECRET}, name="by_title")
    database.create_collection("checked", validator={"a": {"$ne": SECRET}})
    database["maps"].insert_many([{"m": {f"{SECRET}{n}": 1}} for n in range(100)])
    report = scan(database)
    assert SECRET not in json.dumps(report.as_json())
    assert SECRET not in html(report)
    assert SECRET in json.dumps(scan(database, show_values=True).as_json())
    assert SECRET in html(scan(database, show_values=True))


def test_documents_with_very_many_fields_are_looked_into(database: Any) -> None:
    """The names of one fill more than a reply; the first of them are enough to see that they are data."""
    database["wide"].insert_many([{f"top{n}_{place}": 1 for place in range(250_000)} for n in range(2)])
    facts = scan(database).scan.collections["wide"]
    assert (None, {"_id", "*"}) == (facts.skipped, set(facts.fields))
