"""Each rule finds its symptom with the right numbers, and is silent on a near miss; on a real server."""

from __future__ import annotations

import itertools
import json
import sys
import types
from typing import Any

import pytest

from tests.advisor.symptoms import CASES, Case, finding_of, scanning
from treadle import Document, Store
from treadle.advisor import Limits, Report, Scan, scan
from treadle.advisor.interface import SEVERITIES
from treadle.advisor.rules import load

# The real rule waits for a day of counting; a test cannot.
LIMITS = Limits(index_age_seconds_min=0.0)
_numbers = itertools.count()

cases = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.code)


def test_every_rule_has_a_symptom_and_a_near_miss() -> None:
    assert set(load()) == set(CASES)


def test_rules_explain_themselves() -> None:
    for rule, _ in load().values():
        for text in (rule.title, rule.symptom, rule.remedy, rule.costs, rule.gains, rule.when_not):
            assert text
            assert text[0].isupper() or not text[0].isalpha()


@cases
def test_the_symptom_is_found_with_its_numbers(case: Case, database: Any) -> None:
    """And what it declares compiles, and a dry set-up accepts it."""
    case.symptom(database)
    before = sorted(database.list_collection_names())
    report = scan(database, limits=LIMITS)
    assert () == report.failures
    found = finding_of(report.findings, case.code)
    assert [case.where] == [each.where for each in found]
    assert case.evidence == {name: found[0].evidence.get(name) for name in case.evidence}
    assert case.severity == found[0].severity
    assert found[0].confidence in ("low", "medium", "high")
    assert found[0].summary.endswith(".")
    check_declarations(report, database)
    assert before == sorted(database.list_collection_names())


@cases
def test_the_near_miss_is_silent(case: Case, database: Any) -> None:
    case.near_miss(database)
    report = scan(database, limits=LIMITS)
    assert () == report.failures
    assert [] == finding_of(report.findings, case.code)


def compiled(source: str) -> list[type[Document]]:
    """The documents that a declaration makes, in a module of its own."""
    name = f"declared_{next(_numbers)}"
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    finally:
        sys.modules.pop(name)
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Document) and each.__module__ == name
    ]


def check_declarations(report: Report, database: Any) -> None:
    """Every declaration compiles, and a dry set-up accepts it."""
    for each in report.findings:
        try:
            documents = compiled(each.declaration)
            assert documents
            Store(database, models=documents).setup(dry_run=True)
        except Exception as error:
            raise AssertionError(f"{each.code}: {error!r}\n{each.declaration}") from error


def test_the_native_series_in_the_comment_can_take_the_place_of_the_bucket(database: Any) -> None:
    CASES["bucket"].symptom(database)
    finding = finding_of(scan(database).findings, "bucket")[0]
    head, _, rest = finding.declaration.partition("    bucket=Bucket(")
    native = rest.partition("# Native: ")[2]
    source = head.replace("import Bucket", "import TimeSeries") + "    " + native
    assert "timeseries=TimeSeries(" in source
    Store(database, models=compiled(source)).setup(dry_run=True)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("orders_{:024x}", "orders_#"),
        ("{:08x}-0000-4000-8000-00000000000a.log", "#.log"),
        ("log.2025-01-{:02}", "log.#-#-#"),
    ],
)
def test_ids_and_dates_in_names_make_a_family(name: str, pattern: str) -> None:
    """Hexadecimal ids too, whose digits and letters mix."""
    names = tuple(name.format(number * 7_919_001 if "x}" in name else number) for number in range(40, 70))
    found = Report.of(Scan("many", (6, 0), {}, names=names)).findings
    assert [("too-many-collections", pattern)] == [(each.code, each.where) for each in found]


def test_an_index_is_not_named_like_one_that_is_there(database: Any) -> None:
    """A partial index of the same keys serves no other query; of two arrays only one is taken."""
    CASES["query-without-index"].symptom(database)
    database["orders"].create_index("code", partialFilterExpression={"total": 1})
    database["orders"].update_many({}, {"$set": {"tags": [1], "lines": [{"sku": 1}]}})
    recorded = [
        scanning(database, "orders", filter=condition)
        for condition in ({"code": 1}, {"tags": 1, "lines.sku": 1, "total": 1})
    ]
    report = scan(database, workload=recorded)
    found = finding_of(report.findings, "query-without-index")
    assert ["orders.code", "orders.lines.sku, tags, total"] == [each.where for each in found]
    assert 'IndexModel([("code", 1)], name="code_1_2")' in found[0].declaration
    assert 'IndexModel([("lines.sku", 1), ("total", 1)])' in found[1].declaration
    for each in found:
        # Really, for only then are two arrays refused.
        assert Store(database, models=compiled(each.declaration)).setup()


def test_a_sort_by_a_key_that_is_data_is_not_shown(database: Any) -> None:
    CASES["query-without-index"].symptom(database)
    recorded = [
        scanning(database, "orders", filter={"code": 1}, sort={name: -1})
        for name in ("points.alice@example.org", "$natural")
    ]
    report = scan(database, workload=recorded)
    for each in finding_of(report.findings, "query-without-index"):
        assert 'IndexModel([("code", 1)])' in each.declaration
    assert "alice" not in json.dumps(report.as_json(), default=str)


def test_one_giant_among_few_is_an_outlier(database: Any) -> None:
    """Of sixty documents the largest is the 99th percentile; it is no less an outlier."""
    database["sellers"].insert_many(
        [{"name": "n", "followers": [1] * (2_000 if n == 7 else n % 12)} for n in range(60)]
    )
    report = scan(database)
    (found,) = finding_of(report.findings, "outlier")
    assert "Outlier(limit=50," in found.declaration
    check_declarations(report, database)


def test_a_file_inside_an_object_is_found(database: Any) -> None:
    database["photos"].insert_many(
        [{"title": "t", "file": {"name": "n", "content": bytes(60_000)}} for _ in range(20)]
    )
    report = scan(database)
    assert ["photos.file.content"] == [each.where for each in finding_of(report.findings, "blobs")]
    check_declarations(report, database)


def test_a_failing_rule_is_said_and_takes_nothing_with_it(
    database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["mixed-types"].symptom(database)
    rules = load()
    rule, _ = rules["outlier"]

    def fail(scan: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("treadle.advisor.report.load", lambda: {**rules, "outlier": (rule, fail)})
    report = scan(database)
    assert finding_of(report.findings, "mixed-types")
    assert ("The rule outlier failed (ZeroDivisionError); please report it.",) == report.failures


def test_findings_are_sorted_by_severity(database: Any) -> None:
    CASES["mixed-types"].symptom(database)
    CASES["deep-nesting"].symptom(database)
    report = scan(database)
    order = [SEVERITIES.index(each.severity) for each in report.findings]
    assert order == sorted(order, reverse=True)
    assert report.fails("info")
    assert report.fails("warning")
    assert not report.fails("problem")
