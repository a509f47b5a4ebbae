"""Documents that the driver cannot decode: bad UTF-8, UUIDs of a wrong length.

The driver decodes a whole reply at once, so that one such document hides all
that came with it. The runners then read the same again as bytes, and decode
document by document: what can be read is kept, what cannot is named by `_id`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.errors import InvalidBSON
from bson.raw_bson import RawBSONDocument

from treadle.errors import DataError
from treadle.model.bson_types import CODEC_OPTIONS, NAIVE_CODEC_OPTIONS, Raw
from treadle.plan import Call, Read

RAW_CODEC_OPTIONS: CodecOptions[Any] = CODEC_OPTIONS.with_options(document_class=RawBSONDocument)

# How many bytes the value of an element takes, by its type; None for those that say it themselves.
_SIZES = {0x01: 8, 0x06: 0, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16}
_SIZES |= {0x7F: 0, 0xFF: 0}
# What such a value takes besides the number of bytes that it begins with.
_BESIDES = {0x02: 4, 0x0D: 4, 0x0E: 4, 0x05: 5, 0x0C: 16, 0x03: 0, 0x04: 0, 0x0F: 0}


@dataclass(frozen=True)
class RawId:
    """An `_id` that cannot be decoded, as the bytes of `{_id: …}`."""

    document: bytes

    def __repr__(self) -> str:
        return f"0x{self.document[9:-1].hex()}"

    def greater(self) -> RawBSONDocument:
        """The filter for documents whose ids come later; the driver could not encode it."""
        literal = _document(self.document[4:5] + b"$literal\0" + self.document[9:-1])
        operands = _document(b"\x020\0" + b"\x05\0\0\0$_id\0" + b"\x031\0" + literal)
        return RawBSONDocument(_document(b"\x03$expr\0" + _document(b"\x04$gt\0" + operands)))


class Unreadable(DataError):
    """Some documents of a reply cannot be decoded; `documents` are those that can."""

    def __init__(
        self,
        collection: str,
        failed: Iterable[tuple[Any, str]],
        documents: Iterable[Raw] = (),
        last: Any = None,
    ) -> None:
        self.collection = collection
        # The ids of those that cannot be decoded, with the reason of each.
        self.failed = list(failed)
        self.documents = list(documents)
        # The id of the last one, readable or not.
        self.last = last
        key, reason = self.failed[0]
        more = f", and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
        super().__init__(
            f"{collection} {key!r}{more} cannot be decoded ({reason}); mend the document in mongosh, or "
            "delete it",
            code="document-unreadable",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (Unreadable, (self.collection, self.failed, self.documents, self.last))

    def holds(self, collection: str, key: Any) -> bool:
        """Whether a document is one of those that cannot be decoded."""
        return self.collection == collection and any(each == key for each, _ in self.failed)


def _document(elements: bytes) -> bytes:
    return (len(elements) + 5).to_bytes(4, "little") + elements + b"\0"


def decoded(collection: str, raws: Iterable[RawBSONDocument], options: CodecOptions[Raw]) -> list[Raw]:
    """Each document by itself; raises `Unreadable` with the others where one cannot be decoded."""
    documents: list[Raw] = []
    failed: list[tuple[Any, str]] = []
    last = b""
    for raw in raws:
        last = bytes(raw.raw)
        try:
            documents.append(bson.decode(last, codec_options=options))
        except InvalidBSON as error:
            failed.append((id_of(last), str(error)))
    if failed:
        raise Unreadable(collection, failed, documents, id_of(last))
    return documents


def readable_of(command: Read, raws: Iterable[RawBSONDocument]) -> tuple[list[Raw], Unreadable | None]:
    """The documents of a page of bytes up to the first that cannot be decoded, and what to say of that."""
    documents: list[Raw] = []
    for raw in raws:
        try:
            documents += decoded(command.collection, [raw], codec_options(command))
        except Unreadable as error:
            return documents, error
    return documents, None


def codec_options(command: Read) -> CodecOptions[Raw]:
    return NAIVE_CODEC_OPTIONS if command.naive else CODEC_OPTIONS


def after(command: Read, number: int) -> Read:
    """The same read without the first documents."""
    if command.method != "find":
        return replace(command, arguments=([*command.arguments[0], {"$skip": number}],))
    options = dict(command.options)
    options["skip"] = (options.get("skip") or 0) + number
    if options.get("limit"):
        # At least one, because zero would mean all; a page that reached the limit is not read on.
        options["limit"] = max(1, options["limit"] - number)
    return replace(command, options=options)


def decoded_parts(raw: Any) -> Raw:
    """The fields of a document of bytes that can be decoded, without the others."""
    parts: Raw = {}
    for name, value in raw.items():
        with contextlib.suppress(InvalidBSON):
            whole = isinstance(value, RawBSONDocument)
            parts[name] = bson.decode(value.raw, codec_options=CODEC_OPTIONS) if whole else value
    return parts


def undecoded(command: Call, error: InvalidBSON) -> Unreadable:
    """What to raise where the one document that a command returns cannot be decoded."""
    chosen = command.arguments[0] if command.arguments else None
    key = chosen.get("_id") if isinstance(chosen, dict) else None
    if isinstance(key, dict) and list(key) == ["$eq"]:
        key = key["$eq"]
    return Unreadable(command.collection, [(key, str(error))])


def id_of(document: bytes) -> Any:
    """The `_id` of a document whose other fields may be damaged; it comes first, as the server stores it."""
    kind, start = document[4], document.find(b"\0", 5) + 1
    if document[5:start] != b"_id\0":
        return None
    size = _SIZES.get(kind)
    if size is None:
        size = int.from_bytes(document[start : start + 4], "little") + _BESIDES.get(kind, 0)
    alone = _document(document[4 : start + size])
    try:
        return bson.decode(alone, codec_options=CODEC_OPTIONS)["_id"]
    except InvalidBSON:
        return RawId(alone)
