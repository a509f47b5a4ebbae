"""The advisor's look at the database of a Store, on demand: it reads more than a page should cost."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.profile import scan
from treadle.advisor.report import Report
from treadle.advisor.trials.results import TrialReport, TrialResult, report_from_json
from treadle.errors import UsageError

TRIAL_BYTES_MAX = 20_000_000


@dataclass(slots=True)
class Trials:
    """The report that `treadle trial --json` wrote to a file, read again when the file changes."""

    path: Path | None = None
    _read: tuple[int, int] | None = None
    _report: TrialReport | str | None = None

    def report(self) -> TrialReport | str | None:
        """The report, or one sentence on why there is none; None where no file was named."""
        if self.path is None:
            return None
        try:
            stated = self.path.stat()
            if stated.st_size > TRIAL_BYTES_MAX:
                return "The file of the trial is too large to be one."
            if self._read != (stated.st_mtime_ns, stated.st_size):
                self._report = report_from_json(json.loads(self.path.read_text(encoding="utf-8")))
                self._read = stated.st_mtime_ns, stated.st_size
        except OSError as error:
            return f"The file of the trial cannot be read ({error.strerror})."
        except UsageError as error:
            return error.message
        except ValueError:
            return "The file of the trial is no JSON; write it with treadle trial … --json."
        return self._report

    def of(self, code: str, place: str) -> TrialResult | None:
        """What a trial of one finding gave."""
        report = self.report()
        tried = report.results if isinstance(report, TrialReport) else ()
        return next((each for each in tried if (each.code, each.place) == (code, place)), None)


async def look(store: Any) -> Report | str:
    """What the advisor finds, or one sentence on why it found nothing out."""
    database = store.database
    try:
        if isinstance(database, Database):
            return await asyncio.to_thread(scan, database)
        # The advisor blocks; it gets a client of its own, opened as the Store's was.
        options = getattr(database.client, "_init_kwargs", None)
        if options is None:
            return "The advisor needs a Store that blocks; run treadle scan instead."
        with MongoClient(**options) as client:
            return await asyncio.to_thread(scan, client[database.name])
    except (PyMongoError, OSError) as error:
        return f"The advisor could not read the database ({type(error).__name__})."
