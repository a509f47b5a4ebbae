"""`treadle serve`: the dashboard of an application's Store."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.application import load_store
from treadle.cli.options import AppOption
from treadle.cli.output import say
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.cli.application import AnyStore

TOKEN_LENGTH_MIN = 16
SHUTDOWN_SECONDS = 2


def serve(
    app_name: AppOption,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port to listen on.", min=0, max=65_535)] = 8420,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="TREADLE_TOKEN",
            help="Ask for this token; needed to serve other machines. Better in the environment.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, do nothing.")] = False,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show values of documents, beside ids and field names.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", help="Seconds between two readings of the database.", min=0.2)
    ] = 2.0,
) -> None:
    """Serve a dashboard: rules, lag, what was set aside, findings, jobs. Runs until SIGTERM or Ctrl-C.

    Also serves JSON (/api/status and others), /healthz, /readyz and /metrics.
    Without a token, only this machine is served.

    \b
    Example:
      treadle serve --app shop.models:store
      TREADLE_TOKEN=… treadle serve --app shop.models:store --host 0.0.0.0 --read-only
    """
    try:
        import uvicorn

        from treadle.web.access import is_loopback
        from treadle.web.application import create
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the dashboard needs {error.name}; run pip install 'treadle[web]'", code="extra-missing"
        ) from None
    _require_token(token, host, is_loopback(host))
    store = load_store(app_name)
    listener = _listen(host, port)
    dashboard = create(
        store,
        token=token,
        read_only=read_only,
        show_values=show_values,
        interval=interval,
    )
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
    say(f"Dashboard at {address}; stop with Ctrl-C or SIGTERM.", err=True)
    config = uvicorn.Config(
        _closing(dashboard, store),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _require_token(token: str | None, host: str, own: bool) -> None:
    """Refuse to serve other machines without a token, and a token that can be guessed."""
    if token is None and not own:
        raise UsageError(
            f"--host {host} serves other machines, which takes a token; set TREADLE_TOKEN or --token",
            code="token-missing",
        )
    if token is not None and len(token) < TOKEN_LENGTH_MIN:
        raise UsageError(
            f"the token is shorter than {TOKEN_LENGTH_MIN} characters, so that it can be guessed; make one "
            "with: openssl rand -hex 24",
            code="token-missing",
        )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything else is begun."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise UsageError(
            f"{host} port {port} cannot be used ({error.strerror}); choose another --port",
            code="port-unavailable",
        ) from None


def _closing(dashboard: Any, store: AnyStore) -> Any:
    """The dashboard, which closes an asyncio Store on the loop that it ran on."""
    from contextlib import asynccontextmanager

    from treadle.store.async_store import AsyncStore

    if isinstance(store, AsyncStore):
        inner = dashboard.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: Any) -> Any:
            async with inner(app):
                yield
            await store.close()

        dashboard.router.lifespan_context = lifespan
    return dashboard
