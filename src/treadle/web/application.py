"""The dashboard as an ASGI application: its routes, and what a request gets that cannot be answered."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.cli.redaction import redact
from treadle.model.text import get_logger
from treadle.web import actions, answers, pages
from treadle.web.access import BODY_BYTES_MAX, HEADERS, Access, Refused
from treadle.web.dashboard import Dashboard, dashboard_of
from treadle.web.figures import Board
from treadle.web.wording import ago, duration, number, when

FOLDER = Path(__file__).parent
INTERVAL_SECONDS = 2.0
# As a response carries them.
ADDED = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

log = get_logger(__name__)


def create(
    store: Any,
    *,
    token: str | None = None,
    read_only: bool = False,
    show_values: bool = False,
    interval: float = INTERVAL_SECONDS,
) -> Starlette:
    """The dashboard of a Store."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
    )
    templates.filters.update(ago=ago, duration=duration, number=number, when=when)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        board = Board(store, interval)
        access = Access(token, read_only)
        app.state.dashboard = Dashboard(board, access, show_values, templates)
        reading = asyncio.create_task(board.run())
        try:
            yield
        finally:
            for task in (reading, *app.state.dashboard.tasks):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    return Starlette(
        routes=[
            *pages.ROUTES,
            *answers.ROUTES,
            *actions.ROUTES,
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        middleware=[Middleware(Guard)],
        exception_handlers={HTTPException: _explain, Refused: _explain},
        lifespan=lifespan,
    )


class Guard:
    """Lets a request pass or says why not, and adds the headers that forbid what the pages do not need."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], *ADDED]}
            await send(message)

        request = Request(scope, receive)
        try:
            _admit(request)
            await self._app(scope, receive, guarded)
        except Exception as error:
            if begun:
                raise
            response = await _explain(request, error)
            await response(scope, receive, guarded)


def _admit(request: Request) -> None:
    """Let a request pass, or refuse it before anything is looked up."""
    access = dashboard_of(request).access
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > BODY_BYTES_MAX:
        raise Refused(413, f"The request is too large; {BODY_BYTES_MAX} bytes are the most.")
    access.check(request)
    if request.method not in ("GET", "HEAD"):
        access.check_origin(request)


async def _explain(request: Request, error: Exception) -> Response:
    """A sentence in place of the answer; no traceback is shown."""
    status, headers = 500, {}
    sentence = "Something went wrong here; the log of treadle serve says what."
    if isinstance(error, Refused):
        status, sentence, headers = error.status, error.sentence, error.headers
    elif isinstance(error, HTTPException):
        status = error.status_code
        sentence = {404: "There is no such page.", 405: "This cannot be done here."}.get(status, error.detail)
    else:
        text = redact("".join(traceback.format_exception(error)))
        log.error("a request for %s failed: %s", request.url.path, text)
    if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"error": sentence}, status, headers)
    dashboard = dashboard_of(request)
    template = "login.html" if status in (401, 429) and dashboard.access.token else "sentence.html"
    response = dashboard.render(request, template, status, sentence=sentence)
    response.headers.update(headers)
    return response
