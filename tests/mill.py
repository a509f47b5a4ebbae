"""Workers in processes of their own, to be killed: started through a fork server, so that they cost little."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from typing import Any

from pymongo import MongoClient

from treadle import Store

CONTEXT = multiprocessing.get_context("forkserver")
SECONDS_MAX = 60.0
_prepared = False


def prepare() -> None:
    """Let the fork server import what the children need; it does not know the path of its starter."""
    global _prepared
    if _prepared:
        return
    CONTEXT.set_forkserver_preload(["tests.mill", "tests.streamed"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    try:
        first = CONTEXT.Process(target=os.getpid)
        first.start()
        first.join(SECONDS_MAX)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    _prepared = True


def models_of(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


def work(models: str, uri: str, database: str) -> None:
    """Run a worker until it is asked to stop."""
    with MongoClient[Any](uri) as client:
        Store(client[database], models_of(models)).worker().run()


def start(models: str, uri: str, database: str, target: Any = work, **options: Any) -> Any:
    """A process that works."""
    prepare()
    process = CONTEXT.Process(target=target, args=(models, uri, database), kwargs=options, daemon=True)
    process.start()
    return process
