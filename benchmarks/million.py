"""Documents migrated in bounded memory, killed ten times on the way.

Says how long each way took, and the peak memory of the migrating process.
A million of them take a quarter of an hour: `python -m benchmarks.million
--count 1000000`. With `--only function`, `pipeline` or `killed` it does one
part, and prints the fingerprint of the result, so that the parts can be run
at different times.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bson
from pymongo import MongoClient

from benchmarks.shapes import Piped, User
from treadle import Store

DATABASE = "bench_million"
COUNT = 100_000
KILLS = 10
WAYS = ("function", "pipeline", "killed")


def fill(database: Any, count: int) -> None:
    database.client.drop_database(DATABASE)
    for start in range(0, count, 10_000):
        database["users"].insert_many(
            [
                {"_id": number, "name": f"Person {number}", "phone": str(number), "visits": 0}
                for number in range(start, min(start + 10_000, count))
            ]
        )


def digest(database: Any) -> str:
    """A fingerprint of all documents; the order of fields does not count."""
    total = hashlib.sha256()
    for raw in database["users"].find().sort("_id", 1):
        total.update(bson.encode(dict(sorted(raw.items()))))
    return total.hexdigest()


def child(uri: str, way: str) -> None:
    model = User if way == "function" else Piped
    result = Store(MongoClient(uri)[DATABASE], [model]).migrate(model)
    print(f"{result.migrated} {result.remaining} {peak_mebibytes():.0f}")


def peak_mebibytes() -> float:
    """The most memory that this process had; getrusage would tell that of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def start(uri: str, way: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.million", "--uri", uri, "--child", way]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def uninterrupted(database: Any, uri: str, count: int, way: str) -> str:
    """Migrate in one go; the fingerprint of the result."""
    fill(database, count)
    began = time.monotonic()
    out, _ = start(uri, way).communicate()
    migrated, remaining, peak = out.split()
    seconds = time.monotonic() - began
    print(f"{way}: {migrated} migrated, {remaining} remain, {seconds:.1f} s, peak {peak} MiB", flush=True)
    return digest(database)


def killed(database: Any, uri: str, count: int) -> str:
    """Migrate with ten kills on the way, spread over the documents; the fingerprint of the result."""
    fill(database, count)
    chance = random.Random(1)
    for kill in range(KILLS):
        process = start(uri, "function")
        wanted = (kill + 1) * count // (KILLS + 2) + chance.randrange(max(count // 100, 1))
        while database["users"].count_documents({"_id": wanted, "schema_version": 2}) == 0:
            if process.poll() is not None:
                raise SystemExit("it ended before it could be killed")
            time.sleep(0.01)
        process.kill()
        process.wait()
    migrated, remaining, peak = start(uri, "function").communicate()[0].split()
    print(f"killed {KILLS} times: the last run migrated {migrated}, {remaining} remain, peak {peak} MiB")
    return digest(database)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.uri, options.child)
        return
    from treadle.server import local as server

    with server.start() as running:
        uri = options.uri or running.uri
        database: Any = MongoClient(uri)[DATABASE]
        prints = set()
        for way in [options.only] if options.only else WAYS:
            if way == "killed":
                found = killed(database, uri, options.count)
            else:
                found = uninterrupted(database, uri, options.count, way)
            print(f"{way}: fingerprint {found}", flush=True)
            prints.add(found)
        if not options.only:
            print("all results are the same" if len(prints) == 1 else "THE RESULTS DIFFER")


if __name__ == "__main__":
    main()
