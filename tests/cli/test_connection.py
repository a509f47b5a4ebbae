"""Which server is meant, and why it cannot be reached."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.standalone import StandaloneServer
from treadle.cli.connection import CannotConnect, Target, choose_target, connected, hosts
from treadle.errors import UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a", "b", "c"), Target("a", "argument")),
        ((None, "b", "c"), Target("b", "option")),
        ((None, None, "c"), Target("c", "environment")),
        ((None, None, ""), None),
    ],
)
def test_the_nearest_uri_wins(given: tuple[str | None, str | None, str], expected: Target | None) -> None:
    assert expected == choose_target(given[0], given[1], {"MONGODB_URI": given[2]})


def test_a_target_does_not_print_its_uri() -> None:
    assert "secret" not in repr(Target("mongodb://user:secret@host", "option"))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mongodb://host", "host"),
        ("mongodb://user:a%40b@one:1,two:2/shop?w=1", "one:1,two:2"),
        ("mongodb+srv://user:secret@cluster.example.org/", "cluster.example.org"),
        ("mongodb://user:secret@[::1]:27017?tls=true", "[::1]:27017"),
    ],
)
def test_hosts_are_shown_without_the_login(uri: str, expected: str) -> None:
    assert expected == hosts(uri)


def test_an_unescaped_slash_in_a_password_is_no_host() -> None:
    with pytest.raises(UsageError) as caught:
        hosts("mongodb://user:4711/secret@localhost")
    assert "uri-invalid" == caught.value.code


def test_unknown_options_are_not_repeated(server: Any, recwarn: pytest.WarningsRecorder) -> None:
    """The driver would warn with the option's name, which may be a piece of a password."""
    with connected(f"{server.uri}&hush=hush"):
        pass
    assert [] == [str(warning.message) for warning in recwarn if "hush" in str(warning.message)]


@pytest.mark.parametrize(
    ("options", "words"), [("replicaSet=other", "correct or omit replicaSet="), ("tls=true", "TLS failed")]
)
def test_the_sentence_says_what_to_correct(server: Any, options: str, words: str) -> None:
    address = server.uri.partition("?")[0]
    with pytest.raises(CannotConnect, match=words), connected(f"{address}?{options}"):
        pass


@pytest.mark.server
def test_a_standalone_server_is_connected_to() -> None:
    with StandaloneServer() as running, connected(running.uri) as client:
        assert 1.0 == client.admin.command("ping")["ok"]
