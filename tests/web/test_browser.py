"""The dashboard in a real browser, against a real `treadle serve` and a worker that runs.

Where there is no Chromium and none can be installed, the test says so; in CI
that is a failure. With TREADLE_SCREENSHOTS the pictures of the documentation
are taken into that folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.advisor import chromium
from tests.cli.invoke import start
from tests.upkeep.marketplace import wait_for, working
from tests.web import shop
from treadle import Store

WAIT_MILLISECONDS = 40_000
SCREENSHOTS = os.environ.get("TREADLE_SCREENSHOTS")
APPLICATION = """
from pymongo import MongoClient
from tests.web.shop import MODELS
from treadle import Store
store = Store(MongoClient({uri!r})[{name!r}], MODELS)
"""


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    path, why = chromium.find()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def store(database) -> Store:
    store = Store(database, shop.MODELS)
    store.keys = shop.fill(store, database)  # type: ignore[attr-defined]
    return store


@pytest.fixture
def serve(server, database, store, tmp_path: Path) -> Generator[Any]:
    (tmp_path / "application.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    root = str(Path(__file__).parents[2])
    with contextlib.ExitStack() as stack:

        def started(*arguments: str) -> str:
            options = ("--app", "application:store", "--port", "0", "--interval", "0.2", *arguments)
            process = stack.enter_context(start("serve", *options, folder=tmp_path, PYTHONPATH=root))
            stack.callback(end, process)
            line = process.stderr.readline()
            return re.search(r"http://\S+/", line)[0]

        yield started


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=90)


@pytest.fixture
def page(browser) -> Generator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(WAIT_MILLISECONDS)
    expect.set_options(timeout=WAIT_MILLISECONDS)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    # A content security policy that is broken says so here.
    assert [] == errors


def picture(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=str(Path(SCREENSHOTS) / f"dashboard-{name}.png"), full_page=True)


@pytest.mark.all
@pytest.mark.heavy
def test_an_operator_follows_the_graph_pauses_a_rule_and_sees_it_catch_up(serve, page, store, database):
    worker = store.worker()
    with working(worker):
        address = serve("--show-values")
        page.goto(address)
        expect(page.locator("#worker dd .mono").first).to_contain_text(":")
        expect(page.locator("#rules tbody tr").first).to_be_visible()
        picture(page, "overview")
        # To the rule by keyboard alone.
        link = page.get_by_role("link", name=re.compile("^Rule Product.review_count"))
        link.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Product.review_count")
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#state .badge").first).to_have_text("paused")
        database["reviews"].insert_many([{"product_id": store.keys[1], "rating": 4} for _ in range(7)])
        # No reload: the figures come by themselves.
        expect(page.locator("#events")).to_have_text("7")
        expect(page.locator("#behind")).not_to_have_text("0.0 s")
        picture(page, "rule")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#events")).to_have_text("0")
        expect(page.locator("#state .badge").first).not_to_have_text("paused")
        wait_for(lambda: database["products"].find_one({"_id": store.keys[1]})["review_count"] == 10)


@pytest.mark.all
@pytest.mark.heavy
def test_an_operator_retries_what_was_set_aside_and_repairs_a_finding(serve, page, store, database):
    address = serve("--show-values")
    page.goto(address + "set-aside")
    expect(page.locator("tbody tr")).to_have_count(1)
    picture(page, "set-aside")
    shop.refuse(database, False)
    page.get_by_role("button", name=f"Retry {store.keys[3]}").click()
    expect(page.get_by_text("Nothing is set aside.")).to_be_visible()
    page.goto(address + "verify")
    page.get_by_role("link", name="reviews_hourly").first.click()
    expect(page.get_by_role("heading", name="Expected")).to_be_visible()
    picture(page, "finding")
    page.get_by_role("button", name="Repair this document").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Verify")
    assert 3 == database["products"].find_one({"_id": store.keys[0]})["reviews_hourly"]
    page.get_by_role("combobox", name="Model").select_option("Product")
    page.get_by_role("button", name="Verify", exact=True).click()
    page.goto(address + "jobs")
    expect(page.locator("#jobs tbody tr")).not_to_have_count(0)
    expect(page.locator("#jobs tbody tr").first).to_contain_text("done")
    picture(page, "jobs")


@pytest.mark.all
@pytest.mark.heavy
def test_it_is_dark_narrow_and_usable_without_javascript(serve, browser, store, page):
    address = serve("--read-only")
    for name, options in (
        ("dark", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}}),
        ("phone", {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}),
        ("plain", {"java_script_enabled": False}),
    ):
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT_MILLISECONDS)
        shown = context.new_page()
        for path in ("", "rules/Product.review_count", "set-aside", "verify", "jobs"):
            shown.goto(address + path)
            expect(shown.get_by_role("heading", level=1)).to_be_visible()
            width = options.get("viewport", {}).get("width")
            if name == "phone":
                # Only tables and the graph scroll sideways, in their own boxes.
                assert width >= shown.evaluate("document.documentElement.scrollWidth"), path
            if name == "dark":
                background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
                assert "rgb(21, 24, 28)" == background
        shown.goto(address)
        picture(shown, name)
        context.close()
    page.goto(address)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()
