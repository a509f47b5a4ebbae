"""Passwords are found in text however they got there."""

from __future__ import annotations

import pytest

from treadle.cli.redaction import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no URI here: mail a@b", "no URI here: mail a@b"),
        ("at mongodb://host/db now", "at mongodb://host/db now"),
        ("at 'mongodb://u:p@host/db' now", "at 'mongodb://***@host/db' now"),
        ("mongodb+srv://u:p@p:p@one,two/", "mongodb+srv://***@one,two/"),
        (
            "?tls=true&tlscertificatekeyfilepassword=abc&w=1",
            "?tls=true&tlscertificatekeyfilepassword=***&w=1",
        ),
    ],
)
def test_uris_in_text_lose_their_login(text: str, expected: str) -> None:
    assert expected == redact(text)


@pytest.mark.parametrize(
    "piece", ["top@secret", "top%40secret", "a quote'", "top", "secret", repr("a quote'\\")[1:-1]]
)
def test_pieces_of_what_was_given_are_hidden(piece: str) -> None:
    given = ["mongodb://u:top@secret@h", "mongodb://u:top%40secret@h", "u:a quote'\\@h", "u:a quote'@h"]
    assert "port 'x***x' is bad" == redact(f"port 'x{piece}x' is bad", given)


def test_short_pieces_do_not_garble_the_text() -> None:
    assert "a bad port" == redact("a bad port", ["mongodb://u:a:b@h"])
