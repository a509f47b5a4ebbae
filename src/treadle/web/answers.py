"""What programs ask for: JSON, probes, metrics, and the stream of events for pages that are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from treadle.cli.metrics import Collector
from treadle.web.access import Refused
from treadle.web.dashboard import dashboard_of
from treadle.web.figures import Figures

try:
    import prometheus_client
except ModuleNotFoundError:
    prometheus_client = None  # type: ignore[assignment]

# A comment now and then, so that whatever stands between does not close the connection.
KEEP_ALIVE_SECONDS = 15.0
STREAMS_MAX = 200


def _json(name: str) -> Any:
    async def answer(request: Request) -> Response:
        board = dashboard_of(request).board
        board.look()
        return Response(board.json(name), media_type="application/json")

    return answer


async def healthz(request: Request) -> Response:
    """200 while this process serves."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """200 while the database answers and each stream rule has a leader within its lag limit."""
    dashboard = dashboard_of(request)
    figures: Figures = dashboard.board.look()
    if figures.status is None and figures.error is None:
        await asyncio.wait_for(dashboard.board.following(figures.number), 10)
        figures = dashboard.board.figures
    limits = dashboard.board.store.graph.limits
    reasons = why_not_ready(figures, limits.worker_lag_max_seconds)
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def why_not_ready(figures: Figures, lag_max_seconds: float) -> list[str]:
    """What stands in the way of relying on maintained values; nothing if they can be."""
    if figures.error is not None:
        return [figures.error]
    if figures.status is None:
        return ["No figures have been read yet."]
    reasons = []
    worker = figures.status.worker
    streamed = [rule for rule in figures.rules if rule.maintain == "stream"]
    if streamed and (worker is None or not worker.active):
        reasons.append("No worker leads; start treadle watch.")
    for rule in streamed:
        if rule.state in ("paused", "building", "failed"):
            reasons.append(f"{rule.rule} is {rule.state}.")
        elif (rule.lag_seconds or 0.0) > lag_max_seconds:
            reasons.append(f"{rule.rule} is {rule.lag_seconds:.0f} s behind.")
    return reasons


async def metrics(request: Request) -> Response:
    """The figures for Prometheus."""
    if prometheus_client is None:
        raise Refused(501, "Metrics need prometheus-client; run pip install 'treadle[metrics]'.")
    board = dashboard_of(request).board
    figures = board.look()
    status = figures.status
    if status is None:
        raise Refused(503, figures.error or "No figures have been read yet.")
    registry = prometheus_client.CollectorRegistry()
    collector: Any = Collector(lambda: status)
    registry.register(collector)
    return Response(prometheus_client.generate_latest(registry), media_type="text/plain; version=0.0.4")


async def events(request: Request) -> Response:
    """A line whenever there are new figures, for pages that are open."""
    dashboard = dashboard_of(request)
    if dashboard.streams >= STREAMS_MAX:
        raise Refused(503, "Too many pages are open; close some.")

    async def lines() -> AsyncGenerator[str]:
        dashboard.streams += 1
        number = dashboard.board.figures.number
        try:
            yield "retry: 3000\n\n"
            while True:
                try:
                    figures = await asyncio.wait_for(dashboard.board.following(number), KEEP_ALIVE_SECONDS)
                    number = figures.number
                    dashboard.board.look()
                    yield f"data: {number}\n\n"
                except TimeoutError:
                    dashboard.board.look()
                    yield ": nothing new\n\n"
        finally:
            dashboard.streams -= 1

    return StreamingResponse(lines(), media_type="text/event-stream")


ROUTES = [
    Route("/api/status", _json("status")),
    Route("/api/rules", _json("rules")),
    Route("/api/set-aside", _json("set_aside")),
    Route("/api/jobs", _json("jobs")),
    Route("/api/findings", _json("findings")),
    Route("/healthz", healthz),
    Route("/readyz", readyz),
    Route("/metrics", metrics),
    Route("/events", events),
]
