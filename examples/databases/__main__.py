"""Fill a database with one of the examples."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from examples.databases.maker import Maker
from pymongo import MongoClient

NAMES = ("music_shop", "sensors", "social", "catalogue", "comments", "good_shop")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.databases", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("uri", help="such as mongodb://localhost:27017/music_shop; must be empty")
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    with MongoClient[Any](options.uri) as client:
        database = client.get_default_database()
        if database.list_collection_names():
            print(f"{database.name} is not empty; name a new database", file=sys.stderr)
            return 2
        importlib.import_module(f"examples.databases.{options.name}").fill(Maker(database, options.scale))
        for name in sorted(database.list_collection_names()):
            print(f"{name}: {database[name].estimated_document_count():,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
