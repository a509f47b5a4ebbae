"""mongosh as a judge: the literature's own reads, on the documents that the stories wrote.

The answers of the real mongosh, those of Treadle, and what is known from the
stories must be the same. Where there is no mongosh, the test says so aloud.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

import pytest
from bson import Decimal128, json_util
from bson.json_util import JSONOptions

from tests.examples import mongosh
from tests.examples.reads import READS
from tests.examples.stories import NAMES, module, told

MARK = "ANSWERS "


def script(databases: dict[str, str]) -> str:
    """All reads in one program, because mongosh takes a second to start."""
    lines = ["const answers = [];"]
    for name, reads in READS.items():
        lines.append(f"db = db.getSiblingDB({json.dumps(databases[name])});")
        for read in reads:
            lines.append(f"try {{ answers.push({read.javascript}); }}")
            lines.append("catch (error) { answers.push(String(error)); }")
    return "\n".join([*lines, f"print({json.dumps(MARK)} + EJSON.stringify(answers));"])


def plain(value: Any) -> Any:
    """Numbers and dates that compare by value."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.to_decimal() if isinstance(value, Decimal128) else value


def test_every_story_is_judged():
    assert set(NAMES) == set(READS)


@pytest.mark.all
@pytest.mark.heavy
def test_mongosh_reads_what_treadle_wrote(server, client, tmp_path, request):
    program, why = mongosh.find()
    if program is None:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stdout.write(f"\nNOT RUN: mongosh did not read what the examples wrote: {why}\n")
        pytest.skip(why)
    databases = {name: f"test_{uuid.uuid4().hex[:12]}" for name in READS}
    try:
        stores = {name: told(name, client[database]) for name, database in databases.items()}
        printed = mongosh.run(program, server.uri, script(databases), tmp_path)
        (line,) = [line for line in printed.splitlines() if line.startswith(MARK)]
        answers = iter(json_util.loads(line.removeprefix(MARK), json_options=JSONOptions(tz_aware=True)))
        wrong = []
        for name, reads in READS.items():
            for read in reads:
                answer = plain(next(answers))
                ours = read.treadle(stores[name], module(name)) if read.treadle else read.known
                if not (answer == read.known == ours):
                    wrong.append((name, read.javascript, answer, read.known, ours))
        assert [] == wrong
    finally:
        for database in databases.values():
            client.drop_database(database)
