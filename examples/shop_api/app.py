"""The shop behind HTTP, with FastAPI and `AsyncStore`.

The store lives as long as the application, and so does the worker that keeps
the sales per day. Treadle's errors become HTTP errors in one place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from examples.shop_api.models import MODELS
from examples.shop_api.routes import router
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pymongo.errors import DuplicateKeyError

from treadle import AsyncStore, DataError, UsageError


def create_app(uri: str | None = None) -> FastAPI:
    """The application, on the database of the URI, else of MONGODB_URI, else on a private server."""
    app = FastAPI(title="A shop", lifespan=lifespan)
    app.state.uri = uri or os.environ.get("MONGODB_URI")
    app.include_router(router)
    app.add_exception_handler(UsageError, refused_with(400))
    app.add_exception_handler(DataError, refused_with(409))
    app.add_exception_handler(DuplicateKeyError, duplicate)
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    uri = app.state.uri
    async with AsyncStore.open(uri, MODELS) if uri else AsyncStore.local(MODELS) as store:
        await store.setup()
        # In production a process of its own is better: `treadle watch --app …`.
        worker = store.worker()
        following = asyncio.create_task(worker.run())
        app.state.store, app.state.following = store, following
        yield
        worker.stop()
        await following
    # Leaving the store has written what its counters still had in memory.


def refused_with(status: int) -> Any:
    """The caller's mistakes are 400; what the database holds against a call is 409."""

    async def answer(request: Request, error: UsageError | DataError) -> JSONResponse:
        return JSONResponse({"code": error.code, "detail": str(error)}, status_code=status)

    return answer


async def duplicate(request: Request, error: DuplicateKeyError) -> JSONResponse:
    """Which field is taken; the driver's own message would show the value of somebody else."""
    fields = ", ".join((error.details or {}).get("keyPattern", {}))
    return JSONResponse({"code": "duplicate", "detail": f"{fields} is taken"}, status_code=409)
