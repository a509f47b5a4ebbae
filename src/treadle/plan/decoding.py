"""Replies with a document that the driver cannot decode: bad UTF-8, or a UUID of a wrong length.

The driver decodes a whole reply at once, so that one such document hides all others of its reply. The
runners then read again as bytes and decode document by document: what can be decoded is kept, what
cannot is identified by its `_id`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

# The size in bytes of an `_id` by its BSON type; a type that is missing begins with its own length.
_SIZES = {0x01: 8, 0x06: 0, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16}
_SIZES |= {0x7F: 0, 0xFF: 0}
# The bytes that such a value takes besides that length.
_BESIDES = {0x02: 4, 0x0D: 4, 0x0E: 4, 0x05: 5, 0x0C: 16, 0x03: 0, 0x04: 0, 0x0F: 0}


@dataclass(frozen=True)
class UndecodableId:
    """An `_id` that cannot be decoded, as the bytes of `{_id: …}`."""

    document: bytes

    def __repr__(self) -> str:
        return f"0x{self.document[9:-1].hex()}"

    def greater(self) -> RawBSONDocument:
        """Return the filter for documents with greater ids, which the driver could not encode."""
        literal = _frame(self.document[4:5] + b"$literal\0" + self.document[9:-1])
        operands = _frame(b"\x020\0" + b"\x05\0\0\0$_id\0" + b"\x031\0" + literal)
        return RawBSONDocument(_frame(b"\x03$expr\0" + _frame(b"\x04$gt\0" + operands)))


class Unreadable(DataError):
    """Some documents of a reply cannot be decoded.

    `failed` has the id and the reason of each, `documents` are the others, and `last` is the id of the
    last document of the reply, decodable or not.
    """

    def __init__(
        self,
        collection: str,
        failed: Iterable[tuple[Any, str]],
        documents: Iterable[Raw] = (),
        last: Any = None,
    ) -> None:
        self.collection = collection
        self.failed = list(failed)
        self.documents = list(documents)
        self.last = last
        key, reason = self.failed[0]
        more = f", and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
        super().__init__(
            f"{collection} {key!r}{more} cannot be decoded ({reason}); repair the document in mongosh, or "
            "delete it",
            code="document-unreadable",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (Unreadable, (self.collection, self.failed, self.documents, self.last))

    def singly(self) -> list[Unreadable]:
        """Return an error for each of the documents that cannot be decoded."""
        return [Unreadable(self.collection, [each]) for each in self.failed]

    def holds(self, collection: str, key: Any) -> bool:
        """Whether this document is one of those that cannot be decoded."""
        return self.collection == collection and any(each == key for each, _ in self.failed)


@dataclass(slots=True)
class PagedRead:
    """A read that streams, page by page, and continues past documents that cannot be decoded.

    From such a document on, the rest is read as bytes (`as_bytes`) and decoded document by document.
    """

    command: Read  # the rest of the read, counted from the last call of `decode_singly`
    as_bytes: bool = False
    taken: int = 0

    def take(self, page: list[Any], *, skip: bool) -> tuple[list[Raw], Unreadable | None]:
        """Return the documents of a page, and the error of those that cannot be decoded.

        Without `skip`, only the documents before the first of those.
        """
        self.taken += len(page)
        if not self.as_bytes:
            return page, None
        documents: list[Raw] = []
        for part in [page] if skip else [[raw] for raw in page]:
            try:
                documents += decode_documents(self.command.collection, part, codec_options(self.command))
            except Unreadable as error:
                return documents + error.documents, error
        return documents, None

    def decode_singly(self, error: InvalidBSON) -> None:
        """Read the rest as bytes from now on; raises the error if it is read so already."""
        if self.as_bytes:
            raise error
        self.command, self.as_bytes, self.taken = _without_first(self.command, self.taken), True, 0


def _without_first(command: Read, number: int) -> Read:
    if command.method != "find":
        return replace(command, arguments=([*command.arguments[0], {"$skip": number}],))
    options = dict(command.options)
    options["skip"] = (options.get("skip") or 0) + number
    if options.get("limit"):
        # At least 1, because 0 means all; a read that has reached its limit is not continued.
        options["limit"] = max(1, options["limit"] - number)
    return replace(command, options=options)


def codec_options(command: Read) -> CodecOptions[Raw]:
    return NAIVE_CODEC_OPTIONS if command.naive else CODEC_OPTIONS


def decode_documents(
    collection: str, raws: Sequence[RawBSONDocument], options: CodecOptions[Raw]
) -> list[Raw]:
    """Decode each document by itself; raises `Unreadable`, with the others, if one cannot be decoded."""
    documents: list[Raw] = []
    failed: list[tuple[Any, str]] = []
    data = b""
    for raw in raws:
        data = bytes(raw.raw)
        try:
            documents.append(bson.decode(data, codec_options=options))
        except InvalidBSON as error:
            failed.append((_id_of(data), str(error)))
    if failed:
        raise Unreadable(collection, failed, documents, _id_of(data))
    return documents


def unreadable_result(command: Call, error: InvalidBSON) -> Unreadable:
    """Return the error of a command whose one document cannot be decoded."""
    condition = command.arguments[0] if command.arguments else None
    key = condition.get("_id") if isinstance(condition, dict) else None
    if isinstance(key, dict) and list(key) == ["$eq"]:
        key = key["$eq"]
    return Unreadable(command.collection, [(key, str(error))])


def _frame(elements: bytes) -> bytes:
    return (len(elements) + 5).to_bytes(4, "little") + elements + b"\0"


def _id_of(document: bytes) -> Any:
    """Return the `_id` of a document with damaged fields; the server stores the id first."""
    kind, start = document[4], document.find(b"\0", 5) + 1
    if document[5:start] != b"_id\0":
        return None
    size = _SIZES.get(kind)
    if size is None:
        size = int.from_bytes(document[start : start + 4], "little") + _BESIDES.get(kind, 0)
    only_id = _frame(document[4 : start + size])
    try:
        return bson.decode(only_id, codec_options=CODEC_OPTIONS)["_id"]
    except InvalidBSON:
        return UndecodableId(only_id)
