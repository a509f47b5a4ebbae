"""The results as they are kept, in JSON: what the report and the plots are made from.

A run replaces what it measured again and leaves the rest, so that a family
can be measured anew by itself. Each entry says when and where it was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Goal, Result, Spread

# Six digits are more than any of these times deserves.
SECONDS_DIGITS = 6
# The family that is measured only where it is named.
LONG = "long"


@dataclass(frozen=True, slots=True)
class Entry:
    """One work of one group: its results, or lines of text from a script, or why there are none."""

    group: str
    work: str
    date: str
    seconds: float
    surroundings: dict[str, str]
    results: Sequence[Result] = ()
    lines: Sequence[str] = ()
    failure: str | None = None


@dataclass(slots=True)
class Stored:
    """All entries, in the order in which they are reported."""

    entries: list[Entry] = field(default_factory=list)

    def put(self, entry: Entry, order: Sequence[tuple[str, str]]) -> None:
        """Take in an entry, in place of an older one of the same work."""
        same = (entry.group, entry.work)
        kept = [each for each in self.entries if (each.group, each.work) != same]
        places = {key: place for place, key in enumerate(order)}
        self.entries = sorted(
            [*kept, entry], key=lambda each: places.get((each.group, each.work), len(places))
        )

    def drop_unknown(self, known: Collection[tuple[str, str]], broken: Collection[str]) -> None:
        """Forget works that no module measures any more; those of a module that cannot be loaded stay."""
        self.entries = [
            each for each in self.entries if (each.group, each.work) in known or each.group in broken
        ]


def load(path: Path) -> Stored:
    """What is kept at `path`; nothing where there is no such file."""
    if not path.exists():
        return Stored()
    data = json.loads(path.read_text(encoding="utf-8"))
    found = data["surroundings"]
    return Stored([_entry(raw, found) for raw in data["entries"]])


def save(path: Path, stored: Stored) -> None:
    """Replace the file in one go, so that a run that is cut off leaves the older one whole."""
    surroundings: dict[str, dict[str, str]] = {}
    entries = []
    for entry in stored.entries:
        text = json.dumps(entry.surroundings, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        surroundings[key] = entry.surroundings
        entries.append({**asdict(entry), "surroundings": key, "results": [_raw(r) for r in entry.results]})
    data = {"surroundings": surroundings, "entries": entries}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _raw(result: Result) -> dict[str, Any]:
    raw = asdict(result)
    raw["met"] = result.met
    raw["seconds"] = [float(f"{seconds:.{SECONDS_DIGITS}g}") for seconds in result.seconds]
    # On one line each: the file is for programs, but its changes are read in a diff.
    raw["seconds"] = " ".join(map(repr, raw["seconds"]))
    return raw


def _entry(raw: dict[str, Any], surroundings: dict[str, dict[str, str]]) -> Entry:
    fields = {**raw, "surroundings": surroundings[raw["surroundings"]]}
    fields["results"] = [_result(each) for each in raw["results"]]
    return Entry(**fields)


def _result(raw: dict[str, Any]) -> Result:
    fields = {key: value for key, value in raw.items() if key != "met"}
    fields["microseconds"] = Spread(**raw["microseconds"])
    fields["round_ratios"] = None if raw["round_ratios"] is None else Spread(**raw["round_ratios"])
    fields["goal"] = None if raw["goal"] is None else Goal(**raw["goal"])
    fields["seconds"] = [float(text) for text in raw["seconds"].split()]
    return Result(**fields)
