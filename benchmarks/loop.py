"""The closed loop on the examples' databases: what trials said beside what was proven.

Each database gets a workload as its clients would send it, and then the verbs
of the command line, each in a process of its own: record, plan, apply, prove,
undo. Printed is, per read of each finding, the trial's ratio with its
interval beside the ratio that `treadle prove` measured after the plan was
applied; then how many of these lie in the interval, how wide the intervals
are, and whether undo left any difference.
Two databases, since each takes the better part of a minute; `--all` takes the
others and the demo's shop too, and `--only` names some.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from examples.databases.maker import Maker
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.loop_clients import EXAMPLES, Page, at_work, shop
from benchmarks.verbs import Done, perform
from treadle.demo.data import fill
from treadle.server import local

SECONDS = 6.0
# Together they have every finding that a plan can hold.
MEASURED = ("music_shop", "comments")
# No other database is begun after this, since a work has ten minutes.
BEGIN_SECONDS_MAX = 450.0
OUTSIDE_PERCENT_MAX = 10.0
COLUMNS = ("database", "finding", "read", "trial", "interval", "wide", "proven", "")


@dataclass(slots=True)
class Loop:
    """One database on its way through the verbs."""

    server: str
    database: Database[Any]
    folder: Path
    # What each verb did, in order.
    done: dict[str, Done] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        address, _, options = self.server.rpartition("/")
        return f"{address}/{self.database.name}{options}"

    @property
    def workload(self) -> Path:
        return self.folder / f"{self.database.name}.workload"

    @property
    def plan(self) -> Path:
        return self.folder / f"{self.database.name}.plan"

    def verb(self, name: str, *arguments: str) -> Done:
        done = self.done[name] = perform(self.uri, name, *arguments)
        print(
            f"{self.database.name}: {name} {done.seconds:.1f} s, {done.mebibytes:.0f} MiB, its private server "
            f"{done.server_mebibytes:.0f} MiB",
            file=sys.stderr,
        )
        return done

    def record(self, pages: Sequence[Page], seconds: float) -> Any:
        with at_work(self.server, self.database.name, pages):
            arguments = ("-o", str(self.workload), "--seconds", str(seconds), "--json")
            return self.verb("record", *arguments).json

    def make_plan(self, documents: int = 100_000, finding: str | None = None) -> bool:
        """Whether the trial supports anything."""
        arguments = ["--workload", str(self.workload), "-o", str(self.plan), "--documents", str(documents)]
        arguments += ["--only", finding] if finding else []
        return self.verb("plan", *arguments, "--json").code == 0

    def apply_and_prove(self) -> Any:
        self.verb("apply", str(self.plan), "--json")
        if self.done["apply"].code:
            raise RuntimeError(f"treadle apply: {self.done['apply'].errors[-300:]}")
        return self.verb("prove", str(self.plan), "--json").json

    def undo(self) -> None:
        self.verb("undo", str(self.plan), "--json")

    # -- what came out -----------------------------------------------------------------------

    def rows(self, proof: Any) -> list[list[str]]:
        """A row of the table for each read that was proven."""
        findings = self._findings()
        rows = []
        for read in proof["reads"]:
            tried, proven = read["trial"], read["proven"]
            finding = findings.get((read["request"], read["after"]), "several")
            judged = "inside" if read["within"] else "**outside**"
            if read["different"]:
                judged = f"**{read['different']} of {read['compared']} answers differ**"
            rows.append(
                [
                    self.database.name,
                    finding,
                    read["request"],
                    "not tried" if tried is None else f"{tried['value']:.2f}",
                    "" if tried is None else f"{tried['low']:.2f} – {tried['high']:.2f}",
                    "" if tried is None else f"{tried['high'] / tried['low']:.1f}",
                    f"{proven['value']:.2f}",
                    judged,
                ]
            )
        return rows

    def _findings(self) -> dict[tuple[str, str], str]:
        plan = json.loads((self.plan / "plan.json").read_text())
        return {
            (request["request"], request["after"]): f"{result['code']}@{result['place']}"
            for result in plan["trial"]["results"]
            if f"{result['code']}@{result['place']}" in plan["findings"]
            for request in result["requests"]
        }


def state_of(database: Database[Any]) -> dict[str, Any]:
    """A digest of every document, byte for byte, with all indexes and options."""
    options = {
        each["name"]: {
            "type": each["type"],
            "options": each.get("options", {}),
            "uuid": each["info"].get("uuid"),
        }
        for each in database.list_collections()
        if not each["name"].startswith("system.")
    }
    indexes = {name: list(database[name].list_indexes()) for name in options}
    return {"documents": database.command("dbHash")["collections"], "options": options, "indexes": indexes}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not the same: documents, options or indexes of which collection."""
    return [
        f"{part} of {name}"
        for part in before
        for name in sorted({*before[part], *after[part]})
        if before[part].get(name) != after[part].get(name)
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown, which the report takes over."""
    print(f"| {' | '.join(columns)} |")
    print(f"|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")


def goal(name: str, value: float, maximum: float, unit: str) -> None:
    """A figure that has a goal, for the report."""
    figure = {"name": name, "value": round(value, 3), "maximum": maximum, "unit": unit}
    print(json.dumps({"goal": figure}, ensure_ascii=False), flush=True)


def report_reads(rows: Sequence[Sequence[str]], differing: int) -> None:
    """The table of all reads, and how many proved to be in the interval."""
    table(COLUMNS, rows)
    tried = [row for row in rows if row[3] != "not tried"]
    inside = sum(row[-1] == "inside" for row in tried)
    print(f"{inside} of {len(tried)} proven ratios lie in the trial's interval; {differing} answers differ.")
    if tried:
        widths = sorted(float(row[5]) for row in tried)
        print(
            f"The upper end of an interval is {statistics.median(widths):.1f} times the lower one in the "
            f"median, {widths[-1]:.1f} times at most."
        )
        outside = 100 * (len(tried) - inside) / len(tried)
        goal("proven ratios outside the trial's interval", outside, OUTSIDE_PERCENT_MAX, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", nargs="*", choices=["shop", *EXAMPLES])
    parser.add_argument("--all", action="store_const", const=["shop", *EXAMPLES], dest="only")
    options = parser.parse_args()
    with (
        local.start() as server,
        MongoClient[Any](options.uri or server.uri) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        uri = options.uri or server.uri
        rows: list[list[str]] = []
        silent: list[str] = []
        undone: list[str] = []
        left: list[list[str]] = []
        differing = 0
        late: list[str] = []
        begin = perf_counter()
        for name in options.only or MEASURED:
            if perf_counter() - begin > BEGIN_SECONDS_MAX:
                late.append(name)
                continue
            client.drop_database(name)
            loop = Loop(uri, client[name], Path(folder))
            pages = _filled(loop.database, options.scale)
            loop.record(pages, options.seconds)
            if not loop.make_plan():
                silent.append(name)
                left += [[name, *each] for each in _reasons(loop.done["plan"].errors)]
                client.drop_database(name)
                continue
            left += _left_out(loop)
            before = state_of(loop.database)
            proof = loop.apply_and_prove()
            rows += loop.rows(proof)
            differing += sum(read["different"] for read in proof["reads"]) + len(proof["findings"])
            loop.undo()
            undone += [f"{name}: {each}" for each in differences(before, state_of(loop.database))]
            client.drop_database(name)
        report_reads(rows, differing)
        if late:
            print(f"Not begun, since the others took so long: {', '.join(late)}.")
        if silent:
            print(f"Nothing to plan on {', '.join(silent)}.")
        if left:
            table(("database", "finding that no plan holds", "why"), left)
        print(
            f"After undo: {', '.join(undone) if undone else 'no difference in any document, index or option'}."
        )
        goal("differences after undo", len(undone), 0, "differences")


def _filled(database: Database[Any], scale: float) -> list[Page]:
    """Fill a database; what its clients ask."""
    if database.name == "shop":
        return shop(database, fill(database, scale, lambda *progress: None))
    module = importlib.import_module(f"examples.databases.{database.name}")
    module.fill(Maker(database, scale))
    return EXAMPLES[database.name](database)


def _reasons(text: str) -> list[list[str]]:
    """The findings and reasons of the error that says that there is nothing to plan."""
    found = re.findall(r"^\s+(\S+@\S+): (.+)$", text, re.MULTILINE)
    return [[key, reason.partition(" — ")[0]] for key, reason in found if " no way to try it" not in reason]


def _left_out(loop: Loop) -> list[list[str]]:
    """The findings with a figure that no plan holds."""
    plan = json.loads((loop.plan / "plan.json").read_text())
    tried = {
        f"{each['code']}@{each['place']}": each
        for each in plan["trial"]["results"]
        if each["ratio"] is not None
    }
    return [
        [
            loop.database.name,
            f"{each['key']}, {tried[each['key']]['ratio']['value']:.2f} times as fast",
            each["reason"],
        ]
        for each in plan["left_out"]
        if each["key"] in tried
    ]


if __name__ == "__main__":
    main()
