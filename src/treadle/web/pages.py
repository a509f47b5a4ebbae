"""The pages. Each is made on the server from the last figures, and works without JavaScript."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from bson import BSON
from pymongo.errors import PyMongoError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from treadle.errors import TreadleError
from treadle.upkeep import findings as kept
from treadle.web.access import COOKIE, SESSION_SECONDS, Refused, form_of
from treadle.web.dashboard import Dashboard, dashboard_of
from treadle.web.drawing import draw_graph, draw_lag
from treadle.web.figures import without_values

ROWS_MAX = 200
VALUE_LENGTH_MAX = 400


async def home(request: Request) -> Response:
    dashboard = dashboard_of(request)
    board, figures = dashboard.board, dashboard.board.look()
    return dashboard.render(
        request,
        "home.html",
        picture=draw_graph(board.store.graph, figures.rules),
        chart=draw_lag(board.history, time.monotonic()),
    )


async def rule(request: Request) -> Response:
    dashboard = dashboard_of(request)
    name = request.path_params["rule"]
    figures = dashboard.board.look()
    status = figures.rule(name)
    if status is None:
        if figures.status is None and any(
            each.place.label == name for each in dashboard.board.store.graph.rules
        ):
            raise Refused(503, figures.error or "No figures have been read yet; reload in a moment.")
        raise Refused(404, f"There is no rule {name!r}.")
    return dashboard.render(
        request,
        "rule.html",
        rule=status,
        chart=draw_lag(dashboard.board.history, time.monotonic(), name),
        aside=[each for each in figures.aside if each.rule in (name, status.model)][:ROWS_MAX],
        found=[each for each in figures.findings if each.rule == name][:ROWS_MAX],
        reason=_reason(dashboard),
    )


async def set_aside(request: Request) -> Response:
    dashboard = dashboard_of(request)
    figures = dashboard.board.look()
    by_rule: dict[str, list[Any]] = {}
    for each in figures.aside[:ROWS_MAX]:
        by_rule.setdefault(each.rule, []).append(each)
    return dashboard.render(request, "set_aside.html", by_rule=by_rule, reason=_reason(dashboard))


async def verify(request: Request) -> Response:
    dashboard = dashboard_of(request)
    figures = dashboard.board.look()
    done = [job for job in figures.jobs if job.kind == "verify" and job.findings]
    models = sorted({rule.model for rule in figures.rules})
    return dashboard.render(
        request,
        "verify.html",
        found=figures.findings[:ROWS_MAX],
        runs=[job for job in figures.jobs if job.kind == "verify"],
        over_time=list(reversed(done)),
        models=models,
        finding_key=finding_key,
    )


async def finding(request: Request) -> Response:
    """One finding: what is stored beside what should be."""
    dashboard = dashboard_of(request)
    board = dashboard.board
    chosen = _finding(request)
    store = board.store
    entry = next((one for one in store.graph.entries.values() if one.model.__name__ == chosen.model), None)
    current: list[Any] = []
    if entry is not None and entry.layout is None:
        try:
            server = await board.call(store._capabilities)
            plan = kept.look(store.graph, server, entry, [chosen.document_id])
            current = [each for each in await board.call(store.runner.run, plan) if each.path == chosen.path]
        except (PyMongoError, TreadleError) as error:
            raise Refused(503, f"The database does not answer ({type(error).__name__}).") from None
    return dashboard.render(
        request, "finding.html", finding=chosen, current=current[:1], key=finding_key(chosen), shown=_shown
    )


def _finding(request: Request) -> Any:
    board = dashboard_of(request).board
    for each in board.look().findings:
        if finding_key(each) == request.path_params["key"]:
            return each
    raise Refused(404, "There is no such finding; it may have been repaired.")


def finding_key(each: Any) -> str:
    """A short name for a finding, for a URL."""
    identity = {"model": each.model, "id": each.document_id, "path": each.path}
    return hashlib.sha256(BSON.encode(identity)).hexdigest()[:16]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_LENGTH_MAX else text[: VALUE_LENGTH_MAX - 1] + "…"


def _reason(dashboard: Dashboard) -> Any:
    return (lambda text: text) if dashboard.show_values else without_values


async def jobs(request: Request) -> Response:
    dashboard = dashboard_of(request)
    figures = dashboard.board.look()
    scheduled = [rule for rule in figures.rules if rule.maintain == "schedule"]
    models = sorted({rule.model for rule in figures.rules})
    return dashboard.render(request, "jobs.html", scheduled=scheduled, models=models)


async def login(request: Request) -> Response:
    """Take the token once, and let the browser keep a cookie."""
    dashboard = dashboard_of(request)
    access = dashboard.access
    if access.token is None:
        return RedirectResponse("/", 303)
    if request.method == "GET":
        return dashboard.render(request, "login.html", sentence="")
    form = await form_of(request)
    if not access.accept(request, form.get("token", "")):
        raise Refused(401, "That is not the token.")
    response = RedirectResponse("/", 303)
    secure = request.url.scheme == "https"
    response.set_cookie(
        COOKIE, access.cookie(), max_age=SESSION_SECONDS, httponly=True, samesite="strict", secure=secure
    )
    return response


ROUTES = [
    Route("/", home),
    Route("/rules/{rule:path}", rule),
    Route("/set-aside", set_aside),
    Route("/verify", verify),
    Route("/verify/{key}", finding),
    Route("/jobs", jobs),
    Route("/login", login, methods=["GET", "POST"]),
]
