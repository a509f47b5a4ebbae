"""The dashboard over HTTP: pages, JSON, probes, who may look and who may act."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Annotated, Any

import pytest
from pymongo import MongoClient
from starlette.testclient import TestClient

from tests.upkeep.marketplace import wait_for, working
from tests.web import shop
from treadle import Count, Document, Id, Store
from treadle.web.access import BODY_BYTES_MAX, FAILURES_MAX
from treadle.web.application import create

TOKEN = "a token that is long enough"
PAGES = ["/", "/rules/Product.review_count", "/set-aside", "/verify", "/jobs"]
OWN = {"Origin": "http://localhost", "Accept": "text/html"}


def read(web: TestClient) -> None:
    """Let the board read once more."""
    board = web.app.state.dashboard.board
    web.portal.call(board.read)


@pytest.fixture
def store(database) -> Store:
    store = Store(database, shop.MODELS)
    shop.fill(store, database)
    return store


@pytest.fixture
def serve(store) -> Generator[Any]:
    opened: list[TestClient] = []

    def start(**options: Any) -> TestClient:
        web = TestClient(
            create(store, interval=600, **options), base_url="http://localhost", follow_redirects=False
        )
        web.__enter__()
        opened.append(web)
        read(web)
        return web

    yield start
    for web in opened:
        web.__exit__(None, None, None)


@pytest.fixture
def web(serve) -> TestClient:
    return serve()


def page_token(web: TestClient, path: str = "/rules/Product.review_count") -> str:
    found = re.search(r'name="csrf" value="(\w+)"', web.get(path, headers=OWN).text)
    assert found is not None
    return found[1]


def key_of_the_wrong_value(web: TestClient) -> str:
    text = web.get("/verify", headers=OWN).text
    return re.search(r'href="/verify/(\w+)">reviews_hourly<', text)[1]


def post(web: TestClient, path: str, **form: str) -> Any:
    return web.post(path, data={"csrf": page_token(web), **form}, headers=OWN)


# -- what it shows ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_page_answers_needs_nothing_from_elsewhere_and_forbids_everything_else(web):
    for path in PAGES:
        reply = web.get(path, headers=OWN)
        assert 200 == reply.status_code, path
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "nosniff" == reply.headers["x-content-type-options"]
        assert not re.search(r"(src|href)=.?(https?:)?//|style=|<style|onclick|javascript:", reply.text), path
    for path in ("/static/style.css", "/static/live.js", "/static/icon.svg"):
        text = web.get(path).text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path


def test_hostile_names_are_inert(web, database):
    key = {"rule": shop.HOSTILE, "collection": shop.HOSTILE, "key": shop.HOSTILE}
    database["treadle.set_aside"].insert_one({"_id": key, "reason": shop.HOSTILE})
    read(web)
    for path in PAGES:
        text = web.get(path, headers=OWN).text
        assert "<script>alert" not in text, path
    assert "&lt;script&gt;alert" in web.get("/set-aside", headers=OWN).text
    assert "&lt;script&gt;alert" in web.get("/", headers=OWN).text


def test_the_graph_leads_to_each_rule_and_shows_the_worst(web, store):
    text = web.get("/", headers=OWN).text
    for rule in store.status().rules:
        assert f'href="/rules/{rule.rule}"' in text
        assert 200 == web.get(f"/rules/{rule.rule}", headers=OWN).status_code
    assert 'class="row warning" aria-label="Rule Product.reviews_hourly: warning"' in text


def test_json_says_what_the_store_says(web, store):
    status = web.get("/api/status").json()
    assert (True, None, 1) == (status["ok"], status["error"], status["set_aside"])
    assert len(store.findings()) == status["findings"]
    rules = {each["rule"]: each for each in web.get("/api/rules").json()["rules"]}
    assert {each.rule for each in store.status().rules} == set(rules)
    count = rules["Product.review_count"]
    assert ("stream", "behind", 0) == (count["mode"], count["state"], count["lag_events"])
    assert {"lag_seconds", "headroom"} <= set(count)
    (aside,) = web.get("/api/set-aside").json()["set_aside"]
    assert ("products", 1) == (aside["collection"], min(1, aside["attempts"]))
    found = web.get("/api/findings").json()["findings"]
    assert "Product.reviews_hourly" in {each["rule"] for each in found}
    assert "verify" == web.get("/api/jobs").json()["jobs"][0]["kind"]


def test_values_are_shown_only_if_asked_for(serve):
    path = "/verify/" + key_of_the_wrong_value(serve())
    hidden, shown = serve().get(path, headers=OWN).text, serve(show_values=True).get(path, headers=OWN).text
    assert ("--show-values" in hidden, "<pre>" in hidden) == (True, False)
    assert "<pre>77</pre>" in shown


def test_it_is_ready_only_while_somebody_leads_and_nothing_is_paused(web, store):
    assert 200 == web.get("/healthz").status_code
    reply = web.get("/readyz")
    assert (503, ["No worker leads; start treadle watch."]) == (reply.status_code, reply.json()["reasons"])
    worker = store.worker()
    with working(worker):
        wait_for(lambda: worker.leading)
        wait_for(lambda: read(web) or web.get("/readyz").status_code == 200)
        store.pause("Product.review_count")
        paused = ["Product.review_count is paused."]
        wait_for(lambda: read(web) or web.get("/readyz").json()["reasons"] == paused)
        store.resume("Product.review_count")
        wait_for(lambda: read(web) or web.get("/readyz").status_code == 200)
        text = web.get("/", headers=OWN).text
        assert worker._follower.lease.owner in text


def test_metrics_are_for_prometheus(web):
    text = web.get("/metrics").text
    assert 'treadle_rule_state{maintain="stream",pattern="computed",rule="Product.review_count"' in text
    assert "treadle_set_aside 1.0" in text


def test_however_many_look_the_database_is_read_once(web):
    """Pages, JSON and probes come from the last reading."""
    board = web.app.state.dashboard.board
    before = board.readings
    for _ in range(20):
        for path in [*PAGES, "/api/status", "/readyz", "/metrics"]:
            web.get(path, headers=OWN)
    assert before + 1 >= board.readings  # One more, because somebody began to look.


def test_a_database_that_is_away_is_said_and_comes_back(web, database):
    board = web.app.state.dashboard.board
    store = board.store
    with MongoClient("mongodb://somebody:secret@127.0.0.1:9/?serverSelectionTimeoutMS=50") as away:
        board.store = Store(away["shop"], shop.MODELS)
        read(web)
        text = web.get("/", headers=OWN).text
        assert "The database does not answer" in text
        assert "Product.review_count" in text  # What was known last is still there.
        for path in [*PAGES, "/api/status", "/metrics"]:
            assert "secret" not in web.get(path, headers=OWN).text
        assert 503 == web.get("/readyz").status_code
        assert 200 == web.get("/healthz").status_code
        failed = post(web, "/actions/pause", rule="Product.review_count")
        assert (503, True) == (failed.status_code, "try again" in failed.text)
    board.store = store
    # A reading of before may still be under way.
    wait_for(lambda: read(web) or "does not answer" not in web.get("/", headers=OWN).text)


# -- what it does ---------------------------------------------------------------------------------------


def test_a_rule_is_paused_and_resumed(web, store):
    done = post(web, "/actions/pause", rule="Product.review_count")
    assert (303, "/rules/Product.review_count") == (done.status_code, done.headers["location"])
    wait_for(lambda: read(web) or "Resume" in web.get("/rules/Product.review_count", headers=OWN).text)
    post(web, "/actions/resume", rule="Product.review_count")
    assert "paused" not in {each.state for each in store.status().rules}


def test_what_was_set_aside_is_retried_and_discarded(web, store, database):
    (item,) = store.set_aside()
    assert 303 == post(web, "/actions/set-aside/retry", name=item.token).status_code
    assert 1 == len(store.set_aside())
    shop.refuse(database, False)
    post(web, "/actions/set-aside/retry", rule=item.rule)
    assert [] == store.set_aside()
    assert 404 == post(web, "/actions/set-aside/discard", name=item.token).status_code


def test_a_finding_is_repaired(web, store):
    path = key_of_the_wrong_value(web)
    assert 303 == post(web, f"/actions/repair/{path}").status_code
    assert 77 not in [each.stored for each in store.verify()]
    assert 404 == post(web, "/actions/repair/0123456789abcdef").status_code


def test_a_verify_is_started_with_its_pace(web, store):
    started = post(web, "/actions/start/verify", model="Product", sample="0.5", throttle="1000")
    assert 303 == started.status_code
    wait_for(lambda: store.jobs()[0].models == ("Product",) and store.jobs()[0].state == "done")
    assert 1000 == store.jobs()[0].throttle
    assert 400 == post(web, "/actions/start/verify", sample="many").status_code
    assert 404 == post(web, "/actions/start/verify", model="Nobody").status_code
    assert 404 == post(web, "/actions/start/close").status_code


def test_a_job_is_controlled(web, store, database):
    job = store.jobs()[0]
    assert 303 == post(web, f"/actions/job/{job.id}", asked="pause", throttle="gentle").status_code
    assert "gentle" == database["treadle.jobs"].find_one({"kind": "verify"})["throttle"]
    assert 404 == post(web, "/actions/job/nothing", asked="pause").status_code
    assert 400 == post(web, f"/actions/job/{job.id}", asked="explode").status_code


# -- who may ---------------------------------------------------------------------------------------------


def test_an_action_needs_the_token_of_the_page_and_an_origin_of_its_own(web, store):
    token, address = page_token(web), "/actions/pause"
    form = {"csrf": token, "rule": "Product.review_count"}
    foreign = {**OWN, "Origin": "http://evil.example"}
    missing = {"Accept": "text/html"}
    for headers in (foreign, missing, {**OWN, "Origin": "null"}):
        assert 403 == web.post(address, data=form, headers=headers).status_code
    assert 403 == web.post(address, data={**form, "csrf": "0" * 64}, headers=OWN).status_code
    assert 405 == web.get(address, headers=OWN).status_code
    assert "paused" not in {each.state for each in store.status().rules}


def test_a_read_only_server_has_no_actions(serve, store):
    web = serve(read_only=True)
    for path in PAGES:
        assert "<form" not in web.get(path, headers=OWN).text, path
    refused = web.post("/actions/pause", data={"rule": "Product.review_count"}, headers=OWN)
    assert (403, True) == (refused.status_code, "read-only" in refused.text)


def test_bad_requests_get_a_sentence(web):
    missing = web.get("/rules/Product.nothing", headers=OWN)
    assert (404, True) == (missing.status_code, "There is no rule" in missing.text)
    assert {"error": "There is no such page."} == web.get("/api/nothing").json()
    large = web.post("/actions/pause", content=b"x" * (BODY_BYTES_MAX + 1), headers=OWN)
    assert (413, True) == (large.status_code, "too large" in large.text)

    def chunks() -> Generator[bytes]:
        for _ in range(80):
            yield b"x" * 1024

    assert 413 == web.post("/actions/pause", content=chunks(), headers=OWN).status_code
    assert 404 == post(web, "/actions/pause", rule="Product.nothing").status_code
    assert 400 == web.get("/", headers={**OWN, "Host": "evil.example"}).status_code


def test_an_error_of_the_dashboard_shows_no_traceback(web, caplog, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("mongodb://somebody:secret@host/ failed")

    monkeypatch.setattr("treadle.web.pages.draw_graph", fail)
    reply = web.get("/", headers=OWN)
    assert 500 == reply.status_code
    assert "Traceback" not in reply.text
    assert "secret" not in reply.text + caplog.text
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_with_a_token_nothing_is_shown_without_it(serve):
    web = serve(token=TOKEN)
    for path in [*PAGES, "/api/status", "/metrics", "/events"]:
        assert 401 == web.get(path).status_code, path
    assert [200, 503] == [web.get(path).status_code for path in ("/healthz", "/readyz")]
    assert 200 == web.get("/api/status", headers={"Authorization": f"Bearer {TOKEN}"}).status_code
    login = web.post("/login", data={"token": TOKEN}, headers=OWN)
    cookie = login.headers["set-cookie"]
    assert 303 == login.status_code
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert 200 == web.get("/", headers=OWN).status_code
    assert 303 == post(web, "/actions/pause", rule="Product.review_count").status_code
    web.cookies.set("treadle_session", "9999999999.0")
    assert 401 == web.get("/api/status").status_code


def test_wrong_tokens_are_refused_and_then_not_listened_to(serve):
    web = serve(token=TOKEN)
    for _ in range(FAILURES_MAX):
        assert 401 == web.post("/login", data={"token": "wrong"}, headers=OWN).status_code
    late = web.post("/login", data={"token": TOKEN}, headers=OWN)
    assert 429 == late.status_code
    assert 0 < int(late.headers["retry-after"]) <= 61


def test_pages_that_are_open_hear_of_new_figures(web):
    board = web.app.state.dashboard.board
    with web.stream("GET", "/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert "retry: 3000" == next(lines)
        number = board.figures.number
        web.portal.start_task_soon(board.read)
        # Now and then a comment comes instead.
        told = next(line for line in lines if line.startswith("data: "))
        assert int(told.removeprefix("data: ")) > number


def test_json_is_made_once_per_reading(web):
    board = web.app.state.dashboard.board
    assert board.json("status") is board.json("status")
    assert json.loads(board.json("status"))["ok"]


class Opinion(Document, collection="opinions"):
    shelf_id: Id
    rating: int


def shelf(declared: Any) -> Any:
    body = {"__annotations__": {"opinions": Annotated[int, declared]}, "opinions": 0, "__module__": __name__}
    return type(Document)("Shelf", (Document,), body, collection="shelves")


def test_a_changed_declaration_asks_for_a_rebuild(database):
    former, changed = (shelf(Count(Opinion, by="shelf_id", where=where)) for where in (None, {"rating": 3}))
    store = Store(database, [Opinion, former])
    store.setup()
    store.insert(former())
    store = Store(database, [Opinion, changed])
    store.setup()
    with TestClient(create(store, interval=600), base_url="http://localhost", follow_redirects=False) as web:
        read(web)
        assert "rebuild needed" in web.get("/", headers=OWN).text
        assert "Its declaration has changed" in web.get("/rules/Shelf.opinions", headers=OWN).text
        form = {"csrf": page_token(web, "/jobs"), "model": "Shelf"}
        assert 303 == web.post("/actions/start/rebuild", data=form, headers=OWN).status_code
        wait_for(lambda: read(web) or "rebuild needed" not in web.get("/", headers=OWN).text)
