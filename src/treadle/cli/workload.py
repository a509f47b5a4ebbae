"""Profiler documents from a file, for `treadle scan --workload`; also from a workload file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError

from treadle.advisor.loop import workload_file
from treadle.errors import UsageError

FILE_BYTES_MAX = 2_000_000_000
# A list is read at once; documents one by one.
LIST_BYTES_MAX = 50_000_000
# Dates after the year 9999 stand for "never" in queries; a file with one must be readable.
_CODEC = CodecOptions[dict[str, Any]](tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_JSON = json_util.JSONOptions(tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, BSONError)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_workload(path: Path) -> Iterator[dict[str, Any]]:
    """The documents of a file, one by one: BSON, a JSON list, one JSON document per line, or a workload file.

    A file that does not begin with a document is refused at once; anything
    else is refused when the iterator reaches it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from None
    if workload_file.is_workload(start):
        return workload_file.read(path).profile_documents()
    is_list = start[:1] == b"[" and path.suffix != ".bson"
    bytes_max = LIST_BYTES_MAX if is_list else FILE_BYTES_MAX
    if size > bytes_max:
        hint = ", or one document per line" if is_list else ""
        raise _invalid(path, f"is larger than {bytes_max // 1_000_000} MB; give a part of it{hint}")
    documents = _documents(path, is_list)
    return itertools.chain(list(itertools.islice(documents, 1)), documents)


def _invalid(path: Path, reason: str) -> UsageError:
    return UsageError(f"--workload {path} {reason}", code="workload-invalid")


def _documents(path: Path, is_list: bool) -> Iterator[dict[str, Any]]:
    count = 0
    try:
        for value in _values(path, is_list):
            if not isinstance(value, dict):
                raise TypeError
            yield value
            count += 1
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from None
    except _UNREADABLE:
        content = f"something else after {count:,} profiler documents" if count else "no profiler documents"
        raise _invalid(
            path,
            f"holds {content}; it takes .bson, a JSON list, or one JSON document per line, as "
            "`mongoexport --collection system.profile` writes them",
        ) from None


def _values(path: Path, is_list: bool) -> Iterator[Any]:
    with path.open("rb") as file:
        if path.suffix == ".bson":
            yield from bson.decode_file_iter(file, codec_options=_CODEC)
        elif is_list:
            text = file.read().removeprefix(_BYTE_ORDER_MARK).decode()
            yield from json_util.loads(text, json_options=_JSON)
        else:
            # Split at line feeds alone: text may hold other characters that Python takes for line ends.
            for number, line in enumerate(file):
                text = (line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line).decode().strip()
                if text:
                    yield json_util.loads(text, json_options=_JSON)
