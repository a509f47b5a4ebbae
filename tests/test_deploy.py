"""The files of `deploy/` are well formed, and name only what the program has: metrics, verbs, options, paths."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from starlette.testclient import TestClient

from tests.web import shop
from treadle import Store
from treadle.cli import app
from treadle.web.application import create

FOLDER = Path(__file__).parent.parent / "deploy"
METRIC = re.compile(r"\btreadle_[a-z_]+\b")


def served(database: Any) -> set[str]:
    """The names of all metrics of a Store that has rules of every kind."""
    store = Store(database, shop.MODELS)
    shop.fill(store, database)
    with TestClient(create(store, interval=600), base_url="http://localhost") as web:
        web.portal.call(web.app.state.dashboard.board.read)
        text = web.get("/metrics").text
    return set(re.findall(r"^(treadle_\w+)", text, re.MULTILINE))


def test_alerts_and_the_grafana_dashboard_name_only_metrics_that_are_served(database):
    alerts = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    expressions = [each["expr"] for each in alerts]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(named) > 10
    assert set() == named - served(database)
    assert len(panels) == len({each["id"] for each in panels})
    assert all({"summary", "action"} == set(each["annotations"]) for each in alerts)


def commands() -> list[list[str]]:
    """The command lines of the kit, without the program's own name."""
    found = []
    for unit in FOLDER.glob("*.service"):
        line = re.search(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.MULTILINE)
        assert line is not None
        found.append(shlex.split(line[1]))
    found.append(
        json.loads(re.search(r"^CMD (.*)$", (FOLDER / "Containerfile").read_text(), re.MULTILINE)[1])
    )
    for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()):
        pods = json.dumps(document)
        found += [json.loads(each) for each in re.findall(r'"args": (\[.*?\])', pods)]
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_every_command_is_one_that_the_program_takes(arguments):
    command: Any = typer.main.get_command(app)
    verb = command.commands[arguments[0]]
    # Parses the options, and runs nothing.
    verb.make_context(arguments[0], list(arguments[1:]))


def test_the_probes_are_paths_that_the_dashboard_answers_without_a_login():
    text = (FOLDER / "kubernetes.yaml").read_text()
    paths = set(re.findall(r"path: (/\w+)", text))
    assert {"/healthz"} == paths
    deployments = {each["metadata"]["name"]: each for each in yaml.safe_load_all(text)}
    assert 2 == deployments["treadle-worker"]["spec"]["replicas"]
    assert "Forbid" == deployments["treadle-verify"]["spec"]["concurrencyPolicy"]
