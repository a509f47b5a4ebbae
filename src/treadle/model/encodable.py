"""Why a document cannot be stored, in a sentence that names the path.

The driver refuses such documents while it encodes them, with an error that
does not say where. So nothing is checked beforehand; a document is searched
only when the driver has refused it.
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

DEPTH_MAX = 180  # the server's own limit for stored documents
SIZE_MAX_BYTES = 16 * 1024 * 1024
BATCH_SAFE_BYTES = 4 * 1024 * 1024
SAMPLES_MAX = 64

ENCODING_ERRORS = (InvalidDocument, OverflowError, UnicodeEncodeError, RecursionError, DocumentTooLarge)
_ALWAYS_ENCODABLE = frozenset({bool, float, type(None), ObjectId, bytes, datetime, UUID, Decimal128})


def not_storable(error: Exception, model: str, documents: Sequence[Mapping[str, Any]] = ()) -> UsageError:
    """Return the error that says why the driver could not encode documents, and names the first such."""
    general = UsageError(f"this cannot be stored in {model}: {error}", code="value-not-storable")
    return next(filter(None, (_refusal(document, model) for document in documents)), general)


def require_encodable(document: Mapping[str, Any], model: str) -> None:
    """Refuse a document that the driver could not encode, or that is too large."""
    if (refusal := _refusal(document, model)) is not None:
        raise refusal


def _refusal(document: Mapping[str, Any], model: str) -> UsageError | None:
    try:
        size = len(bson.encode(document, codec_options=CODEC_OPTIONS))
    except RecursionError:
        return too_deep(model)
    except (*ENCODING_ERRORS, ValueError, TypeError):
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
    """Return the path of the first value that BSON cannot hold, and why it cannot."""
    if depth > DEPTH_MAX:
        return path[:60], "it is nested too deeply"
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        reason = _reason(value)
        return (path, reason) if reason else None
    for key, item in items:
        if isinstance(value, Mapping) and (not isinstance(key, str) or "\0" in key):
            return f"{path}.{key!r}".lstrip("."), "a key must be text without NUL"
        if culprit := _find(item, f"{path}.{key}".lstrip("."), depth + 1):
            return culprit
    return None


def _reason(value: Any) -> str | None:
    """Return why BSON cannot hold a single value; None where it can."""
    kind = type(value)
    if kind in _ALWAYS_ENCODABLE or (kind is str and value.isascii()):
        return None
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**63
        return None if fits else "the integer needs more than the 64 bits that BSON has; use Decimal or str"
    try:
        bson.encode({"": value}, codec_options=CODEC_OPTIONS)
    except UnicodeEncodeError:
        return "the text holds a lone surrogate, which is not valid Unicode"
    except (*ENCODING_ERRORS, ValueError, TypeError):
        return f"BSON has no form for {kind.__name__}"
    return None


def refuse_unsendable(value: object) -> None:
    """Refuse a single value, in BSON's types, that the driver cannot encode."""
    if (reason := _reason(value)) is not None:
        raise UsageError(
            f"this cannot be stored, or sent as a condition: {reason}", code="value-not-storable"
        )


def too_deep(model: str) -> UsageError:
    """Return the error of a document that is nested deeper than the server takes."""
    return UsageError(
        f"this {model} is nested more than {DEPTH_MAX} levels deep, which MongoDB refuses; "
        "store references instead of nesting",
        code="document-too-deep",
    )


def check_batch(documents: Sequence[Mapping[str, Any]], model: str) -> None:
    """Refuse documents of which one cannot be stored, before any is.

    The driver encodes and sends batch by batch. A small bulk is one batch, so
    its own check comes before anything is sent; only a large one is encoded
    twice.
    """
    step = max(1, len(documents) // SAMPLES_MAX)
    try:
        samples = documents[::step]
        # Several in one call, which is faster and counts a few bytes more.
        parts = (samples[at : at + 16] for at in range(0, len(samples), 16))
        size = sum(len(bson.encode({"": part}, codec_options=CODEC_OPTIONS)) for part in parts)
        if size / len(samples) * len(documents) <= BATCH_SAFE_BYTES:
            return
        for document in documents:
            if len(bson.encode(document, codec_options=CODEC_OPTIONS)) > SIZE_MAX_BYTES:
                raise not_storable(DocumentTooLarge(""), model, [document])
    except ENCODING_ERRORS as error:
        raise not_storable(error, model, documents) from error
