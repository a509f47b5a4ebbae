"""The command line from outside: exit codes, streams, help, and no passwords anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from typer.testing import CliRunner

from treadle import __version__
from treadle.cli import app, main

ENTRY = "import sys; from treadle.cli import main; sys.exit(main())"
# The command itself gives up after less than 5 s; the rest is what a busy machine adds.
ANSWER_SECONDS_MAX = 15
RUN_SECONDS_MAX = 60


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The real command in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **environment},
    )


def treadle(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the real command to its end; its exit code, output and error output."""
    process = start(*arguments, **environment)
    try:
        output, errors = process.communicate(timeout=RUN_SECONDS_MAX)
    finally:
        process.kill()
    return process.returncode, output, errors


def assert_one_sentence(text: str) -> None:
    assert 1 == len(text.strip().splitlines()), text
    assert text.strip()[-1] in ".?", text


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


VERBS = {"doctor", "demo", "setup", "verify", "repair", "rebuild", "watch", "status"}
VERBS |= {"run-due", "scan", "explain", "decide", "tree"}


@pytest.mark.parametrize("arguments", [(), *((verb,) for verb in sorted(VERBS))])
def test_every_help_shows_an_example(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert 0 == result.exit_code
    assert re.search(r"Example:\n +(\w+=\S+ )?treadle \w+", result.output)


def test_every_verb_is_in_this_list_of_helps() -> None:
    """Whoever adds a verb finds the test above by this one."""
    named = [(command.name, command.callback) for command in app.registered_commands]
    assert VERBS == {name or callback.__name__ for name, callback in named if callback}


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys; from treadle.cli import main; main({arguments}); "
        "print([name for name in ('pymongo', 'bson', 'pydantic', 'rich') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "[]" == run.stdout.splitlines()[-1]


def test_version() -> None:
    assert (0, f"treadle {__version__}\n", "") == treadle("--version")


def test_no_verb_shows_the_help_and_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main([])
    shown = capfd.readouterr()
    assert "" == shown.out
    assert "Usage: treadle" in shown.err


def test_misspelt_verb_is_a_usage_error_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["docter"])
    shown = capfd.readouterr()
    assert "'docter'" in shown.err
    assert_one_sentence(shown.err)


def test_without_typer_it_says_what_to_install() -> None:
    script = f"import sys; sys.modules['typer'] = None; {ENTRY}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert 2 == run.returncode
    assert "pip install 'treadle[cli]'" in run.stderr
    assert_one_sentence(run.stderr)


@pytest.mark.server
def test_doctor_without_a_uri_looks_at_a_private_server_and_says_so() -> None:
    code, output, errors = treadle("doctor", "--json")
    assert 0 == code, errors
    assert "local" == json.loads(output)["source"]
    assert "private local server" in errors
    assert_one_sentence(errors)


def test_doctor_prefers_the_argument_to_the_option_to_the_environment(server: Any) -> None:
    gone = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=1"
    for arguments, environment, source in [
        ((server.uri, "--uri", gone), gone, "argument"),
        (("--uri", server.uri), gone, "option"),
        ((), server.uri, "environment"),
    ]:
        code, output, errors = treadle("doctor", "--json", *arguments, MONGODB_URI=environment)
        assert (0, source) == (code, json.loads(output)["source"]), errors


def test_doctor_prints_a_table(server: Any) -> None:
    result = CliRunner().invoke(app, ["doctor", server.uri])
    assert 0 == result.exit_code, result.output
    assert re.search(r"change streams\W+ok\W+opened and closed one", result.output)


def test_doctor_exits_with_1_on_a_problem(server: Any) -> None:
    """A Store refuses retryWrites=false, so that is a problem."""
    code, output, _ = treadle("doctor", "--json", f"{server.uri}&retryWrites=false")
    found = {check["name"]: check["status"] for check in json.loads(output)["checks"]}
    assert (1, "problem") == (code, found["retryable_writes"])


@pytest.mark.parametrize("options", ["", "?directConnection=true", "?serverSelectionTimeoutMS=60000"])
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_unreachable_server_is_told_in_time(kind: str, options: str, request: pytest.FixtureRequest) -> None:
    """The limit holds whatever the URI says."""
    port = request.getfixturevalue(f"{kind}_port")
    begun = time.monotonic()
    code, output, errors = treadle("doctor", f"mongodb://127.0.0.1:{port}/{options}")
    assert ANSWER_SECONDS_MAX > time.monotonic() - begun
    assert (3, "") == (code, output)
    assert f"127.0.0.1:{port}" in errors
    assert_one_sentence(errors)


# -- passwords -------------------------------------------------------------------

# Each with the pieces that may not be shown.
MISTAKES = [
    ("mongodb://user:topsecret@127.0.0.1:{port}/", ["topsecret"]),
    (
        "mongodb://user:top%40sec%2Fret@127.0.0.1:{port}/?authSource=admin",
        ["top%40sec", "top@sec", "sec/ret"],
    ),
    ("mongodb://user:topsecret@127.0.0.1:{port},127.0.0.1:{port}/shop?replicaSet=a", ["topsecret"]),
    ("mongodb://user:top@secret@127.0.0.1:{port}/", ["top@", "secret"]),
    ("mongodb://user:top:secret@127.0.0.1:{port}/", ["top:", "secret"]),
    ("mongodb://user:top/secret@127.0.0.1:{port}/", ["top/", "secret"]),
    ("mongodb://user:4711/secret@localhost", ["4711", "secret"]),
    ("mongodb://user:4711?secret=hush@localhost", ["4711", "secret", "hush"]),
    ("mongodb://user:top%secret@127.0.0.1:{port}/", ["top%", "secret"]),
    ("mongodb://user:top secret@127.0.0.1:{port}/", ["top ", "secret"]),
    ("mongodb:/user:topsecret@127.0.0.1:{port}/", ["topsecret"]),
    ("user:topsecret@127.0.0.1:{port}", ["topsecret"]),
    ("http://user:topsecret@127.0.0.1:{port}", ["topsecret"]),
    ("mongodb://127.0.0.1:{port}/?tls=true&tlsCertificateKeyFilePassword=topsecret", ["topsecret"]),
    (
        "mongodb://127.0.0.1:{port}/?tls=true&tlsCertificateKeyFile=/none&tlsCertificateKeyFilePassword=topsecret",
        ["topsecret"],
    ),
    ("mongodb://user:topsecret@127.0.0.1:{port}/?authMechanism=nonsense&w=what", ["topsecret"]),
]


@pytest.mark.parametrize("form", ["argument", "option", "joined", "environment", "verb", "surplus", "typo"])
@pytest.mark.parametrize(("uri", "secrets"), MISTAKES)
def test_no_mistake_shows_a_password(
    form: str,
    uri: str,
    secrets: list[str],
    closed_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Wherever the URI is put, and whichever part of it the parsers stumble over."""
    # The connections are tried elsewhere; here only the words matter.
    monkeypatch.setattr("treadle.commands.connection.CONNECT_SECONDS_MAX", 0.05)
    uri = uri.format(port=closed_port)
    forms = {
        "argument": ["doctor", uri],
        "option": ["doctor", "--uri", uri],
        "joined": ["doctor", f"--uri={uri}"],
        "environment": ["doctor", "--json"],
        "verb": [uri],
        "surplus": ["doctor", "mongodb://127.0.0.1:1", uri],
        "typo": ["doctor", f"--url={uri}"],
    }
    monkeypatch.setenv("MONGODB_URI", uri)
    code = main(forms[form])
    shown = capfd.readouterr()
    assert code in (2, 3)
    assert "" == shown.out
    assert_one_sentence(shown.err)
    for secret in secrets:
        assert secret not in shown.err


def test_a_bug_is_told_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(target: Any) -> None:
        raise RuntimeError(f"cannot handle {target.uri}, least of all 'secret'")

    monkeypatch.setattr("treadle.commands.doctor.doctor", fail)
    assert 70 == main(["doctor", "mongodb://user:top:secret@host/"])
    shown = capfd.readouterr().err
    assert "RuntimeError: cannot handle mongodb://***@host/" in shown
    assert "secret" not in shown


# -- demo ------------------------------------------------------------------------


PATTERNS = ("Extended Reference", "Computed", "Subset", "Outlier", "Bucket", "Approximation")


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
        (uri,) = re.findall(r'^   mongosh "(mongodb://127.0.0.1:.*)"$', seen, re.MULTILINE)
        with MongoClient[dict[str, Any]](uri) as client:
            database = client.get_default_database()
            order = database["orders"].find_one() or {}
            customer = database["customers"].find_one({"_id": order["customer_id"]}) or {}
            assert {"name": customer["name"], "tier": customer["tier"]} == order["customer"]
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
    assert re.search(r"Order.customer \(extended-reference\) \{[^}]*\}, expected \{'name': 'Nobody'", told)
    assert "documents mended; verify() now names 0 " in told
    copied = [line for line in seen.splitlines() if str(tmp_path) in line or "mongosh" in line]
    assert all(len(line) <= 48 for line in seen.splitlines() if line not in copied)
    assert "Stop the server" in rest
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert all(f"<h3>{pattern}</h3>" in page for pattern in PATTERNS)
    assert "Broken on purpose, found and mended" in page
    assert "What to change" in page
    assert {report, folder} == set(tmp_path.iterdir())
    assert [] == list(folder.iterdir())


@pytest.mark.server
def test_demo_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    process = start("demo", "--html", str(tmp_path / "report.html"), TMPDIR=str(tmp_path))
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("2. Load"):
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=RUN_SECONDS_MAX)
    finally:
        process.kill()
    assert 130 == process.returncode
    assert [] == list(tmp_path.iterdir())


def test_demo_without_a_server_says_what_to_do() -> None:
    code, output, errors = treadle("demo", TREADLE_MONGOD="/nowhere/mongod")
    assert (2, "1. Start a private server\n") == (code, output)
    assert_one_sentence(errors)
