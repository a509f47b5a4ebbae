"""The advisor's look at the database of a Store, on demand: it reads more than a page should cost."""

from __future__ import annotations

import asyncio
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.profile import scan
from treadle.advisor.report import Report


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
