"""The HTML report in a real Chromium: it asks for nothing, runs nothing foreign, and shows everything."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.advisor import chromium
from tests.advisor.symptoms import CASES
from treadle.advisor import Report, scan
from treadle.advisor.facts import CollectionFacts, Distribution, Relation, Scan
from treadle.advisor.html import html
from treadle.advisor.pictures import graph

HOSTILE = "<script>window.hacked=1</script>"
IMAGE = '"><img src=x onerror="window.hacked=1">'


@pytest.fixture
def report(database: Any) -> Report:
    """A database with findings, references, orphans, and names that would like to be code."""
    for code in ("outlier", "tree", "normalised-everything", "subset"):
        CASES[code].symptom(database)
    database[HOSTILE].insert_many(
        [
            {HOSTILE: [1] * n, IMAGE: {HOSTILE: "x"}, "\u202ebidi\x07": n if n % 2 else "n", "]]>": 1}
            for n in range(120)
        ]
    )
    database["javascript:window.hacked=1"].insert_one({"a": 1})
    database["order_lines"].insert_one({"_id": "o", "order_id": 99_999, "product_id": 5, "quantity": 1})
    return scan(database)


@pytest.fixture
def page(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of a fresh Chromium, with what it asked for and complained about noted."""
    path, why = chromium.find()
    if path is None:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stdout.write(f"\nNOT RUN: the HTML report was not opened in a browser: {why}\n")
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=path, args=chromium.ARGUMENTS, headless=True
        )
        opened = context.new_page()
        opened.complaints = []
        opened.requests = []
        opened.on("console", lambda message: opened.complaints.append(message.text))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on("dialog", lambda dialog: opened.complaints.append("a dialog"))
        opened.on("request", lambda asked: opened.requests.append(asked.url))
        yield opened
        context.close()


@pytest.mark.all
def test_the_report_in_a_browser(report: Report, page: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html(report), encoding="utf-8")
    page.goto(file.as_uri())
    page.wait_for_timeout(200)
    assert [] == page.complaints
    assert [file.as_uri()] == page.requests
    assert page.evaluate("window.hacked") is None
    assert 1 == page.locator("script").count()
    assert 0 == page.locator("img, iframe, link, object, embed, a[href]").count()

    facts = report.scan.collections.values()
    charts = sum(each.sizes is not None and each.sizes.count > 0 for each in facts)
    charts += sum(
        field.lengths is not None and field.lengths.count > 0
        for each in facts
        for field in each.fields.values()
    )
    assert charts == page.locator("svg.chart").count() > 8
    assert 1 == page.locator("svg.graph").count()
    assert len(report.scan.collections) == page.locator("svg.graph g.node").count()
    assert len(report.scan.relations) == page.locator("svg.graph path.line, svg.graph path.broken").count()
    assert 1 <= page.locator("svg.graph path.broken").count()
    # Every picture has a title, a description and its data.
    for picture in page.locator("svg").all():
        assert picture.locator("> title").text_content()
        assert picture.locator("> desc").text_content()
        assert 1 == picture.locator("xpath=following-sibling::details//table").count()
    assert 1 <= page.locator("svg.chart rect.tail").count()
    assert len(report.findings) == page.locator("article").count()
    shown = page.locator("article code").all_text_contents()
    assert [each.declaration.rstrip("\n") for each in report.findings] == shown
    assert page.locator("body").get_by_text(HOSTILE, exact=False).count() > 0


@pytest.mark.all
def test_copying_both_schemes_and_printing(report: Report, page: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html(report), encoding="utf-8")
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(file.as_uri())
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        ink, paper = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert contrast(ink, paper) > 10
    assert 2 == len(colours)
    button = page.locator("article button").first
    button.click()
    page.wait_for_timeout(100)
    assert button.text_content() in ("Copied", "Selected")
    # Nothing is wider than the window, on a telephone either.
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # Nor is anything squeezed there: names stand above what they name, and the graph keeps its size.
    assert 150 < page.locator("dd").first.bounding_box()["width"]
    assert 300 < page.locator("svg.graph").bounding_box()["width"]
    page.emulate_media(media="print", color_scheme="dark")
    assert contrast(page.evaluate("getComputedStyle(document.body).color"), "rgb(255, 255, 255)") > 10
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert 0 == page.locator("details:not([open])").count()
    assert page.pdf().startswith(b"%PDF")
    assert [] == page.complaints


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two CSS colours, as the accessibility guidelines define it."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def related(names: int) -> Scan:
    """A database whose collections all refer to each other."""
    collections = {f"c{n}": CollectionFacts(f"c{n}", count=n) for n in range(names)}
    relations = tuple(
        Relation(one, f"{other}_id", other, "_id", False, 9, Distribution((), 0.0), 9, 0, 0, 9)
        for one in collections
        for other in collections
        if one != other
    )
    return Scan("knot", (6, 0), collections, relations, names=tuple(collections))


def test_a_knot_of_references_is_drawn_at_once() -> None:
    """Where everything refers to everything there are more ways than anyone could follow."""
    began = time.process_time()
    drawn = graph(related(30), {})
    assert time.process_time() - began < 30
    assert 30 == drawn.count('<g class="node')
    assert 30 * 29 == drawn.count('marker-end="url(#tip)"')


def test_of_many_collections_those_with_references_are_drawn() -> None:
    knot = related(5)
    alone = {f"big{n}": CollectionFacts(f"big{n}", count=10**6) for n in range(200)}
    scan = dataclasses.replace(knot, collections={**alone, **knot.collections})
    drawn = graph(scan, {})
    assert all(f">c{n}</text>" in drawn for n in range(5))
    assert "165 more are not drawn" in drawn


def test_names_are_escaped_and_the_policy_allows_nothing(report: Report) -> None:
    """Also where there is no browser: nothing of the database becomes a tag or an attribute."""
    text = html(report)
    assert HOSTILE not in text
    assert IMAGE not in text
    assert "\u202e" not in text
    assert 1 == text.count("<script>")
    assert "default-src 'none'" in text
    assert not re.search(
        r"https?://|//[a-z]|url\(|@import|src=['\"]",
        re.sub(r"&[a-z#0-9]+;", "", text.replace("url(#tip)", "")).replace("src=x", ""),
    )
