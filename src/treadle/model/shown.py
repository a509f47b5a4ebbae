"""Text from data, as it may reach a terminal, a log or JSON: without control and bidi characters."""

from __future__ import annotations

from typing import Any


def shown(value: Any, length: int | None = None) -> str:
    """A value as one line that steers no terminal; text as it is, anything else as Python writes it.

    What is not printable, such as control characters and those that turn the
    direction of text, is written as an escape.
    """
    text = value if isinstance(value, str) else repr(value)
    if length is not None and len(text) > length:
        text = text[: length - 1] + "…"
    return text if text.isprintable() else "".join(map(_escaped, text))


def quoted(value: Any, length: int = 200) -> str:
    """A caller's value in a message, as Python writes it: never long, and never an error itself."""
    try:
        text = repr(value)
    except Exception:
        return f"this {type(value).__name__}"
    return text if len(text) <= length else text[: length - 1] + "…"


def shown_lines(text: str) -> str:
    """The same of several lines, which stay lines."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str) -> str:
    """JSON with what is not printable escaped, so that it means the same; its line breaks stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each == "\n" or each.isprintable() else _json_escape(each) for each in text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
