"""What the stories share: a store to tell them on, and a few ways to print.

A story is a module with `MODELS` and a function `story(store)`. It prints what
it does and asserts what it claims.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, cast

from bson import Decimal128, ObjectId
from pymongo.errors import PyMongoError

from treadle import Document, Store
from treadle.errors import TreadleError

WIDTH = 96


def tell(story: Callable[[Store], None], models: Iterable[type[Any]]) -> int:
    """Run a story on the database that the command line names, or on a private server of its own."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(story)))
    parser.add_argument(
        "uri",
        nargs="?",
        help="an empty database, such as mongodb://localhost:27017/story; else a private one",
    )
    uri = parser.parse_args().uri
    try:
        store = Store.open(uri, models) if uri else Store.local(models)
        taken = store.database.list_collection_names()
    except (TreadleError, PyMongoError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, TreadleError) else 3
    with store:
        if taken:
            print(f"{store.database.name} is not empty; name a new database", file=sys.stderr)
            return 2
        started = time.monotonic()
        story(store)
        print(f"\nEverything held. {time.monotonic() - started:.1f} seconds.")
    return 0


def only(collection: Any, filter: Any = None) -> dict[str, Any]:
    """A stored document, which is there."""
    document = collection.find_one(filter)
    assert document is not None
    return document  # type: ignore[no-any-return]


def step(text: str) -> None:
    """The next thing that happens."""
    print(f"\n# {text}")


def show(label: str, stored: Any) -> None:
    """A stored document, or several, as mongosh would print them."""
    print(f"  {label}:")
    documents: Iterable[Any] = [stored] if isinstance(stored, dict) or stored is None else stored
    for document in documents:
        print("    " + shell(document).replace("\n", "\n    "))


def verified(store: Store, *models: type[Document]) -> int:
    """How many stored values are not what they should be; prints each."""
    findings = store.verify(*models)
    for finding in findings:
        print(
            f"  verify: {finding.model} {shell(finding.document_id)}, {finding.path}: "
            f"stored {brief(finding.stored)}, expected {brief(finding.expected)}"
        )
    if not findings:
        print("  verify: all is as it should be")
    return len(findings)


def brief(value: Any) -> str:
    """A value on one line, however long it is."""
    line = " ".join(shell(value).split())
    return line if len(line) < WIDTH else line[: WIDTH - 1] + "…"


def shell(value: Any) -> str:
    """A BSON value in mongosh's notation, on one line where it fits."""
    if type(value) in (dict, list, tuple):
        if type(value) is dict:
            first, last = "{}"
            fields = cast(dict[str, Any], value)
            items = [
                f"{key if key.isidentifier() else repr(key)}: {shell(item)}" for key, item in fields.items()
            ]
        else:
            first, last = "[]"
            items = [shell(item) for item in value]
        line = ", ".join(items)
        if len(line) < WIDTH and "\n" not in line:
            return f"{first} {line} {last}" if line else first + last
        indented = ",\n".join(items).replace("\n", "\n  ")
        return f"{first}\n  {indented}\n{last}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, datetime):
        return f"ISODate('{value:%Y-%m-%dT%H:%M:%S}Z')"
    if isinstance(value, Decimal128):
        return f"Decimal128('{value}')"
    return f"ObjectId('{value}')" if isinstance(value, ObjectId) else repr(value)
