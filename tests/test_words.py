"""The source and the documentation use standard English: no phrase of tests/banned_phrases.txt occurs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.measure import BANNED, BANNED_MODULES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "treadle"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def sources() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def used(path: Path) -> list[str]:
    """The banned phrases of a file, each with its line."""
    lines = enumerate(path.read_text().splitlines(), 1)
    name = path.relative_to(ROOT)
    return [f"{name}:{number}: {match[0]}" for number, line in lines for match in BANNED.finditer(line)]


def test_no_banned_phrase_is_used() -> None:
    assert [] == [phrase for path in [*sources(), *PAGES] for phrase in used(path)]


def test_modules_are_nouns() -> None:
    assert [] == [str(path.relative_to(ROOT)) for path in sources() if path.stem in BANNED_MODULES]


@pytest.mark.parametrize("text", ["Whoever comes", "this goes on", "put right", "it mends"])
def test_a_banned_phrase_is_recognised(text: str) -> None:
    assert BANNED.search(text)
