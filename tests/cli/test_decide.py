"""`treadle decide` from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.advisor.symptoms import CASES
from tests.cli.invoke import run_verb
from treadle.cli import main


def test_decide_takes_a_database_or_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["decide"])
    assert "uri-missing" in capfd.readouterr().err


def test_decide_by_options() -> None:
    result = run_verb("decide", "--children-max", "500", "--child-bytes", "300", "--read-apart", "--grows")
    assert 0 == result.exit_code, result.output
    assert "Keep the children in a collection of their own, and refer to them." in result.output
    assert "Subset" in result.output
    found = json.loads(run_verb("decide", "--children-max", "500", "--read-together", "--json").output)
    assert "embed" == found["choice"]
    assert "yes" == found["answers"][-1]["answer"]
    assert "arrays-of-ids" == json.loads(run_verb("decide", "--many-to-many", "--json").output)["choice"]
    assert "embed" == json.loads(run_verb("decide", "--children-max", "0", "--json").output)["choice"]


@pytest.mark.parametrize(
    "options",
    [
        ["--read-apart"],
        ["--atomic", "mongodb://127.0.0.1:1/shop"],
        ["--children-max", "1", "--children-typical", "2"],
    ],
)
def test_decide_refuses_options_that_do_not_fit(
    options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["decide", *options])
    assert 1 == len(capfd.readouterr().err.strip().splitlines())


def test_decide_from_a_live_database(uri: str, database: Any) -> None:
    CASES["normalised-everything"].symptom(database)
    result = run_verb("decide", uri)
    assert "order_lines.order_id to orders: Embed the children in the parent." in result.output
    rows = json.loads(run_verb("decide", uri, "--json").stdout)
    found = {(row["child"], row["parent"]): row["choice"] for row in rows}
    assert "embed" == found["order_lines", "orders"]
