"""The shop behind HTTP, with FastAPI and `AsyncStore`.

The store lives as long as the application, and so does the worker that keeps
the sales per day. Treadle's errors become HTTP errors in one place.
"""

from __future__ import annotations

import os

from examples.shop_api.models import MODELS
from examples.shop_api.routes import router
from fastapi import FastAPI

from treadle import AsyncStore
from treadle.fastapi import add_error_handlers, lifespan


def create_app(uri: str | None = None) -> FastAPI:
    """The application, on the database of the URI, else of MONGODB_URI, else on a private server."""

    def open_store() -> AsyncStore:
        address = uri or os.environ.get("MONGODB_URI")
        return AsyncStore.open(address, MODELS) if address else AsyncStore.local(MODELS)

    # In production a process of its own is better for the worker: `treadle watch --app …`.
    app = FastAPI(title="A shop", lifespan=lifespan(open_store, setup=True, worker=True))
    app.include_router(router)
    add_error_handlers(app)
    return app
