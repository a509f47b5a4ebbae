"""The closed loop on the shop: its requests recorded, tried on a copy, planned, applied, proven and undone.

What is tried and applied are the advisor's own declarations. Clients that know
nothing of a plan go on reading, so that it adds fields, and names what they
would have to do themselves.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pymongo.database import Database

from treadle.advisor import Report
from treadle.advisor.plans.apply import Application
from treadle.advisor.plans.folder import READS, ChangePlan, write
from treadle.advisor.plans.make import make
from treadle.advisor.plans.prove import Proof, prove
from treadle.advisor.plans.reads import write_reads
from treadle.advisor.plans.text import readme
from treadle.advisor.plans.undo import Undoing
from treadle.advisor.trials import workload_file
from treadle.advisor.trials.recorder import Recorded, record
from treadle.advisor.trials.results import TrialReport
from treadle.advisor.trials.trial import try_findings
from treadle.demo.data import COLLECTIONS, Shop
from treadle.demo.requests import REQUESTS
from treadle.errors import DataError

CODES = ("extended-reference", "computed", "subset", "outlier", "bucket")
RECORD_SECONDS = 2.0
ROUNDS = 3
IDENTITY, MADE = "demo", "in this demo"


def record_requests(database: Database[Any], shop: Shop, folder: Path) -> Recorded:
    """Let the shop's clients work for two seconds, and write down what they ask."""
    with _working(database, shop):
        return record(database, folder / "shop.workload", seconds=RECORD_SECONDS, notes=folder / "notes")


@contextmanager
def _working(database: Database[Any], shop: Shop) -> Iterator[None]:
    ended = threading.Event()
    requests = [each for each in REQUESTS if each.code in CODES]

    def work() -> None:
        for request in itertools.cycle(requests):
            if ended.is_set():
                return
            request.before(database, shop)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def try_on_a_copy(
    database: Database[Any], report: Report, folder: Path, progress: Callable[[str, int, int], None]
) -> TrialReport:
    workload = workload_file.read(folder / "shop.workload")
    found = {each.code for each in report.findings}
    only = [code for code in CODES if code in found]
    return try_findings(database, report, workload, only=only, rounds=ROUNDS, progress=progress)


def plan_supported(report: Report, trial: TrialReport, folder: Path) -> ChangePlan | None:
    """What the trial supports, as a folder; None where that is nothing."""
    try:
        plan = make(report, trial, identity=IDENTITY, made=MADE)
    except DataError as error:
        if error.code != "plan-empty":
            raise
        return None
    write(plan, folder / "plan", readme(plan))
    write_reads(plan, workload_file.read(folder / "shop.workload"), folder / "plan")
    return plan


def apply_and_prove(database: Database[Any], plan: ChangePlan, folder: Path) -> Proof:
    Application(database, plan).run()
    return prove(database, plan, folder / "plan" / READS)


def state_of(database: Database[Any]) -> Any:
    """A fingerprint of every document, with the indexes."""
    hashes = database.command("dbHash", collections=list(COLLECTIONS))["collections"]
    return hashes, {name: sorted(database[name].index_information()) for name in COLLECTIONS}


def undo(database: Database[Any], plan: ChangePlan, before: Any) -> bool:
    """Take the plan back; whether every document and index is as it was."""
    Undoing(database, plan).run()
    return bool(before == state_of(database))
