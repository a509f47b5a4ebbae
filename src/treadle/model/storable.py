"""Why a document cannot be stored, in a sentence that names the path.

The driver refuses such documents while encoding them, with an error that does
not say where. Nothing is checked beforehand on the ordinary way; only when
the driver has refused is the document walked to find the culprit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import bson
from bson import ObjectId
from bson.decimal128 import Decimal128
from bson.errors import InvalidDocument
from pymongo.errors import DocumentTooLarge

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.schema_check import join

DEPTH_MAX = 180  # the server's own limit for stored documents
SIZE_MAX_BYTES = 16 * 1024 * 1024
BATCH_SAFE_BYTES = 4 * 1024 * 1024
SAMPLES_MAX = 64

ENCODING_ERRORS = (InvalidDocument, OverflowError, UnicodeEncodeError, RecursionError, DocumentTooLarge)


def not_storable(error: Exception, model: str, documents: Sequence[Mapping[str, Any]] = ()) -> UsageError:
    """Why the driver could not encode documents; names the first that it cannot encode."""
    general = UsageError(f"this cannot be stored in {model}: {error}", code="value-not-storable")
    return next(filter(None, (_culprit(document, model) for document in documents)), general)


def require_encodable(document: Mapping[str, Any], model: str) -> None:
    """Refuse a document that the driver could not encode, or that is too large."""
    if (culprit := _culprit(document, model)) is not None:
        raise culprit


def _culprit(document: Mapping[str, Any], model: str) -> UsageError | None:
    try:
        size = len(bson.encode(document, codec_options=CODEC_OPTIONS))
    except RecursionError:
        return too_deep(model)
    except Exception:
        path, reason = _find(document, "", 0) or ("document", "it cannot be encoded")
        return UsageError(f"{model}.{path} cannot be stored: {reason}", code="value-not-storable")
    if size > SIZE_MAX_BYTES:
        return UsageError(
            f"this {model} takes {size:,} bytes, and MongoDB stores at most {SIZE_MAX_BYTES:,} in one "
            "document; keep large or growing parts in documents of their own",
            code="document-too-large",
        )
    return None


def _find(value: Any, path: str, depth: int) -> tuple[str, str] | None:
    if depth > DEPTH_MAX:
        return path[:60], "it is nested too deeply"
    items: Any = ()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or "\0" in key:
                return join(path, repr(key)), "a key must be text without NUL"
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        return path, "the integer needs more than the 64 bits that BSON has; use Decimal or str"
    else:
        try:
            bson.encode({"value": value}, codec_options=CODEC_OPTIONS)
        except UnicodeEncodeError:
            return path, "the text holds a lone surrogate, which is not valid Unicode"
        except Exception:
            return path, f"BSON has no form for {type(value).__name__}"
        return None
    for key, item in items:
        culprit = _find(item, join(path, str(key)), depth + 1)
        if culprit:
            return culprit
    return None


_SENT_AS_THEY_ARE = frozenset({bool, float, type(None), ObjectId, bytes, datetime, UUID, Decimal128})


def refuse_unsendable(value: Any) -> None:
    """Refuse a single value, in BSON's types, that the driver cannot encode."""
    kind = type(value)
    if kind in _SENT_AS_THEY_ARE:
        return
    if kind is int:
        if not -(2**63) <= value < 2**63:
            raise _unsendable("an integer needs more than the 64 bits that BSON has; use Decimal or str")
    elif kind is str:
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _unsendable("a text holds a lone surrogate, which is not valid Unicode")
    else:
        try:
            bson.encode({"value": value}, codec_options=CODEC_OPTIONS)
        except Exception:
            raise _unsendable(f"BSON has no form for {kind.__name__}") from None


def _unsendable(reason: str) -> UsageError:
    return UsageError(f"this cannot be stored, or sent as a condition: {reason}", code="value-not-storable")


def too_deep(model: str) -> UsageError:
    return UsageError(
        f"this {model} is nested more than {DEPTH_MAX} levels deep, which MongoDB refuses; "
        "store references instead of nesting",
        code="document-too-deep",
    )


def check_depth(document: Any, model: str) -> None:
    """Refuse what the server would refuse, before its neighbours are written."""
    level = [document]
    for _ in range(DEPTH_MAX):
        deeper: list[Any] = []
        for value in level:
            values = value.values() if isinstance(value, dict) else value
            deeper.extend(item for item in values if isinstance(item, (dict, list)))
        if not deeper:
            return
        level = deeper
    raise too_deep(model)


def check_batch(documents: Sequence[Mapping[str, Any]], model: str) -> None:
    """Refuse a bulk of documents of which one cannot be stored, before any is.

    The driver encodes and sends batch by batch. A small bulk is one batch, so
    its own check comes before anything is sent; only a large one is encoded
    twice.
    """
    step = max(1, len(documents) // SAMPLES_MAX)
    try:
        sampled = documents[::step]
        # Several in one call, which is quicker and counts some bytes more.
        parts = (sampled[at : at + 16] for at in range(0, len(sampled), 16))
        size = sum(len(bson.encode({"": part}, codec_options=CODEC_OPTIONS)) for part in parts)
        if size / len(sampled) * len(documents) <= BATCH_SAFE_BYTES:
            return
        for document in documents:
            if len(bson.encode(document, codec_options=CODEC_OPTIONS)) > SIZE_MAX_BYTES:
                raise not_storable(DocumentTooLarge(""), model, [document])
    except ENCODING_ERRORS as error:
        raise not_storable(error, model, documents) from error
