"""What `treadle demo` prints, step by step: a naive shop, advised, changed, broken and repaired.

What happens is in `story`. Steps go to standard output, progress to standard
error and the report to a file. The server ends with the demo, however that ends.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from pymongo.database import Database
from pymongo.errors import ConnectionFailure
from rich.text import Text

from treadle.advisor import Report, scan
from treadle.advisor.html import html as advisor_html
from treadle.advisor.model_text import load_models
from treadle.advisor.wording import plural, size
from treadle.cli.output import shortened, stdout, write_html
from treadle.cli.progress import model_bars, step_bar
from treadle.cli.scan import scan_bar
from treadle.demo import report_page as page
from treadle.demo import story
from treadle.demo.data import Shop, fill
from treadle.demo.measure import Cost, milliseconds
from treadle.demo.requests import REQUESTS
from treadle.demo.story import Comparison, Repair
from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.server import local as server
from treadle.store.blocking.store import Store
from treadle.store.common import local_uri

ACTIONS_SHOWN_MAX = 4
LINE_LENGTH_MIN = 20
VALUE_LENGTH_MAX = 50


class Narrator:
    """Numbered steps with lines below them, which stay indented however narrow the terminal is."""

    def __init__(self) -> None:
        self.console = stdout()
        self._number = 0

    def step(self, title: str) -> None:
        self._number += 1
        self.console.print(Text(f"{self._number}. {title}", style="bold"))

    def line(self, line: str, style: str = "", indent: int = 3) -> None:
        width = max(LINE_LENGTH_MIN, self.console.width - indent)
        for part in textwrap.wrap(line, width, break_on_hyphens=False):
            self.console.print(Text(" " * indent + part, style=style), soft_wrap=True)

    def whole(self, line: str) -> None:
        """A line that is to be copied, so it is never broken."""
        self.console.print(Text(f"   {line}"), soft_wrap=True)


def narrate(html: Path, scale: float, wait: Callable[[], None] | None) -> None:
    """Run the demo on a server of its own, which is removed afterwards; the report stays.

    `wait` is called while the server is still running, after its address was
    printed; the server stays until it returns.
    """
    path = _writable(html)
    tell = Narrator()
    began = monotonic()
    tell.step("Start a private server")
    with server.start() as running:
        uri = local_uri(running.uri)
        with Store.open(uri, []) as store:
            version = store.database.client.server_info()["version"]
            tell.line(f"MongoDB {version} on port {running.port}; it ends with this demo")
            report, comparisons, repair = _story(store.database, scale, tell)
        tell.step("Write the report")
        write_html(path, advisor_html(report, page.section(comparisons, repair)))
        tell.whole(str(path))
        tell.line("the findings with their evidence, and the figures above; open it in a browser")
        if wait is not None:
            tell.step("Leave the server running")
            tell.line("look around with mongosh:")
            tell.whole(f'mongosh "{local_uri(running.address)}"')
            tell.line("it asks for the password, which is in the file")
            tell.whole(str(running.password_file))
            tell.line("Ctrl-C here stops the server and removes its data.")
            wait()
    tell.step("Stop the server")
    tell.line(f"its data is removed; only the report stays. It took {monotonic() - began:.0f} s.")


def _writable(html: Path) -> Path:
    """Where the report goes; refused now rather than after a minute of work."""
    path = html.absolute()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(
            f"--html {html} cannot be written; name a file in a folder that is yours.", code="output-invalid"
        )
    return path


def _story(plain: Database[Any], scale: float, tell: Narrator) -> tuple[Report, list[Comparison], Repair]:
    database = plain.with_options(codec_options=CODEC_OPTIONS)
    shop = _load(database, scale, tell)
    tell.step("Let the shop work as it is, with the server's profiler on")
    with step_bar() as report_step:
        baseline = story.measure_baseline(database, shop, report_step)
    for request in REQUESTS:
        tell.line(f"{request.title(shop)}: {milliseconds(baseline[request.code][0].seconds)}")
    report = _advise(database, tell)
    advice = story.select_advice(report)
    declarations = story.declare(report)
    store = Store(plain, models=load_models(declarations))
    _adopt(store, tell)
    comparisons = []
    for request in REQUESTS:
        if request.code in advice:
            declared = story.declared_as(declarations, request.call)
            comparisons.append(story.compare(store, shop, request, baseline, declared))
            _show_comparison(tell, comparisons[-1])
    return report, comparisons, _break(store, shop, tell)


# -- the steps ------------------------------------------------------------------------


def _load(database: Database[Any], scale: float, tell: Narrator) -> Shop:
    tell.step("Load a naive shop, with sensors in its greenhouse")
    began = monotonic()
    with step_bar() as report_step:
        shop = fill(database, scale, report_step)
    tell.line(", ".join(f"{count:,} {name}" for name, count in shop.documents.items()))
    total = sum(shop.documents.values())
    tell.line(f"{total:,} documents in {monotonic() - began:.1f} s, the same in every run")
    return shop


def _advise(database: Database[Any], tell: Narrator) -> Report:
    tell.step("Ask the advisor what this database asks for (treadle scan)")
    with scan_bar() as report_step:
        report = scan(database, progress=report_step)
    if report.scan.lost:
        raise ConnectionFailure("the private server has ended")
    if not report.scan.complete:
        # The advisor gives its results so far; a demo that is interrupted ends.
        raise KeyboardInterrupt
    advice = story.select_advice(report)
    for each in report.findings:
        followed = advice.get(each.code) is each
        tell.line(f"{each.severity}: {each.code} at {each.where}{'' if followed else ' (not followed here)'}")
        tell.line(each.summary, indent=5)
    missing = [request.pattern for request in REQUESTS if request.code not in advice]
    if missing:
        tell.line(f"not found this time, and so not compared below: {', '.join(missing)}")
    return report


def _adopt(store: Store, tell: Narrator) -> None:
    tell.step("Adopt all six patterns as the advisor declares them: setup() and rebuild()")
    began = monotonic()
    with model_bars() as report_step:
        adoption = story.adopt(store, report_step)
    for action in adoption.actions[:ACTIONS_SHOWN_MAX]:
        tell.line(f"setup: {action}")
    more = len(adoption.actions) - ACTIONS_SHOWN_MAX
    if more > 0:
        tell.line(f"setup: and {more} more")
    for name, before in adoption.documents_before.items():
        if before != (after := adoption.documents_after[name]):
            source = name.removesuffix(story.BUCKETS)
            tell.line(f"rebuild: {before:,} documents of {source} became {after:,}")
    visited = sum(adoption.rebuilt.values())
    tell.line(f"rebuild: {visited:,} documents visited; all in {monotonic() - began:.1f} s")


def _show_comparison(tell: Narrator, each: Comparison) -> None:
    tell.step(f"{each.request.pattern}: {each.title}")
    tell.line(each.declared, style="dim")
    for name, how, cost in (
        ("before", each.request.how_before, each.before),
        ("after", each.request.how_after, each.after),
    ):
        tell.line(f"{name:6}  {how}")
        tell.line(_cost(cost, writes=each.request.read_count is not None), indent=11)
    tell.line(f"the same answer, {each.speed}", style="green")


def _cost(cost: Cost, *, writes: bool) -> str:
    if writes:
        return f"{milliseconds(cost.seconds)}, {plural(cost.commands, 'command')}"
    read = f"{plural(cost.documents_read, 'document')} read"
    return f"{milliseconds(cost.seconds)}, {read}, {size(cost.bytes_answered)} answered"


def _break(store: Store, shop: Shop, tell: Narrator) -> Repair:
    tell.step("Break something on purpose, behind Treadle's back")
    repair = story.break_and_repair(store, shop)
    for write in repair.writes:
        tell.line(write)
    tell.step("Verify: store.verify() names what is stored and should not be")
    for each in repair.examples:
        tell.line(f"{each.model}.{each.path} ({each.pattern})")
        tell.line(f"{_short(each.stored)}, expected {_short(each.expected)}", indent=5)
    more = len(repair.findings) - len(repair.examples)
    tell.line(plural(len(repair.findings), "finding") + (f", {more:,} of them not shown" if more else ""))
    tell.step("Repair: store.repair() corrects it")
    tell.line(f"{plural(repair.documents, 'document')} repaired; verify() now finds {repair.remaining:,}")
    return repair


def _short(value: object) -> str:
    return shortened(repr(value) if isinstance(value, str) else str(value), VALUE_LENGTH_MAX)
