"""The private local server."""

from treadle.server.local import LocalServer, start

__all__ = ["LocalServer", "start"]
