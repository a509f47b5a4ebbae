"""`treadle scan` from outside: exit codes, streams and outputs."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path
from typing import Any

import bson
import pytest
from bson import json_util
from rich.console import Console

from tests.advisor.symptoms import CASES
from tests.cli.invoke import RUN_SECONDS_MAX, assert_one_sentence, run_verb, start
from treadle.advisor import scan as scan_database
from treadle.advisor.report import SCHEMA
from treadle.advisor.text import show
from treadle.cli import main

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "advisor.md"


def test_the_table_and_the_declaration(uri: str, database: Any) -> None:
    CASES["outlier"].symptom(database)
    result = run_verb("scan", uri)
    assert 0 == result.exit_code, result.output
    assert "outlier" in result.output
    assert "items, max: 5,000" in result.output
    assert "Outlier(limit=50" in result.output
    brief = run_verb("scan", uri, "--brief").output
    assert "outlier" in brief
    assert "Outlier(limit" not in brief


@pytest.mark.parametrize(("fail_on", "code"), [("info", 1), ("warning", 1), ("problem", 0)])
def test_fail_on(fail_on: str, code: int, uri: str, database: Any) -> None:
    CASES["outlier"].symptom(database)
    assert code == run_verb("scan", uri, "--brief", "--fail-on", fail_on).exit_code


def test_fail_on_takes_three_words(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["scan", uri, "--fail-on", "fatal"])
    assert "info, warning, problem" in capfd.readouterr().err


def keys_documented(heading: str) -> set[str]:
    """The first column of the table below a heading of the documentation."""
    text = DOCUMENTED.read_text()
    section = text[text.index(f"\n### {heading}\n") :].split("\n### ")[1]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {name.strip(" `") for row in rows for name in row.split("|")[1].split(",")}


def test_the_json_has_the_documented_keys(uri: str, database: Any) -> None:
    CASES["extended-reference"].symptom(database)
    CASES["outlier"].symptom(database)
    result = run_verb("scan", uri, "--json")
    found = json.loads(result.stdout)
    assert SCHEMA == found["schema"]
    assert set(found) == keys_documented("The report")
    assert set(found["findings"][0]) == keys_documented("A finding")
    assert set(found["collections"][0]) == keys_documented("A collection")
    assert set(found["collections"][0]["fields"][0]) == keys_documented("A field")
    assert set(found["collections"][0]["indexes"][0]) == keys_documented("An index")
    assert set(found["relations"][0]) == keys_documented("A relation")
    assert set(found["collections"][0]["sizes"]) == keys_documented("A distribution")
    assert set(found["workload"]) == keys_documented("The workload")


def test_html_is_written_beside_the_output(uri: str, database: Any, tmp_path: Path) -> None:
    CASES["outlier"].symptom(database)
    path = tmp_path / "report.html"
    result = run_verb("scan", uri, "--json", "--html", str(path))
    assert 0 == result.exit_code
    assert json.loads(result.stdout)
    assert path.read_text().startswith("<!doctype html>")
    assert 2 == main(["scan", uri, "--html", str(tmp_path / "no" / "where.html")])


@pytest.mark.parametrize("form", ["json", "lines", "bson"])
def test_a_workload_from_a_file(form: str, uri: str, database: Any, tmp_path: Path) -> None:
    """As the profiler wrote it, in each of the three forms."""
    CASES["query-without-index"].symptom(database)
    recorded = list(database["system.profile"].find())
    database.drop_collection("system.profile")
    path = tmp_path / f"workload.{'bson' if form == 'bson' else 'json'}"
    if form == "bson":
        path.write_bytes(b"".join(bson.encode(each) for each in recorded))
    elif form == "json":
        path.write_text(json_util.dumps(recorded))
    else:
        path.write_text("\n".join(json_util.dumps(each) for each in recorded))
    without = {each["code"] for each in json.loads(run_verb("scan", uri, "--json").stdout)["findings"]}
    found = json.loads(run_verb("scan", uri, "--json", "--workload", str(path)).stdout)
    assert "query-without-index" not in without
    assert "query-without-index" in {each["code"] for each in found["findings"]}
    assert "file" == found["workload"]["source"]


def test_without_a_database_it_says_so(
    server: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONGODB_URI", raising=False)
    assert 2 == main(["scan"])
    assert_one_sentence(capfd.readouterr().err)
    assert 2 == main(["scan", server.uri])
    shown = capfd.readouterr().err
    assert "names no database" in shown
    assert_one_sentence(shown)


def test_unreachable_is_told_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert 3 == main(["scan", "mongodb://user:topsecret@127.0.0.1:1/shop"])
    shown = capfd.readouterr()
    assert "" == shown.out
    assert "topsecret" not in shown.err
    assert_one_sentence(shown.err)


# Longer than anybody waits for the process.
HELD_MILLISECONDS = 2_000 * RUN_SECONDS_MAX


def test_ctrl_c_prints_what_it_has(uri: str, database: Any, client: Any) -> None:
    """In a process of its own, interrupted while the server holds its second collection's answer back."""
    CASES["outlier"].symptom(database)
    database["zebras"].insert_one({"a": 1})
    client.admin.command(
        "configureFailPoint",
        "failCommand",
        mode="alwaysOn",
        data={
            "failCommands": ["aggregate"],
            "namespace": f"{database.name}.zebras",
            "blockConnection": True,
            "blockTimeMS": HELD_MILLISECONDS,
            "appName": "treadle",
        },
    )
    try:
        process = start("scan", uri, "--brief")
        try:
            until = time.monotonic() + RUN_SECONDS_MAX
            while not _held(client, "zebras"):
                assert time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            # Long before the answer would come.
            output, errors = process.communicate(timeout=RUN_SECONDS_MAX)
        finally:
            process.kill()
    finally:
        # First: a fail point is not switched off while it holds somebody.
        for each in _held(client, "zebras"):
            client.admin.command("killOp", op=each["opid"])
        client.admin.command("configureFailPoint", "failCommand", mode="off")
    assert 130 == process.returncode, errors
    assert "Interrupted" in output
    assert "outlier" in output
    assert "Traceback" not in errors


def _held(client: Any, collection: str) -> list[dict[str, Any]]:
    running = client.admin.aggregate(
        [{"$currentOp": {"allUsers": True}}, {"$match": {"command.comment": "treadle scan"}}]
    )
    return [each for each in running if each["command"].get("aggregate") == collection]


def test_the_terminal_obeys_no_name(database: Any) -> None:
    """Colours and bells in a name are shown, not followed; brackets are no markup."""
    database["\x1b[31mred[bold]"].insert_many(
        [{"\x07bell": n if n % 2 else "x", "[red]": 1} for n in range(120)]
    )
    shown = io.StringIO()
    show(scan_database(database), Console(file=shown, width=120))
    assert "\x1b" not in shown.getvalue()
    assert "\x07" not in shown.getvalue()
    assert "[bold]" in shown.getvalue()
