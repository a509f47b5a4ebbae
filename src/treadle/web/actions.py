"""What an operator can do: each a POST that carries the token of its page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from bson.errors import BSONError
from pymongo.errors import PyMongoError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from treadle.errors import TreadleError, UsageError
from treadle.model.text import get_logger
from treadle.web.access import Refused, form_of
from treadle.web.dashboard import Dashboard, dashboard_of
from treadle.web.pages import finding_key

# What may be started at a time.
TASKS_MAX = 8

log = get_logger(__name__)

Act = Callable[[Dashboard, dict[str, Any]], Awaitable[str]]


def action(act: Act) -> Callable[[Request], Awaitable[Response]]:
    """A route for something to be done: checked, performed, and back to a page."""

    async def answer(request: Request) -> Response:
        dashboard = dashboard_of(request)
        form = await form_of(request)
        dashboard.access.check_action(request, form)
        try:
            back = await act(dashboard, {**form, **request.path_params})
        except UsageError as error:
            raise Refused(404 if error.code.endswith("-unknown") else 400, f"{_sentence(error)}.") from None
        except (PyMongoError, TreadleError, BSONError, OSError) as error:
            raise Refused(503, f"That could not be done now ({type(error).__name__}); try again.") from None
        number = dashboard.board.hurry()
        with contextlib.suppress(TimeoutError):
            # So that the page that follows shows it.
            await asyncio.wait_for(dashboard.board.following(number), 5)
        return RedirectResponse(back, 303)

    return answer


def _sentence(error: UsageError) -> str:
    text = str(error)
    return text[:1].upper() + text[1:]


async def pause(dashboard: Dashboard, form: dict[str, Any]) -> str:
    await dashboard.board.call(dashboard.board.store.pause, form["rule"])
    return f"/rules/{form['rule']}"


async def resume(dashboard: Dashboard, form: dict[str, Any]) -> str:
    await dashboard.board.call(dashboard.board.store.resume, form["rule"])
    return f"/rules/{form['rule']}"


async def settle(dashboard: Dashboard, form: dict[str, Any]) -> str:
    """Retry or discard one document that was set aside, or all of a rule."""
    board = dashboard.board
    method = {"retry": board.store.retry, "discard": board.store.discard}.get(form["what"])
    if method is None:
        raise Refused(404, "There is no such action.")
    if form.get("name"):
        await board.call(method, str(form["name"]))
    else:
        for item in await board.call(board.store.set_aside, str(form.get("rule", ""))):
            await board.call(method, item)
    return "/set-aside"


async def start(dashboard: Dashboard, form: dict[str, Any]) -> str:
    """Start a verify, a repair or a rebuild beside the pages."""
    board, kind = dashboard.board, form["kind"]
    if kind not in ("verify", "repair", "rebuild"):
        raise Refused(404, "There is no such action.")
    options: dict[str, Any] = {"throttle": _throttle(form)}
    if kind == "verify" and form.get("sample"):
        options["sample"] = _number(form["sample"], "The sample")
    models = [model for model in board.store.graph.entries if model.__name__ == form.get("model")]
    if form.get("model") and not models:
        raise Refused(404, f"There is no model {form['model']!r}.")
    if len(dashboard.tasks) >= TASKS_MAX:
        raise Refused(429, "Enough is running already; wait until something has ended.")
    _begin(dashboard, board.call(getattr(board.store, kind), *models, **options))
    return "/verify" if kind == "verify" else "/jobs"


async def repair_one(dashboard: Dashboard, form: dict[str, Any]) -> str:
    """Repair the document of one finding."""
    board = dashboard.board
    chosen = next((each for each in board.look().findings if finding_key(each) == form["key"]), None)
    if chosen is None:
        raise Refused(404, "There is no such finding; it may have been repaired.")
    model = next(each for each in board.store.graph.entries if each.__name__ == chosen.model)
    await board.call(board.store.repair, model, ids=[chosen.document_id])
    return "/verify"


async def control(dashboard: Dashboard, form: dict[str, Any]) -> str:
    """Pause, resume, stop or slow down a job."""
    board = dashboard.board
    asked = form.get("asked") or None
    if asked not in (None, "pause", "resume", "stop"):
        raise Refused(400, "A job can be paused, resumed and stopped.")
    throttle = _throttle(form) if "throttle" in form else "keep"
    await board.call(board.store.control_job, form["id"], asked, throttle)
    return "/jobs"


def _begin(dashboard: Dashboard, work: Any) -> None:
    task = asyncio.ensure_future(work)
    dashboard.tasks.add(task)
    task.add_done_callback(lambda done: _ended(dashboard, done))


def _ended(dashboard: Dashboard, task: asyncio.Task[Any]) -> None:
    dashboard.tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        # Its row among the jobs says so too.
        log.warning("what was started in the dashboard failed: %s", type(task.exception()).__name__)
    dashboard.board.hurry()


def _throttle(form: dict[str, Any]) -> Any:
    given = str(form.get("throttle") or "").strip()
    return given or None if given in ("", "gentle") else _number(given, "The throttle")


def _number(text: Any, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refused(400, f"{what} {str(text)[:40]!r} is no number.") from None


def _post(path: str, act: Act) -> Route:
    return Route(path, action(act), methods=["POST"])


ROUTES = [
    _post("/actions/pause", pause),
    _post("/actions/resume", resume),
    _post("/actions/set-aside/{what}", settle),
    _post("/actions/start/{kind}", start),
    _post("/actions/repair/{key}", repair_one),
    _post("/actions/job/{id}", control),
]
