"""Files of profiler documents: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import bson
import pytest
from bson import json_util
from bson.datetime_ms import DatetimeMS

from treadle import UsageError
from treadle.cli.workload import read_workload


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01",
        b"[1, 2]",
        b"{",
        b'"text"',
        b"[{]",
        b"\xff\xfe",
        b'{"a": {"$oid": 5}}',
        b'{"a": {"$regularExpression": {}}}',
        b'{"a": {"$binary": 7}}',
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_no_workload_is_refused(content: bytes, tmp_path: Path) -> None:
    for name in ("w.json", "w.bson"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            read_workload(path)
        assert "workload-invalid" == caught.value.code
    with pytest.raises(UsageError):
        read_workload(tmp_path / "none.json")


def test_what_is_no_workload_later_in_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"a": 1}\n\n{"a": 2}\n7\n')
    documents = read_workload(path)
    assert [1, 2] == [next(documents)["a"], next(documents)["a"]]
    with pytest.raises(UsageError, match="something else after 2 profiler documents"):
        next(documents)


def test_a_workload_may_hold_what_a_workload_holds(tmp_path: Path) -> None:
    """A mark of the encoding, characters that some take for line ends, dates beyond Python's."""
    far = DatetimeMS(400_000_000_000_000)
    path = tmp_path / "w.json"
    lines = ['{"a": "x\u0085y\u2028z"}', json_util.dumps({"a": far})]
    path.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert ["x\u0085y\u2028z", far] == [each["a"] for each in read_workload(path)]
    path.write_text(f"[{','.join(lines)}]", encoding="utf-8-sig")
    assert ["x\u0085y\u2028z", far] == [each["a"] for each in read_workload(path)]
    path = tmp_path / "w.bson"
    path.write_bytes(bson.encode({"a": far}) + bson.encode({"a": 2}))
    assert [far, 2] == [each["a"] for each in read_workload(path)]
    path.write_bytes(b"")
    assert [] == list(read_workload(path))
