"""Keeps passwords out of every message.

Messages of the driver and of the argument parser may repeat a URI or, where
an unescaped character split it in the wrong place, a part of its password. So
the text is searched for URIs and for every part of what the caller gave.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote, unquote_plus

HIDDEN = "***"
# Shorter parts occur in ordinary words, and hiding those would garble the text.
PART_LENGTH_MIN = 3

_SECRET_OPTIONS = (
    "tlsCertificateKeyFilePassword|ssl_pem_passphrase|sslPassphrase|"
    "proxyPassword|authMechanismProperties|password"
)
# Greedy, so that it ends at the last @: an earlier one is an unescaped part of the password.
_USER_INFORMATION = re.compile(r"(?<=://)[^\s'\"<>]*@")
_OPTION = re.compile(rf"(?i)\b({_SECRET_OPTIONS})=([^&\s'\"<>]*)")


def redact(text: str, given: Iterable[str] = ()) -> str:
    """The text without the logins of URIs and without secrets of the `given` strings."""
    for secret in sorted(_secrets(given), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _USER_INFORMATION.sub(f"{HIDDEN}@", text)
    return _OPTION.sub(rf"\1={HIDDEN}", text)


def _secrets(given: Iterable[str]) -> set[str]:
    return {
        form
        for string in given
        for secret in _secrets_of(string)
        # Parsers repeat their input as it is, decoded, or as a Python literal.
        for plain in (secret, unquote(secret), unquote_plus(secret))
        for form in (plain, repr(plain)[1:-1])
        if len(form) >= PART_LENGTH_MIN
    }


def _secrets_of(string: str) -> Iterator[str]:
    """The parts of a URI, even a misspelt one, that may be secret."""
    _, scheme, rest = string.partition("://")
    user_information, at, _ = (rest if scheme else string).rpartition("@")
    if at:
        yield user_information
        password = user_information.partition(":")[2] or user_information
        yield password
        yield from re.split(r"[:/?@&=]", password)
    for option in _OPTION.finditer(string):
        yield option[2]
