"""The site is built strictly, is whole, and asks nothing of the network.

`make docs` does the same build. A warning is an error: a broken link, a page
that no navigation shows, a picture that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

import treadle
from tests.advisor import chromium

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WAIT_MILLISECONDS = 40_000
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


@pytest.mark.all
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

    in_a_browser(site)


def in_a_browser(site: Path) -> None:
    """Blocks are copied without prompts and output; a search from the folder shows excerpts."""
    path, why = chromium.find()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(WAIT_MILLISECONDS)
        page.goto((site / "docs" / "tutorial.html").as_uri())
        block = page.locator("div.highlight", has_text="--dry-run").first
        block.hover()
        block.locator("button.copy").click()
        page.wait_for_selector("button.copy:has-text('Copied')")
        expected = "treadle setup --app shop:store --dry-run\ntreadle setup --app shop:store"
        assert expected == page.evaluate("navigator.clipboard.readText()")
        page.goto((site / "search.html").as_uri() + "?q=DBRef")
        excerpt = page.locator("#search-results li:has-text('Beside another ODM') p.context")
        expect(excerpt.first).to_contain_text("DBRef", timeout=WAIT_MILLISECONDS)
        browser.close()


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


def script(name: str) -> Any:
    """A module of docs/ that writes a page."""
    specification = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["write_cli_reference", "write_api_reference"])
def test_a_reference_is_what_the_library_says(name):
    """Run the script after a change of the command line, or of a signature or docstring."""
    writer = script(name)
    assert writer.page() == writer.PAGE.read_text(), f"out of date; run python docs/{name}.py"


def test_the_reference_has_every_public_name():
    headings = set(re.findall(r"^#{3,4} (\S+)$", (DOCS / "api-reference.md").read_text(), re.MULTILINE))
    assert set() == set(treadle.__all__) - headings
    calls = {f"Store.{name}" for name in dir(treadle.Store) if not name.startswith("_")}
    plain = {f"Store.{name}" for name in ("database", "graph", "write_path", "runner", "limits", "timeout")}
    assert set() == calls - headings - plain
