"""The command line from outside: exit codes, streams, help, and no passwords anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.invoke import assert_one_sentence, run, run_verb
from treadle import __version__
from treadle.cli import app, main

ENTRY = "import sys; from treadle.cli import main; sys.exit(main())"


VERBS = {"doctor", "demo", "setup", "verify", "repair", "rebuild", "watch", "status"}
VERBS |= {"archive", "run-due", "scan", "explain", "decide", "pause", "resume", "serve"}
VERBS |= {"record", "trial", "plan", "apply", "prove", "undo", "teardown"}


@pytest.mark.parametrize("arguments", [(), *((verb,) for verb in sorted(VERBS))])
def test_every_help_shows_an_example(arguments: tuple[str, ...]) -> None:
    result = run_verb(*arguments, "--help")
    assert 0 == result.exit_code
    assert re.search(r"Example:\n +(\w+=\S+ )?treadle \w+", result.output)


def test_every_verb_is_in_this_list_of_helps() -> None:
    """A verb that is added is tested above."""
    named = [(command.name, command.callback) for command in app.registered_commands]
    assert VERBS == {name or callback.__name__ for name, callback in named if callback}


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys; from treadle.cli import main; main({arguments}); "
        "print([name for name in ('pymongo', 'bson', 'pydantic', 'rich') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "[]" == process.stdout.splitlines()[-1]


def test_version() -> None:
    assert (0, f"treadle {__version__}\n", "") == run("--version")


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
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert 2 == process.returncode
    assert "pip install 'treadle[cli]'" in process.stderr
    assert_one_sentence(process.stderr)


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
    monkeypatch.setattr("treadle.cli.connection.CONNECT_SECONDS_MAX", 0.05)
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

    monkeypatch.setattr("treadle.cli.doctor.examine", fail)
    assert 70 == main(["doctor", "mongodb://user:top:secret@host/"])
    shown = capfd.readouterr().err
    assert "RuntimeError: cannot handle mongodb://***@host/" in shown
    assert "secret" not in shown
