"""Text from data steers no terminal, hides nothing and stays readable; the log never quotes a document."""

from __future__ import annotations

import json
import logging

import pytest
from pymongo.errors import OperationFailure

from treadle.cli.output import escape_json, print_json, print_table, say
from treadle.model.text import escape_lines, escape_text, get_logger

HOSTILE = [
    "\x1b[2J",
    "\x07",
    "\r",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\u200f",
    "\u2028",
    "\x7f",
    "\ud800",
    "\ufeff",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_steers_a_terminal_is_escaped(text, capsys):
    assert escape_text(f"gold {text} card").isprintable()
    assert escape_text([text]).isprintable()
    assert "gold" in escape_text(f"gold {text} card")
    say(f"first\n{text}")
    print_table(("name",), [[f"a{text}b"]])
    print_json({"name": f"a{text}b"}, ensure_ascii=False)
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert printed.startswith("first\n")


def test_what_is_printable_stays_as_it_is():
    assert "Ünïcödé 東京 €" == escape_text("Ünïcödé 東京 €")
    assert "a\nb" == escape_lines("a\nb")
    assert "abcd…" == escape_text("abcdefgh", 5)


@pytest.mark.parametrize("text", [each for each in HOSTILE if each != "\ud800"], ids=ascii)
def test_json_means_the_same(text):
    assert {"a": text} == json.loads(escape_json(json.dumps({"a": text}, ensure_ascii=False, indent=2)))


@pytest.mark.parametrize("module", ["treadle", "treadle.engine.write_path"])
def test_the_log_gives_the_code_of_what_the_server_says_and_not_its_words(caplog, module):
    error = OperationFailure("can't extract geo keys: {_id: 1, secret: 'x'}", 16755)
    get_logger(module).warning("%s: %s \x1b[2J", "Order", error)
    (record,) = caplog.records
    assert "Order: OperationFailure, code 16755 \\x1b[2J" == record.getMessage()


def test_each_room_has_its_logger_below_the_one_of_the_library(caplog):
    from treadle.engine import write_path
    from treadle.upkeep import stream

    assert ("treadle.engine", "treadle.upkeep") == (write_path.log.name, stream.log.name)
    with caplog.at_level(logging.ERROR, "treadle"):
        write_path.log.warning("not heard: the level of the parent counts")
    assert [] == caplog.records
