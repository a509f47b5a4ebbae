"""FastAPI: a Store that lives as long as the application, and Treadle's errors as HTTP answers.

    app = FastAPI(lifespan=lifespan(lambda: AsyncStore.open(uri, MODELS)))
    add_error_handlers(app)

    @app.get("/products/{id}")
    async def see(id: Id, store: CurrentStore) -> Product:
        return await store.require(Product, id)

A missing document answers 404, a conflict or a duplicate 409, a value that the
model refuses 422, a missing index 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.requests import HTTPConnection
from fastapi.responses import JSONResponse

from treadle.errors import Conflict, InvalidValue, NotFound, TreadleError, UsageError
from treadle.plan.server_errors import DuplicateKey
from treadle.store.async_store import AsyncStore
from treadle.store.call_context import TimedOut

# Errors that say more by their code than by their class.
_BY_CODE = {
    "array-owner-missing": 404,
    "document-invalid": 500,
    "id-invalid": 422,
    # The application is deployed without its indexes; the caller may try again.
    "index-missing": 503,
    "tree-node-missing": 404,
}
_BY_CLASS: list[tuple[type | tuple[type, ...], int]] = [
    (NotFound, 404),
    ((Conflict, DuplicateKey), 409),
    (InvalidValue, 422),
    (TimedOut, 503),
]


def lifespan(
    open_store: Callable[[], AsyncStore], *, setup: bool = False, worker: bool = False
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """A lifespan that opens the Store when the application starts and closes it when it ends.

    `setup=True` creates what the models need first. `worker=True` follows
    change streams in this process; several processes take turns. A process of
    its own (`treadle watch`) keeps that load off the one that answers requests.
    """

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncGenerator[None]:
        async with open_store() as store:
            if setup:
                await store.setup()
            app.state.treadle = store
            if not worker:
                yield
                return
            follower = store.worker()
            task = asyncio.create_task(follower.run())
            try:
                yield
            finally:
                follower.stop()
                await task

    return running


def current_store(connection: HTTPConnection) -> AsyncStore:
    """The application's Store, for `Depends`."""
    store = getattr(connection.app.state, "treadle", None)
    if not isinstance(store, AsyncStore):
        raise UsageError(
            "the application has no Store; make it with FastAPI(lifespan=treadle.fastapi.lifespan(…))",
            code="store-missing",
        )
    return store


CurrentStore = Annotated[AsyncStore, Depends(current_store)]
"""A parameter of this type is the application's Store."""


def add_error_handlers(app: FastAPI) -> None:
    """Answer Treadle's errors with a status, their text and their code."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TreadleError)
        return JSONResponse({"detail": error.message, "code": error.code}, status_code=status_of(error))

    app.add_exception_handler(TreadleError, answer)


def status_of(error: TreadleError) -> int:
    """Return 4xx for the caller's mistakes, 409 for what the database holds against a call."""
    for kinds, status in _BY_CLASS:
        if isinstance(error, kinds):
            return status
    return _BY_CODE.get(error.code, 400 if isinstance(error, UsageError) else 409)
