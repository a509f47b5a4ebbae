"""`treadle explain` from outside."""

from __future__ import annotations

import json

import pytest

from tests.cli.invoke import run_verb
from treadle.advisor.rules import load
from treadle.cli import main
from treadle.cli.explain import described_errors


def test_explain_tells_every_code() -> None:
    for code in load():
        result = run_verb("explain", code)
        assert 0 == result.exit_code
        assert result.output.startswith(code)
        assert "When not:" in result.output
    listed = run_verb("explain").output
    assert all(code in listed for code in load())
    assert "outlier" == json.loads(run_verb("explain", "outlier", "--json").output)["code"]
    assert set(load()) == {each["code"] for each in json.loads(run_verb("explain", "--json").output)}


@pytest.mark.all
def test_explain_knows_every_error_without_a_network() -> None:
    errors = described_errors()
    assert {"duplicate-key", "document-changed", "field-unknown"} <= set(errors)
    for code, said in errors.items():
        assert said
        result = run_verb("explain", code)
        assert (0, True) == (result.exit_code, code in result.output)
    assert "duplicate-key" == json.loads(run_verb("explain", "duplicate-key", "--json").output)["code"]


def test_explain_suggests_a_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["explain", "outliers"])
    assert "did you mean 'outlier'?" in capfd.readouterr().err
