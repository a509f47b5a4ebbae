"""The whole closed loop on a shop of a million documents: how long each verb takes, and its peak memory.

The shop has a server of its own (a cache of 1 GB, an oplog of 1 GB). Every
verb is a process: counted is the peak of its memory, and apart from it the
peak of the private server that a trial starts. Filling the shop is not part
of the loop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from pymongo import MongoClient

from benchmarks.loop import Loop, differences, goal, report_reads, state_of, table
from benchmarks.loop_clients import shop
from treadle.demo.data import fill
from treadle.server import local

# Some 45,000 documents each.
SCALE = 22.0
SECONDS = 10.0
DOCUMENTS = 30_000
LOOP_SECONDS_MAX = 600.0
MEBIBYTES_MAX = 500.0
SERVER = ("--wiredTigerCacheSizeGB", "1", "--oplogSize", "1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="not used: the server needs a longer history than others")
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--finding", help="only this one")
    options = parser.parse_args()
    with (
        local.start(arguments=SERVER) as server,
        MongoClient[Any](server.uri) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        loop = Loop(server.uri, client["shop"], Path(folder))
        made = fill(loop.database, options.scale, lambda *progress: None)
        begin = perf_counter()
        recorded = loop.record(shop(loop.database, made), options.seconds)
        loop.verb("scan", "--workload", str(loop.workload), "--json")
        if not loop.make_plan(options.documents, options.finding):
            raise RuntimeError(loop.done["plan"].errors)
        paused = perf_counter()
        before = state_of(loop.database)
        compared = perf_counter() - paused
        proof = loop.apply_and_prove()
        loop.undo()
        seconds = perf_counter() - begin - compared
        different = differences(before, state_of(loop.database))
        _report(loop, made.documents, recorded, seconds)
        report_reads(loop.rows(proof), sum(read["different"] for read in proof["reads"]))
        print(f"verify after apply: {len(proof['findings'])} findings.")
        print(
            f"After undo: {', '.join(different) if different else 'no difference in any document, index or option'}."
        )
        goal("differences after undo", len(different), 0, "differences")


def _report(loop: Loop, documents: dict[str, int], recorded: Any, seconds: float) -> None:
    rows = [
        [
            name,
            f"{done.seconds:.0f} s",
            f"{done.mebibytes:.0f} MiB",
            f"{done.server_mebibytes:.0f} MiB" if done.server_mebibytes else "",
        ]
        for name, done in loop.done.items()
    ]
    print(
        f"{sum(documents.values()):,} documents; {recorded['operations']:,} requests in {recorded['seconds']:.0f} s."
    )
    table(("verb", "took", "peak of the process", "peak of its private server"), rows)
    print("treadle plan scans and tries: treadle trial takes as long, and is not counted once more.")
    peak = max(done.mebibytes for done in loop.done.values())
    goal("the whole loop", seconds, LOOP_SECONDS_MAX, "s")
    goal("peak memory of a verb", peak, MEBIBYTES_MAX, "MiB")


if __name__ == "__main__":
    main()
