"""A job page or timeline whose run has a new attempt, or continued while the socket was closed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page, Route, WebSocketRoute, expect

from tests.support.browser import call_module, open_blank_page, wait_for_requests
from tests.support.processes import wait_until
from tests.support.telemetry import build_batch

PAGE = """
<main id="main"><ol id="states"></ol><p id="nothing"></p><div id="notice"></div><div id="gap"></div>
<span id="status"></span><span id="connection"></span><form id="cancel-form"></form><form id="requeue-form"></form>
<dialog id="cancel-dialog"><button id="keep"></button><button class="danger"></button></dialog>
<dl id="figures"></dl>
<b id="figure-step"></b><progress id="progress"></progress><b id="figure-rate"></b><b id="figure-step-time"></b>
<b id="figure-left-name"></b><b id="figure-left"></b><b id="figure-loss"></b><b id="figure-eval"></b>
<b id="figure-phase"></b><b id="figure-spread"></b><b id="figure-rate-note"></b>
<section id="hosts"><table><tbody id="host-rows"></tbody></table><div data-crossing></div>
<table><tbody id="crossing-rows"></tbody></table></section></main><script id="job" type="application/json">JOB</script>
"""
TIMELINE = '<span id="connection"></span><script id="job" type="application/json">JOB</script>'
JOB: dict[str, Any] = {
    "id": "j", "attempt": 1, "status": "running", "finished": False, "members": [], "world_size": 1, "engine": "hosts",
    "history": [], "exit": None, "estimate": {}, "diagnosis": None, "wait_reason": "",
    "spec": {"train": {"steps": 1000}, "resources": {"device": "cpu"}, "layout": {}},
}  # fmt: skip
EMPTY: dict[str, Any] = {
    "attempt": 1, "time": None, "lost": False, "followed": [], "ranks": [], "cells": {"keys": []},
    "exact": {"keys": []}, "parts": {"rank": []}, "stride": 1, "curve": {}, "marks": {}, "starts": [],
    "traffic": {"length": 0}, "recent": {}, "gauges": {}, "logs": {}, "verdicts": {}, "peaks": {}, "memory": {},
    "dry_runs": [], "standing": [], "processes": [], "checkpoints": [], "proof": None, "progress": None,
    "step_times": [],
}  # fmt: skip


class Board:
    """The responses to a page. `history` is the snapshot, or None."""

    def __init__(self, page: Page) -> None:
        self.page, self.sockets = page, list[WebSocketRoute]()
        self.history: dict[str, Any] | None = None
        page.route("**/history/snapshot/**", self._snapshot)
        page.route_web_socket("**/ws/jobs/**", lambda socket: self.sockets.append(socket))

    def _snapshot(self, route: Route) -> None:
        route.fulfill(status=204) if self.history is None else route.fulfill(body=json.dumps(self.history))

    def connected(self, times: int) -> WebSocketRoute:
        # Playwright handles requests of the page only during a call.
        wait_until(lambda: self.page.evaluate("true") and len(self.sockets) >= times, f"connection {times}")
        return self.sockets[times - 1]

    def tell(self, times: int, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.connected(times).send(msgpack.packb(message))


def kept(step: int) -> dict[str, Any]:
    """Return a snapshot of a number of steps."""
    shown = {"step": step, "steps": 1000, "step_s": 0.1, "tokens": 8, "time": 5.0, "rate": 80.0}
    followed = [{"node": 0, "after": f"{step}-0", "time": 5.0, "host": "anna", "lost": False}]
    return {**EMPTY, "time": 5.0, "progress": shown, "followed": followed}


def steps(*numbers: int) -> dict[str, Any]:
    shown = {"kind": "step", "rank": 0, "time": 2.0, "steps": 1000, "step_s": 0.1, "tokens": 8, "loss": 4.0}
    shown |= {"grad_norm": 1.0, "learning_rate": 0.1, "cells": []}
    entries = [[f"{step}-0", msgpack.packb(build_batch(2.0, {**shown, "step": step, "ran": step}))] for step in numbers]
    return {"node": 0, "entries": entries}


@contextlib.contextmanager
def opened(modules: Page) -> Iterator[Board]:
    with open_blank_page(modules, PAGE.replace("JOB", json.dumps(JOB))) as page:
        board = Board(page)
        call_module(page, "job/page.js", "")
        board.tell(1, {"job": JOB}, steps(399, 400))
        expect(page.locator("#figure-step")).to_have_text("400 of 1,000")
        yield board


@pytest.mark.extended
def test_new_attempt_resets_the_page(modules: Page) -> None:
    with opened(modules) as board:
        board.page.evaluate("history.replaceState(null, '', '?from=1&to=2&at=1.5&tab=2#hosts')")
        with board.page.expect_event("load"):
            board.tell(1, {"job": {**JOB, "attempt": 2, "status": "queued"}})
        assert board.page.locator("#figure-step").text_content() == ""
        assert board.page.url.endswith("/paper.html?tab=2#hosts"), "the stretch was one of the attempt before"


ENDED = {**JOB, "status": "succeeded", "finished": True}


MEANWHILE = [[{"job": ENDED}], [{"job": JOB}, {"node": 0, "gap": {"after": "400-0", "first": "900-0"}}]]


@pytest.mark.parametrize("shown", MEANWHILE)
def test_reconnected_page_shows_the_missed_data(modules: Page, shown: list[dict[str, Any]]) -> None:
    """The stream expired or was trimmed."""
    with opened(modules) as board:
        board.history = kept(1000)
        board.sockets[0].close(code=1013)
        board.tell(2, *shown)
        expect(board.page.locator("#figure-step")).to_have_text("1,000 of 1,000")
        assert "after=0%3A1000-0" in board.connected(3).url, "the stream continues after the history"
        expect(board.page.locator("#gap")).to_be_hidden()
        board.tell(3, *shown)
        board.tell(3, steps(1001))
        expect(board.page.locator("#figure-step")).to_have_text("1,001 of 1,000")
        assert len(board.sockets) == 3, "the first message does not mean a second connection"


@pytest.mark.extended
def test_page_keeps_its_data_if_the_history_fails(modules: Page) -> None:
    with opened(modules) as board:
        board.page.route("**/history/snapshot/**", lambda route: route.abort())
        board.sockets[0].close(code=1013)
        board.tell(2, {"job": ENDED})
        assert "after=0%3A400-0" in board.connected(3).url
        expect(board.page.locator("#figure-step")).to_have_text("400 of 1,000")


@pytest.mark.extended
@pytest.mark.parametrize("shown", MEANWHILE)
def test_reconnected_timeline_continues_after_the_history(modules: Page, shown: list[dict[str, Any]]) -> None:
    with open_blank_page(modules, TIMELINE.replace("JOB", json.dumps(JOB))) as page:
        board = Board(page)
        call_module(page, "timeline/page.js", "")
        board.tell(1, {"job": JOB}, steps(399, 400))
        board.history = kept(1000)
        board.sockets[0].close(code=1013)
        board.tell(2, *shown)
        assert "after=0%3A1000-0" in board.connected(3).url
        board.tell(3, *shown, steps(1001))
        board.sockets[2].close(code=1013)
        assert "after=0%3A1001-0" in board.connected(4).url, "the first message does not mean a second connection"


@pytest.mark.extended
def test_new_attempt_resets_the_timeline(modules: Page) -> None:
    with open_blank_page(modules, TIMELINE.replace("JOB", json.dumps(JOB))) as page:
        board = Board(page)
        call_module(page, "timeline/page.js", "")
        with page.expect_event("load"):
            board.tell(1, {"job": {**JOB, "attempt": 2, "status": "queued"}})


@pytest.mark.extended
def test_timeline_shows_its_connection(modules: Page) -> None:
    with open_blank_page(modules, TIMELINE.replace("JOB", json.dumps(JOB))) as page:
        board, badge = Board(page), page.locator("#connection")
        call_module(page, "timeline/page.js", "")
        board.tell(1, {"job": JOB})
        expect(badge).to_have_text("live")
        board.tell(1, {"node": 0, "stale": True})
        expect(badge).to_have_text("delayed: no connection to Redis, training continues")
        expect(badge).to_have_attribute("data-tone", "warn")
        board.tell(1, {"job": ENDED}, {"node": 0, "stale": False})
        expect(badge).to_be_hidden()
        board.sockets[0].close(code=4403)
        expect(badge).to_have_text("not allowed: reload the page")


@pytest.mark.extended
@pytest.mark.parametrize(("module", "elements"), [("job/page.js", PAGE), ("timeline/page.js", TIMELINE)])
def test_outdated_page_asks_for_a_reload(modules: Page, module: str, elements: str) -> None:
    newer = msgpack.packb({**build_batch(2.0), "v": 2})
    with open_blank_page(modules, elements.replace("JOB", json.dumps(JOB))) as page:
        board, badge = Board(page), page.locator("#connection")
        call_module(page, module, "")
        board.tell(1, {"job": JOB}, {"node": 0, "entries": [["1-0", newer], ["2-0", newer]]})
        expect(badge).to_have_text("outdated page: reload it")
        expect(badge).to_have_attribute("data-tone", "bad")
        page.evaluate("dispatchEvent(new Event('online'))")
        assert len(board.sockets) == 1, "a new connection would give the same response"


@pytest.mark.extended
def test_heatmap_shows_loading_until_the_history_arrives(modules: Page) -> None:
    held: list[Route] = []
    panel = render_to_string("jobs/panels/heat-time.html")
    ended = {**JOB, "status": "succeeded", "finished": True}
    with open_blank_page(modules, PAGE.replace("JOB", json.dumps(ended)) + panel) as page:
        page.route("**/history/snapshot/**", lambda route: held.append(route))
        page.evaluate("void import('/js/job/page.js')")
        wait_for_requests(page, held, 1)
        empty = page.locator("#heat-time [data-empty]")
        expect(empty).to_have_text("Loading\u2026")
        held[0].fulfill(status=204)
        expect(empty).to_have_text("The run ended without a collective.")


@pytest.mark.extended
def test_silent_connection_counts_as_lost(modules: Page) -> None:
    with open_blank_page(modules, PAGE.replace("JOB", json.dumps(JOB))) as page:
        page.clock.install()
        board = Board(page)
        call_module(page, "job/page.js", "")
        board.tell(1, {"job": JOB})
        expect(page.locator("#connection")).to_have_text("live")
        page.clock.fast_forward(15_000)
        board.tell(1, {"beat": True}, steps(7))
        expect(page.locator("#figure-step")).to_have_text("7 of 1,000")
        page.clock.fast_forward(15_000)
        expect(page.locator("#connection")).to_have_text("live")
        page.clock.fast_forward(6_000)
        expect(page.locator("#connection")).to_have_text("reconnecting")
        page.clock.fast_forward(1_000)
        assert board.connected(2)
