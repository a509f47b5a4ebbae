"""Who may look, and who may act.

Without a token only this machine is served, under a name of this machine, so
that no page from elsewhere can reach it by a host name of its own. With one,
a browser logs in once and keeps a cookie; other programs send the token as a
bearer. Actions are POST, carry the token of the page that they come from, and
an `Origin` that is this server. Each answer forbids everything that the pages
do not need.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

COOKIE = "treadle_session"
SESSION_SECONDS = 12 * 3600
BODY_BYTES_MAX = 64 * 1024
FIELDS_MAX = 50
FAILURES_MAX = 5
FAILURES_SECONDS = 60.0
CLIENTS_MAX = 10_000
# What answers without a login: probes of an orchestrator, the login itself, and what it looks like.
OPEN_PATHS = ("/healthz", "/readyz", "/login", "/static/")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that gets an answer other than the page it asked for."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers or {}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form."""
    try:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                raise Refused(413, f"The request is too large; {BODY_BYTES_MAX} bytes are the most.")
        text = body.decode()
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:
        raise Refused(400, "The form cannot be read.") from None


@dataclass(slots=True)
class Access:
    """The rules of one server."""

    token: str | None = None
    read_only: bool = False
    clock: Callable[[], float] = time.time
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _failures: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.token is not None:
            # Derived, so that several processes with one token accept each other's cookies.
            self._key = hashlib.sha256(b"treadle dashboard " + self.token.encode()).digest()

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    # -- looking ----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Let a request pass, or refuse it."""
        if self.token is None:
            if not is_loopback(request.url.hostname or ""):
                raise Refused(400, "This dashboard answers to a name of this machine only: use localhost.")
            return
        path = request.url.path
        if any(path == each or (each.endswith("/") and path.startswith(each)) for each in OPEN_PATHS):
            return
        if self._has_session(request) or self._has_bearer(request):
            return
        raise Refused(401, "Log in with the token that treadle serve was started with.")

    def _has_session(self, request: Request) -> bool:
        issued, _, signature = request.cookies.get(COOKIE, "").partition(".")
        if not issued.isascii() or not issued.isdigit():
            return False
        fresh = 0 <= self.clock() - int(issued) <= SESSION_SECONDS
        return hmac.compare_digest(signature.encode(), self._sign(f"session {issued}").encode()) and fresh

    def _has_bearer(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        return self.accept(request, given)

    def accept(self, request: Request, given: str) -> bool:
        """Whether a token is the right one; too many wrong ones from one place are refused for a while."""
        assert self.token is not None
        place, now = request.client.host if request.client else "", self.clock()
        recent = [at for at in self._failures.get(place, ()) if now - at < FAILURES_SECONDS]
        if len(recent) >= FAILURES_MAX:
            wait = int(FAILURES_SECONDS - (now - recent[0])) + 1
            raise Refused(
                429, f"Too many wrong tokens; try again in {wait} seconds.", {"Retry-After": str(wait)}
            )
        if hmac.compare_digest(given.encode(), self.token.encode()):
            self._failures.pop(place, None)
            return True
        if len(self._failures) >= CLIENTS_MAX:
            self._failures.clear()
        self._failures[place] = [*recent, now]
        return False

    def cookie(self) -> str:
        """The value of the cookie after a login; it does not hold the token."""
        issued = str(int(self.clock()))
        return f"{issued}.{self._sign(f'session {issued}')}"

    # -- acting ------------------------------------------------------------------------------------

    def page_token(self, request: Request) -> str:
        """What the forms of a page carry."""
        return self._sign("page " + request.cookies.get(COOKIE, ""))

    def check_action(self, request: Request, form: Mapping[str, str]) -> None:
        """Let an action pass, or refuse it."""
        self.check_origin(request)
        given, expected = form.get("csrf", ""), self.page_token(request)
        if not hmac.compare_digest(given.encode(), expected.encode()):
            raise Refused(403, "This form is not from this page, or too old; go back, reload, and try again.")

    def check_origin(self, request: Request) -> None:
        if self.read_only and request.url.path != "/login":
            raise Refused(403, "This dashboard is read-only; start treadle serve without --read-only to act.")
        origin = request.headers.get("origin")
        if origin is None or urlsplit(origin).netloc != request.headers.get("host"):
            raise Refused(403, "Actions are taken from the dashboard's own pages only.")
