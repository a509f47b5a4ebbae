"""`treadle scan`, `explain` and `decide` from outside: exit codes, streams and outputs."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bson
import pytest
from bson import json_util
from bson.datetime_ms import DatetimeMS
from rich.console import Console
from typer.testing import CliRunner

from tests.advisor.symptoms import CASES
from tests.cli.test_cli import ENTRY, RUN_SECONDS_MAX, assert_one_sentence
from treadle import UsageError
from treadle.advisor import scan as scan_database
from treadle.advisor.report import SCHEMA, show
from treadle.advisor.rules import load
from treadle.cli import app, main
from treadle.commands import scan

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "advisor.md"


@pytest.fixture
def uri(server: Any, database: Any) -> str:
    base, _, options = server.uri.partition("?")
    return f"{base}{database.name}?{options}"


def run(*arguments: str, answers: str = "") -> Any:
    return CliRunner().invoke(app, list(arguments), input=answers)


def test_the_table_and_the_declaration(uri: str, database: Any) -> None:
    CASES["outlier"].symptom(database)
    result = run("scan", uri)
    assert 0 == result.exit_code, result.output
    assert "outlier" in result.output
    assert "items, max: 5,000" in result.output
    assert "Outlier(limit=50" in result.output
    brief = run("scan", uri, "--brief").output
    assert "outlier" in brief
    assert "Outlier(limit" not in brief


@pytest.mark.parametrize(("fail_on", "code"), [("info", 1), ("warning", 1), ("problem", 0)])
def test_fail_on(fail_on: str, code: int, uri: str, database: Any) -> None:
    CASES["outlier"].symptom(database)
    assert code == run("scan", uri, "--brief", "--fail-on", fail_on).exit_code


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
    result = run("scan", uri, "--json")
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
    result = run("scan", uri, "--json", "--html", str(path))
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
    without = {each["code"] for each in json.loads(run("scan", uri, "--json").stdout)["findings"]}
    found = json.loads(run("scan", uri, "--json", "--workload", str(path)).stdout)
    assert "query-without-index" not in without
    assert "query-without-index" in {each["code"] for each in found["findings"]}
    assert "file" == found["workload"]["source"]


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01",
        b"[1, 2]",
        b"{",
        b'"text"',
        b"[{]",
        b"\xff\xfe",
        b'{"a": {"$oid": 5}}',
        b'{"a": {"$regularExpression": {}}}',
        b'{"a": {"$binary": 7}}',
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_no_workload_is_refused(content: bytes, tmp_path: Path) -> None:
    for name in ("w.json", "w.bson"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            scan.read_workload(path)
        assert "workload-invalid" == caught.value.code
    with pytest.raises(UsageError):
        scan.read_workload(tmp_path / "none.json")


def test_what_is_no_workload_later_in_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"a": 1}\n\n{"a": 2}\n7\n')
    documents = scan.read_workload(path)
    assert [1, 2] == [next(documents)["a"], next(documents)["a"]]
    with pytest.raises(UsageError, match="something else after 2 profiler documents"):
        next(documents)


def test_a_workload_may_hold_what_a_workload_holds(tmp_path: Path) -> None:
    """A mark of the encoding, characters that some take for line ends, dates beyond Python's."""
    far = DatetimeMS(400_000_000_000_000)
    path = tmp_path / "w.json"
    lines = ['{"a": "x\u0085y\u2028z"}', json_util.dumps({"a": far})]
    path.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert ["x\u0085y\u2028z", far] == [each["a"] for each in scan.read_workload(path)]
    path.write_text(f"[{','.join(lines)}]", encoding="utf-8-sig")
    assert ["x\u0085y\u2028z", far] == [each["a"] for each in scan.read_workload(path)]
    path = tmp_path / "w.bson"
    path.write_bytes(bson.encode({"a": far}) + bson.encode({"a": 2}))
    assert [far, 2] == [each["a"] for each in scan.read_workload(path)]
    path.write_bytes(b"")
    assert [] == list(scan.read_workload(path))


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
            "blockTimeMS": 4_000,
            "appName": "treadle",
        },
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, "scan", uri, "--brief"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until = time.monotonic() + 15
            while not _is_held(client, "zebras"):
                assert time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            output, errors = process.communicate(timeout=RUN_SECONDS_MAX)
            assert time.monotonic() - sent < 3.5
        finally:
            process.kill()
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")
    assert 130 == process.returncode, errors
    assert "Interrupted" in output
    assert "outlier" in output
    assert "Traceback" not in errors


def _is_held(client: Any, collection: str) -> bool:
    running = client.admin.aggregate(
        [{"$currentOp": {"allUsers": True}}, {"$match": {"command.comment": "treadle scan"}}]
    )
    return any(each["command"].get("aggregate") == collection for each in running)


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


def test_explain_tells_every_code() -> None:
    for code in load():
        result = run("explain", code)
        assert 0 == result.exit_code
        assert result.output.startswith(code)
        assert "When not:" in result.output
    listed = run("explain").output
    assert all(code in listed for code in load())
    assert "outlier" == json.loads(run("explain", "outlier", "--json").output)["code"]
    assert set(load()) == {each["code"] for each in json.loads(run("explain", "--json").output)}


def test_explain_suggests_a_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["explain", "outliers"])
    assert "did you mean 'outlier'?" in capfd.readouterr().err


def test_decide_asks_and_answers() -> None:
    result = run("decide", answers="no\n500\n20\n300\nyes\nno\nno\nno\n")
    assert 0 == result.exit_code, result.output
    assert "Keep the children in a collection of their own, and refer to them." in result.output
    assert "Subset" in result.output
    assert (
        "arrays" in run("decide", answers="yes\n").output
        or "array of ids" in run("decide", answers="yes\n").output
    )


def test_decide_asks_again_and_then_gives_up() -> None:
    result = run("decide", answers="perhaps\nno\nmany\n3\n2\n10\nno\nno\nno\nno\n")
    assert "Embed the children in the parent." in result.output
    result = run("decide", answers="perhaps\n" * 9)
    assert isinstance(result.exception, UsageError)


def test_decide_by_options() -> None:
    result = run("decide", "--children-max", "500", "--child-bytes", "300", "--read-apart", "--grows")
    assert 0 == result.exit_code, result.output
    assert "Keep the children in a collection of their own, and refer to them." in result.output
    assert "Subset" in result.output
    found = json.loads(run("decide", "--children-max", "500", "--read-together", "--json").output)
    assert "embed" == found["choice"]
    assert "yes" == found["answers"][-1]["answer"]
    assert "arrays-of-ids" == json.loads(run("decide", "--many-to-many", "--json").output)["choice"]
    assert "embed" == json.loads(run("decide", "--children-max", "0", "--json").output)["choice"]


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
    result = run("decide", uri)
    assert "order_lines.order_id to orders: Embed the children in the parent." in result.output
    rows = json.loads(run("decide", uri, "--json").stdout)
    found = {(row["child"], row["parent"]): row["choice"] for row in rows}
    assert "embed" == found["order_lines", "orders"]


def test_the_progress_names_what_is_looked_at(database: Any) -> None:
    database["a"].insert_one({})
    database["b[bold]"].insert_one({})
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with scan.progress_bar(console) as progress:
        steps = []

        def both(step: Any) -> None:
            steps.append((step.what, step.done, step.total))
            progress(step)

        scan_database(database, progress=both)
    assert [("a", 0, 3), ("b[bold]", 1, 3)] == steps[:2]
    assert ("done", 3, 3) == steps[-1]
