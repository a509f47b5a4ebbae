"""Which server a verb talks to, and a client for it, or one sentence on why there is none.

The sentences are Treadle's own: the driver's messages run over many lines and
may repeat parts of a URI whose password was not escaped.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pymongo
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import (
    ConfigurationError,
    ConnectionFailure,
    InvalidURI,
    OperationFailure,
    PyMongoError,
)

from treadle.cli.options import NO_CONNECTION
from treadle.errors import UsageError

# Users are promised an answer within 5 seconds. That includes the start of Python
# and the half second that the driver waits for its monitors when it closes.
CONNECT_SECONDS_MAX = 3.5
ENVIRONMENT_VARIABLE = "MONGODB_URI"

Source = Literal["argument", "option", "environment", "local"]
Client = MongoClient[dict[str, Any]]

# A part of the driver's message and its reason; the first that matches counts.
_REASONS = (
    ("Connection refused", "the connection was refused: is it running, and is the port right?"),
    ("SSL", "TLS failed: check the tls options and the certificates"),
    ("certificate", "TLS failed: check the tls options and the certificates"),
    ("Name or service not known", "the host name is not known: is it spelt right?"),
    ("nodename nor servname", "the host name is not known: is it spelt right?"),
    ("name resolution", "the host name could not be looked up: is the network up?"),
    ("No replica set members available", "it is no member of that replica set: correct or omit replicaSet="),
    ("server_type: RSGhost", "its replica set is not initiated: run rs.initiate() in mongosh"),
    ("server_type: RSSecondary", "its replica set has no primary now: see rs.status() in mongosh"),
)


class CannotConnect(UsageError):
    """There is no usable connection; the message names the hosts, never the user."""

    exit_code = NO_CONNECTION


@dataclass(frozen=True, slots=True)
class Target:
    """A URI, and who gave it."""

    uri: str = field(repr=False)
    source: Source


def choose_target(argument: str | None, option: str | None, environment: Mapping[str, str]) -> Target | None:
    """The positional URI, else the option's, else the environment's; None for the local server."""
    if argument:
        return Target(argument, "argument")
    if option:
        return Target(option, "option")
    if environment.get(ENVIRONMENT_VARIABLE):
        return Target(environment[ENVIRONMENT_VARIABLE], "environment")
    return None


def choose_database(argument: str | None, option: str | None) -> Target:
    """The same for verbs that read data, for which an empty local server is no use."""
    target = choose_target(argument, option, os.environ)
    if target is None:
        raise UsageError(
            "Name a database, as in mongodb://localhost:27017/shop, or set MONGODB_URI.", code="uri-missing"
        )
    return target


def hosts(uri: str) -> str:
    """The hosts of a URI as it names them, without anything secret."""
    match = re.fullmatch(r"mongodb(?:\+srv)?://([^/?]*)(.*)", uri, re.DOTALL)
    # An @ after the hosts means that a / or ? in the password was not escaped, so
    # that what looks like the hosts is part of the password.
    if match is None or "@" in match[2]:
        raise _invalid_uri()
    return match[1].rpartition("@")[2]


@contextmanager
def connected(uri: str) -> Generator[Client]:
    """A client whose server has answered and accepted the login; closed afterwards."""
    hosts(uri)  # Refuses a URI before the driver misreads it.
    with _client(uri) as client:
        try:
            with pymongo.timeout(CONNECT_SECONDS_MAX):
                client.admin.command("hello")
        except (PyMongoError, OSError) as error:
            raise cannot_connect(uri, error) from None
        yield client


@contextmanager
def connected_database(argument: str | None, option: str | None) -> Generator[Database[dict[str, Any]]]:
    """The database that a verb's URI names; what fails later because the server went away is one sentence."""
    target = choose_database(argument, option)
    with connected(target.uri) as client:
        try:
            database = client.get_default_database()
        except ConfigurationError:
            raise UsageError(
                "The URI names no database; add it as the path, as in mongodb://host:27017/shop.",
                code="database-missing",
            ) from None
        try:
            yield database
        except ConnectionFailure as error:
            raise cannot_connect(target.uri, error) from None


def _client(uri: str) -> Client:
    milliseconds = int(CONNECT_SECONDS_MAX * 1000)
    try:
        with warnings.catch_warnings():
            # They name unknown options, which may be parts of a password.
            warnings.simplefilter("ignore")
            return MongoClient(
                uri,
                connect=False,
                appname="treadle",
                serverSelectionTimeoutMS=milliseconds,
                # Half, since a mongodb+srv URI takes two look-ups in a row.
                connectTimeoutMS=milliseconds // 2,
            )
    except OSError as error:
        reason = error.strerror or "it holds no certificate"
        raise _invalid_uri(
            f"A file that the URI's tls options name cannot be read ({reason}); "
            "correct its path or its password."
        ) from None
    except InvalidURI:
        raise _invalid_uri() from None
    except ConfigurationError:
        raise _invalid_uri(
            "The URI's options do not fit together, or name a certificate that its key or password does "
            "not open; check the tls, auth and srv options."
        ) from None
    except (PyMongoError, ValueError, TypeError):
        raise _invalid_uri() from None


def _invalid_uri(
    message: str = "The URI cannot be parsed; it looks like mongodb://host:27017/shop, and in a user name, "
    "password or option each of : / ? # [ ] @ % is percent-encoded (@ as %40).",
) -> UsageError:
    return UsageError(message, code="uri-invalid")


def cannot_connect(uri: str, error: Exception) -> CannotConnect:
    """One sentence on why there is no connection to the hosts that the URI names."""
    if isinstance(error, OperationFailure):
        return CannotConnect(
            f"The server at {hosts(uri)} refused the login; check the user, the password and authSource.",
            code="login-refused",
        )
    if not isinstance(error, ConfigurationError):
        reason = f" within {CONNECT_SECONDS_MAX:g} s; {_reason(error)}"
    elif "wire version" in str(error):
        reason = ": PyMongo and the server are too far apart in age: update the older one"
    else:
        reason = ": its SRV record could not be looked up, or the login's options do not fit together"
    ending = "" if reason.endswith("?") else "."
    return CannotConnect(f"No connection to {hosts(uri)}{reason}{ending}", code="server-unreachable")


def _reason(error: Exception) -> str:
    for part, reason in _REASONS:
        if part in str(error):
            return reason
    if isinstance(error, ConnectionFailure):
        return "it did not answer: check the host, the port, the firewall and whether it wants TLS"
    return f"the driver gave up with {type(error).__name__}"
