"""What all requests of a dashboard share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from treadle.web.access import Access
from treadle.web.figures import Board


@dataclass(slots=True)
class Dashboard:
    """What all requests share."""

    board: Board
    access: Access
    show_values: bool
    templates: Environment
    # What an operator started here: verifies, rebuilds and repairs run beside the pages.
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    # Pages that are open and wait for the next figures.
    streams: int = 0

    def render(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        """A page, with what all pages show."""
        text = self.templates.get_template(template).render(
            figures=self.board.look(),
            read_only=self.access.read_only,
            csrf=self.access.page_token(request),
            show_values=self.show_values,
            path=request.url.path,
            **values,
        )
        return HTMLResponse(text, status)


def dashboard_of(request: Request) -> Dashboard:
    """The dashboard that a request is for."""
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard
