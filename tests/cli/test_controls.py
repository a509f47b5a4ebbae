"""`treadle pause`, `resume` and `set-aside` on an application's own Store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import test_watch
from tests.cli.invoke import invoke

APPLICATION = test_watch.APPLICATION


@pytest.fixture
def refused(folder, database) -> Path:
    """An application with one document that was set aside."""
    invoke(folder, "setup", "--app", "shop:store")
    key = {"rule": "Product.count", "collection": "products", "key": "p1"}
    database["treadle.set_aside"].insert_one({"_id": key, "reason": "[bold]too large[/bold]"})
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_a_rule_is_paused_and_resumed(folder, app):
    paused = invoke(folder, "pause", "--app", app, "Product.count")
    assert (0, "Product.count is paused.\n") == (paused.returncode, paused.stdout)
    assert "paused already" in invoke(folder, "pause", "--app", app, "Product.count").stdout
    rows = json.loads(invoke(folder, "status", "--app", app, "--json").stdout)["rules"]
    assert {"paused"} == {row["state"] for row in rows if row["rule"] == "Product.count"}
    resumed = invoke(folder, "resume", "--app", app, "Product.count")
    assert "nothing was missed" in resumed.stdout


def test_a_rule_that_does_not_exist_is_one_sentence(folder):
    refused = invoke(folder, "pause", "--app", "shop:store", "Product.conut")
    assert 2 == refused.returncode
    assert "there is no rule 'Product.conut'" in refused.stderr
    refused = invoke(folder, "pause", "--app", "shop:store", "Product.again")
    assert "nothing to pause" in refused.stderr


def test_what_was_set_aside_is_listed_retried_and_discarded(refused, database):
    listed = invoke(refused, "set-aside", "list", "--app", "shop:store")
    assert 1 == listed.returncode
    assert "[bold]too large[/bold]" in listed.stdout
    (row,) = json.loads(invoke(refused, "set-aside", "list", "--app", "shop:store", "--json").stdout)
    assert ("Product.count", "p1") == (row["rule"], row["document_id"])
    shown = invoke(refused, "set-aside", "retry", "--app", "shop:store", row["name"], "--dry-run")
    assert row["name"] in shown.stdout
    retried = invoke(refused, "set-aside", "retry", "--app", "shop:store", "--all")
    assert "1 document settled, 0 still set aside." in retried.stdout
    assert "Nothing is set aside." in invoke(refused, "set-aside", "list", "--app", "shop:store").stdout


def test_which_ones_are_meant_must_be_said(refused):
    nothing = invoke(refused, "set-aside", "discard", "--app", "shop:store")
    assert (2, True) == (nothing.returncode, "--rule or --all" in nothing.stderr)
    unknown = invoke(refused, "set-aside", "discard", "--app", "shop:store", "nobody")
    assert (2, True) == (unknown.returncode, "'nobody'" in unknown.stderr)
    done = invoke(refused, "set-aside", "discard", "--app", "shop:store", "--rule", "Product.count")
    assert "Discarded 1 document." in done.stdout


def test_verify_takes_a_sample_a_time_and_a_pace(folder):
    invoke(folder, "setup", "--app", "shop:store")
    for options in (["--sample", "0.5"], ["--since", "2026-01-01"], ["--resume"], ["--throttle", "gentle"]):
        done = invoke(folder, "verify", "--app", "shop:store", *options)
        assert 0 == done.returncode or "history does not reach back" in done.stderr, done.stderr
    wrong = invoke(folder, "verify", "--app", "shop:store", "--throttle", "fast")
    assert (2, True) == (wrong.returncode, "'fast' is no pace" in wrong.stderr)
