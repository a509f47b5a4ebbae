"""The demo's data and words, and from outside that it does what it says."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.cli.invoke import RUN_SECONDS_MAX, assert_one_sentence, run, start
from treadle.cli.demo import demo
from treadle.demo.data import Maker, Sizes
from treadle.demo.measure import Cost, milliseconds
from treadle.demo.requests import REQUESTS
from treadle.demo.story import Comparison
from treadle.errors import UsageError


def comparison(before: float, after: float) -> Comparison:
    return Comparison(REQUESTS[0], "", Cost(before, 1, 1, 1), Cost(after, 1, 1, 1))


@pytest.mark.all
def test_the_shop_is_the_same_in_every_run_and_has_tens_of_thousands_of_documents() -> None:
    def made() -> list[list[dict[str, Any]]]:
        maker = Maker(Sizes.at(1.0))
        kinds = (maker.make_customers(), maker.make_products(), maker.make_reviews(), maker.make_orders(),
                 maker.make_sellers(), maker.make_readings())  # fmt: skip
        return [list(islice(kind, 300)) for kind in kinds]

    assert made() == made()
    sizes = Sizes.at(1.0)
    total = sizes.customers + sizes.products + sizes.reviews + sizes.orders + sizes.sellers + sizes.readings
    assert 40_000 < total < 60_000


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.1, 0.004, "25 times as fast"),
        (0.009, 0.002, "4.5 times as fast"),
        (0.001, 0.001, "about as fast"),
        (0.001, 0.003, "3.0 times as slow"),
    ],
)
def test_nothing_is_called_faster_that_is_not(before: float, after: float, said: str) -> None:
    assert said == comparison(before, after).speed


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.00042, "0.42 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (3.333, "3.33 s")]
)
def test_times_have_three_digits(seconds: float, said: str) -> None:
    assert said == milliseconds(seconds)


@pytest.mark.parametrize("place", [".", "absent/report.html"])
def test_a_report_that_could_not_be_written_is_refused_before_anything_starts(
    tmp_path: Path, place: str
) -> None:
    with pytest.raises(UsageError) as caught:
        demo(html=str(tmp_path / place))
    assert "output-invalid" == caught.value.code


PATTERNS = ("Extended Reference", "Computed", "Subset", "Outlier", "Bucket", "Approximation")


@pytest.mark.all
@pytest.mark.heavy
@pytest.mark.server
def test_demo_shows_what_it_claims_and_leaves_only_its_report(tmp_path: Path) -> None:
    """One run in a narrow terminal without colours: its words, its data, its report, and its end."""
    folder, report = tmp_path / "temporary", tmp_path / "report.html"
    folder.mkdir()
    arguments = ("demo", "--scale", "0.02", "--html", str(report), "--keep")
    process = start(*arguments, COLUMNS="48", NO_COLOR="1", TMPDIR=str(folder))
    assert process.stdout is not None
    try:
        seen = ""
        for line in process.stdout:
            seen += line
            if "Ctrl-C here" in line:
                break
        (uri,) = re.findall(r'^   mongosh "(mongodb://treadle@127.0.0.1:.*)"$', seen, re.MULTILINE)
        (file,) = re.findall(r"^   (/.*/treadle/private/key)$", seen, re.MULTILINE)
        password = Path(file).read_text()
        assert password not in seen
        with MongoClient[dict[str, Any]](uri, password=password) as client:
            database = client.get_default_database()
            order = database["orders"].find_one() or {}
            customer = database["customers"].find_one({"_id": order["customer_id"]}) or {}
            assert {name: customer[name] for name in ("name", "email", "tier")} == order["customer"]
            product = database["products"].find_one({"review_count": {"$gt": 200}}) or {}
            reviews = list(database["reviews"].find({"product_id": product["_id"]}))
            assert len(reviews) == product["review_count"]
            # Seen once by the profiler and measured once, before and after.
            assert 4 * 200 == product["views"]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=RUN_SECONDS_MAX)
    finally:
        process.kill()
    assert (0, "") == (process.returncode, errors)
    assert "\x1b" not in seen
    for pattern in PATTERNS:
        assert re.search(rf"^\d+\. {pattern}: ", seen, re.MULTILINE), pattern
    told = " ".join(seen.split())
    assert 6 == told.count("the same answer, ")
    assert re.search(r"reviews.aggregate, with \$group [\d.]+ ms, 2\d\d documents read", told)
    assert re.search(r"store.get\(Product, id\) [\d.]+ ms, 1 document read", told)
    assert "5,760 documents of readings became 96" in told
    assert re.search(r"Order.customer \(extended-reference\) \{[^}]*, expected \{'name': 'Stale'", told)
    assert "documents repaired; verify() now finds 0 " in told
    copied = [line for line in seen.splitlines() if str(tmp_path) in line or "mongosh" in line]
    assert all(len(line) <= 48 for line in seen.splitlines() if line not in copied)
    assert "Stop the server" in rest
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert all(f"<h3>{pattern}</h3>" in page for pattern in PATTERNS)
    assert "Broken on purpose, found and repaired" in page
    assert "What to change" in page
    assert {report, folder} == set(tmp_path.iterdir())
    assert [] == list(folder.iterdir())


@pytest.mark.all
@pytest.mark.heavy
@pytest.mark.server
def test_demo_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    process = start("demo", "--html", str(tmp_path / "report.html"), TMPDIR=str(tmp_path))
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("2. Load"):
                break
        for _ in range(3):
            # Python drops what is raised in a finaliser, so that once may not be enough.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=RUN_SECONDS_MAX / 3)
                break
    finally:
        process.kill()
    assert 130 == process.returncode
    assert [] == list(tmp_path.iterdir())


def test_demo_without_a_server_says_what_to_do() -> None:
    code, output, errors = run("demo", TREADLE_MONGOD="/nowhere/mongod")
    assert (2, "1. Start a private server\n") == (code, output)
    assert_one_sentence(errors)
