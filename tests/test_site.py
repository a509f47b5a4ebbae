"""The site is built strictly, is whole, and asks nothing of the network.

`make docs` does the same build. A warning is an error: a broken link, a page
that no navigation shows, a picture that is not there.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOREIGN_STYLE = r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)"
FOREIGN_LINK = r"href=['\"](http[^'\"]+)"
COMMAND = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs"]


class Assets(HTMLParser):
    """What a browser fetches by itself when it shows a page; links are only followed by people."""

    FETCHED = {"src", "srcset", "data", "poster"}

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            fetched = name in self.FETCHED or (tag == "link" and name == "href")
            if value and (fetched or (name == "style" and "url(" in value)):
                self.found.append(value)


def test_the_site_is_whole_and_needs_no_network(tmp_path):
    """One test, because the build is what takes its time."""
    site = tmp_path / "html"
    command = [*COMMAND, "-d", str(tmp_path / "doctrees"), ".", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr

    pages = {path.relative_to(ROOT).with_suffix(".html") for path in DOCS.rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert set() == pages - built
    assert "docs/index.html" in (site / "index.html").read_text()

    assert [] == [each for path in site.rglob("*.html") for each in foreign_or_missing(path)]
    assert [] == [
        each for path in site.rglob("*.css") for each in re.findall(FOREIGN_STYLE, path.read_text())
    ]
    assert [] == [each for path in site.rglob("*.svg") for each in re.findall(FOREIGN_LINK, path.read_text())]

    index = (site / "searchindex.js").read_text()
    assert all(word in index for word in ("docs/patterns/bucket", "docs/limits"))
    assert "prefers-color-scheme:dark" in (site / "_static" / "styles" / "furo.css").read_text()


def foreign_or_missing(page: Path) -> list[tuple[str, str]]:
    """What a page would fetch from elsewhere, and what is not where it looks for it."""
    assets = Assets()
    assets.feed(page.read_text())
    return [
        (page.name, each)
        for each in assets.found
        if re.match(r"(https?:)?//", each)
        or not (re.match(r"data:|#", each) or (page.parent / re.split(r"[?#]", each)[0]).exists())
    ]


def test_the_picture_says_in_words_what_it_shows():
    picture = (DOCS / "images" / "choosing.svg").read_text()
    description = re.search(r"<desc[^>]*>(.+?)</desc>", picture, re.DOTALL)[1]
    assert "<title" in picture
    assert "prefers-color-scheme: dark" in picture
    drawn = re.findall(r'<text class="name"[^>]*>([^<]+)</text>', picture)
    assert {"Extended Reference", "Rollup", "Outlier", "Tree"} < set(drawn)
    assert [] == [name for name in drawn if name.lower() not in description.lower()]


def test_the_command_line_reference_is_what_the_command_line_says():
    """Run python docs/write_cli_reference.py after a change of the command line."""
    path = DOCS / "write_cli_reference.py"
    specification = importlib.util.spec_from_file_location("write_cli_reference", path)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text(), f"out of date; run python {path.relative_to(ROOT)}"
