"""The closed loop on the demo's shop: what a trial on a copy says beside what the database then shows.

Prints lines, which are reported as they are: per request the trial's ratio
with its interval, and the ratio that was proven on the whole database with the
same patterns set up; then how many of these lie in the interval, how long each
part took, and the peak memory of this process.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from bson import ObjectId
from pymongo import MongoClient

from treadle import Store
from treadle.advisor import scan
from treadle.advisor.plans.models import combine, load_models
from treadle.advisor.trials import workload_file
from treadle.advisor.trials.compare import compare_reads
from treadle.advisor.trials.copying import clone
from treadle.advisor.trials.declared import patterns_of
from treadle.advisor.trials.recorder import record
from treadle.advisor.trials.trial import try_findings
from treadle.advisor.trials.units import chosen
from treadle.demo.data import COLLECTIONS, Shop, fill
from treadle.demo.requests import REQUESTS
from treadle.server import local

# Some 45,000 documents each.
SCALE = 22.0
SECONDS = 20.0
DOCUMENTS = 100_000


def load(uri: str, shop: Shop, over: threading.Event) -> None:
    """What the shop's clients do: half of the requests are about the popular product."""
    chance = random.Random(1)
    with MongoClient[Any](uri) as client:
        database = client["shop"]
        products = [each["_id"] for each in database["products"].find({}, {"_id": 1}).limit(200)]
        orders = [each["_id"] for each in database["orders"].find({}, {"_id": 1}).limit(200)]
        number = 0
        while not over.is_set():
            product = chance.choice(products) if chance.random() < 0.5 else shop.popular
            page = Shop(shop.documents, product, shop.celebrity, shop.sensor, shop.day, 20)
            for request in REQUESTS:
                request.before(database, page)
            order = database["orders"].find_one({"_id": chance.choice(orders)})
            assert order is not None
            database["customers"].find_one({"_id": order["customer_id"]})
            if number % 5 == 0:
                review = {
                    "_id": ObjectId(),
                    "product_id": product,
                    "rating": 3,
                    "text": "fine",
                    "date": shop.day,
                }
                database["reviews"].insert_one(review)
            if number % 9 == 0:
                database["customers"].update_one({"_id": order["customer_id"]}, {"$set": {"tier": "gold"}})
            number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    options = parser.parse_args()
    with (
        local.start() as server,
        MongoClient[Any](server.uri) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        database = client["shop"]
        shop = fill(database, options.scale, lambda *progress: None)
        total = sum(shop.documents.values())
        took: dict[str, float] = {}
        print(f"{total:,} documents", flush=True)
        over = threading.Event()
        thread = threading.Thread(target=load, args=(server.uri, shop, over))
        thread.start()
        begin = perf_counter()
        path = Path(folder) / "shop.workload"
        try:
            recorded = record(database, path, seconds=options.seconds, notes=Path(folder) / "notes")
        finally:
            over.set()
            thread.join()
        took["record"] = perf_counter() - begin
        print(f"recorded {recorded.operations:,} requests in {took['record']:.0f} s", flush=True)
        begin = perf_counter()
        workload = workload_file.read(path)
        report = scan(database, workload=workload.profile_documents())
        took["scan"] = perf_counter() - begin
        begin = perf_counter()
        trial = try_findings(database, report, workload, documents=options.documents)
        took["trial"] = perf_counter() - begin
        print(f"scanned in {took['scan']:.0f} s, tried in {took['trial']:.0f} s", flush=True)
        inside = compared = 0
        prove_begin = perf_counter()
        for result in trial.results:
            tried = {each.request: each.ratio for each in result.requests if each.kind == "read"}
            if not tried:
                continue
            finding = next(each for each in report.findings if f"{each.code}@{each.where}" == result.key)
            after = client["shop_after"]
            client.drop_database(after.name)
            models = load_models(combine(report.scan, [finding], maintain=None).text)
            patterns = patterns_of(models)
            moved = {each.source: each.collection for each in patterns.readings}
            clone(database, after, COLLECTIONS, moved)
            with Store(after, models=models) as store:
                store.setup()
                store.rebuild()
            groups = chosen(workload, patterns)
            for each in compare_reads(database, after, groups, patterns, recorded.seconds)[0]:
                expected = tried.get(each.request)
                if expected is None:
                    continue
                compared += 1
                within = expected.holds(each.ratio.value)
                inside += within
                print(
                    f"{result.code}, {each.request}: tried {expected.value:.2f} ({expected.low:.2f} – "
                    f"{expected.high:.2f}), proven {each.ratio.value:.2f} times as fast, "
                    f"{'inside' if within else 'OUTSIDE'}; {each.different} of {each.compared} answers differ",
                    flush=True,
                )
        took["setting up, rebuilding and proving on the database"] = perf_counter() - prove_begin
        print(f"{inside} of {compared} proven ratios lie in the trial's interval")
        verdicts = ", ".join(f"{each.code}: {each.verdict}" for each in trial.results)
        print(f"verdicts: {verdicts}; together: {trial.together.verdict if trial.together else 'not tried'}")
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
        print(f"{total:,} documents, {trial.documents:,} on the copy: {parts}")
        if recorded.cost_ratio is not None:
            print(f"a fixed load takes {recorded.cost_ratio:.2f} times as long while it is recorded")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of this process, its clients included: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
