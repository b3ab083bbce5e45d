"""The job page: its first screen, its tabs, the shared range of its charts, and the page after the end of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from contracts.names import telemetry_stream
from tests.e2e.slow_pages import assert_still, open_late
from tests.support.board import Board
from tests.support.browser import open_context, open_tab
from tests.support.processes import scale_timeout, wait_until

SPEC: dict[str, Any] = {
    "name": "kept open " + "w" * 60,
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 5000, "global_batch": 4, "seq_len": 64, "eval_every": 20, "checkpoint_every": 25},
}
BLOCKS = ("h1", "#status", "#tabs", "#health", "#figures", "#traffic", "#loss")
BOXES = """(names) => names.map((name) => {
  const { left, top, right, bottom } = document.querySelector(name).getBoundingClientRect();
  return [left, top, right, bottom];
})"""
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
BARS = """(parts) => ({
  bars: [...parts.querySelectorAll(".parts:not(.hidden-lane) > span:not([data-part=rest])")].map((bar) => [
    bar.title, bar.getBoundingClientRect().width, bar.closest(".step-row").dataset.side]),
  lane: parts.querySelector("[data-side=planned] .parts").getBoundingClientRect().width,
  totals: [...parts.querySelectorAll(".total")].map((total) => total.textContent),
})"""

DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
LONGEST = """(wrap) => {
  for (const cell of wrap.querySelectorAll("tbody td.number")) cell.textContent = "12,616,778,240 B";
  for (const cell of wrap.querySelectorAll("tbody td.number:last-child")) cell.textContent = "not compared";
  return wrap.scrollWidth;
}"""


@pytest.fixture(scope="module")
def watched(running_board: Board) -> Iterator[str]:
    """A run that continues during all tests of this module except the last ones."""
    job = running_board.submit(SPEC)
    running_board.wait_for_status(job, "running")
    for process in running_board.list_processes(job):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process, 15)  # leaves time for tests that run at the same time
    yield job
    if not running_board.get_job(job)["finished"]:
        running_board.call("POST", f"jobs/{job}/cancel")


@pytest.fixture
def tab(page: Page, running_board: Board, watched: str) -> Page:
    """The job page at 1440 x 900, after the first steps."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{running_board.url}/jobs/{watched}/")
    steps_told(page)
    return page


def steps_told(page: Page) -> None:
    page.wait_for_selector("#loss-chart[data-points]")
    page.wait_for_selector("#figure-off[data-tone]")


def box(locator: Locator) -> tuple[float, float, float, float]:
    # A running job redraws its figures, so an element may vanish before it is measured.
    found = wait_until(locator.bounding_box, f"{locator} has a place on the screen")
    assert found
    return found["x"], found["y"], found["x"] + found["width"], found["y"] + found["height"]


def window(page: Page, chart: str) -> list[float]:
    result = page.get_attribute(f"#{chart}-chart", "data-window")
    assert result
    return [float(part) for part in result.split()]


def test_first_screen_shows_status_figures_and_charts(tab: Page) -> None:
    boxes = dict(zip(BLOCKS, tab.evaluate(BOXES, BLOCKS), strict=True))  # all at once, because the run continues
    for name, (left, top, right, bottom) in boxes.items():
        assert left >= 0, name
        assert top >= 0, name
        assert right <= 1440, name
        assert bottom <= 900, name
    for one, other in itertools.combinations(BLOCKS[2:], 2):
        a, b = boxes[one], boxes[other]
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], f"{one} lies over {other}"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1440
    assert tab.evaluate("document.getElementById('tabs').scrollWidth <= document.getElementById('tabs').clientWidth")
    health = "document.getElementById('health')"
    assert tab.evaluate(f"{health}.scrollHeight <= {health}.clientHeight"), "the verdict is never cut"
    expect(tab.locator("#figure-spread")).to_contain_text(re.compile(r"median of \d+ steps, [\d.]+ .*to [\d.]+ "))
    open_tab(tab, "hosts")
    expect(tab.locator("#places [data-does]")).to_have_count(4)
    expect(tab.locator("#places [data-legend]")).to_contain_text("4 ")
    open_tab(tab, "time")
    for part in ("queue", "spawn", "import", "rendezvous"):
        expect(tab.locator("#start [data-figures]")).to_contain_text(part)


@pytest.mark.extended
def test_page_shows_one_step_time(tab: Page) -> None:
    expect(tab.locator("#figure-step-time")).to_contain_text(re.compile(r"\d ms"))
    tab.click("#tab-time")
    tab.wait_for_selector("#parts [data-side=measured] [data-part=compute]")
    names = ["#figure-step-time", "#parts [data-side=measured] .total"]
    texts = "(names) => names.map((name) => document.querySelector(name).textContent)"
    overview, breakdown = tab.evaluate(texts, names)  # both at once: the run continues
    assert breakdown.startswith(f"{overview} · ")


OPENED = {  # by the hash of an address: the tab, and a panel in sight
    "traffic": ("traffic", "#fidelity"),
    "proof": ("verification", "#proof"),
    "planned": ("memory", "#planned"),
    "logs": ("logs", "#logs"),
    "log-0-1": ("logs", "#logs"),
}


def test_address_opens_a_tab_or_a_panel(tab: Page) -> None:
    address = tab.url
    for name, (opened, panel) in OPENED.items():
        tab.goto("about:blank")
        tab.goto(f"{address}#{name}")
        expect(tab.locator(f"#tab-{opened}")).to_have_attribute("aria-selected", "true")
        expect(tab.locator(panel)).to_be_in_viewport()
    tab.evaluate("location.hash = 'advice'")
    expect(tab.locator("#tab-time")).to_have_attribute("aria-selected", "true")
    expect(tab.locator("#advice")).to_be_in_viewport()
    tab.locator("#tab-time").press("ArrowRight")
    expect(tab.locator("#tab-memory")).to_be_focused()
    assert tab.url.endswith("#memory")
    tab.mouse.wheel(0, 400)
    for selector in ("h1", "#status", "#tabs"):
        expect(tab.locator(selector)).to_be_in_viewport()


@pytest.mark.extended
def test_name_and_status_stay_visible_on_a_phone(tab: Page) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    for name in ("overview", "training", "traffic", "time", "memory", "verification", "logs", "hosts"):
        open_tab(tab, name)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, name
        tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        for selector in ("h1", "#status", f"#tab-{name}"):
            expect(tab.locator(selector)).to_be_in_viewport()


@pytest.mark.extended
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1100, 900), (820, 1180), (390, 844)])
def test_job_page_does_not_shift_while_it_loads(
    page: Page, running_board: Board, watched: str, width: int, height: int
) -> None:
    page.set_viewport_size({"width": width, "height": height})
    open_late(page, f"{running_board.url}/jobs/{watched}/")
    steps_told(page)
    expect(page.locator("#connection")).to_have_text("live")
    assert_still(page)


@pytest.mark.extended
def test_error_column_fits_on_a_phone(tab: Page) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    open_tab(tab, "memory")
    expect(tab.locator("#planned-rows td").first).to_be_visible()
    wrap = tab.locator("#planned .table-wrap")
    assert wrap.evaluate(LONGEST) == wrap.evaluate("(wrap) => wrap.clientWidth")


@pytest.mark.extended
def test_bars_match_their_figures(tab: Page) -> None:
    open_tab(tab, "time")
    tab.wait_for_selector("#parts [data-side=measured] [data-part=compute]")
    result = tab.eval_on_selector("#parts", BARS)  # all at once, because the run continues
    longest = max(seconds(total) for total in result["totals"])
    assert {side for _, _, side in result["bars"]} == {"planned", "measured"}
    for title, width, _ in result["bars"]:
        share = pytest.approx(seconds(title.split(": ")[1]) / longest, rel=0.02, abs=0.002)
        assert width / result["lane"] == share, title


def seconds(words: str) -> float:
    number, unit = re.findall(r"([\d.]+) (µs|ms|s)\b", words)[0]
    return float(number) * SECONDS[unit]


def test_drag_zooms_every_chart_and_the_address(tab: Page) -> None:
    wait_until(lambda: window(tab, "loss")[1] - window(tab, "loss")[0] > 3, "a stretch to zoom into", 60)
    tab.click("#pause")  # the charts stand still under the mouse
    left, top, right, bottom = box(tab.locator("#traffic-chart .u-over"))
    whole = window(tab, "loss")
    tab.mouse.move(left + 0.25 * (right - left), (top + bottom) / 2)
    tab.mouse.down()
    tab.mouse.move(left + 0.75 * (right - left), (top + bottom) / 2, steps=4)
    tab.mouse.up()
    tab.wait_for_url(re.compile(r"from=[\d.]+&to=[\d.]+"))
    zoomed = window(tab, "loss")
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.25)
    assert window(tab, "traffic") == pytest.approx(zoomed)
    tab.reload()
    tab.wait_for_selector("#traffic-chart[data-window]")
    tab.wait_for_selector("#loss-chart[data-window]")
    assert window(tab, "traffic") == pytest.approx(zoomed, abs=0.001)
    assert window(tab, "loss") == pytest.approx(zoomed, abs=0.001)
    tab.locator("#traffic-chart .u-over").dblclick()
    tab.wait_for_url(re.compile(r"^[^?]*$"))
    assert window(tab, "loss")[0] < zoomed[0]


@pytest.mark.extended
def test_events_are_marked_and_described_at_the_cursor(tab: Page, running_board: Board, watched: str) -> None:
    def saved() -> float | None:
        marks = running_board.call("GET", f"jobs/{watched}/history/marks")["columns"]
        steps = zip(marks["kind"], marks["step"], marks["time"], strict=True)
        return next((time for kind, step, time in steps if (kind, step) == ("checkpoint", 25)), None)

    at = wait_until(saved, "the first checkpoint is in the history", 60)
    tab.goto(f"{running_board.url}/jobs/{watched}/?from={at - 5}&to={at + 5}&at={at}")
    expect(tab.locator("#ranges [data-words]")).to_contain_text("checkpoint after step 25")
    tab.locator("#ranges [data-reset]").click()
    expect(tab.locator("#ranges [data-words]")).to_have_text("")
    assert "?" not in tab.url


def test_page_survives_a_restart_of_the_web_process(
    tab: Page, browser: Browser, running_board: Board, watched: str
) -> None:
    tab.goto("about:blank")  # whose console must stay silent
    context = open_context(browser, storage_state=tab.context.storage_state())
    other = context.new_page()
    other.goto(f"{running_board.url}/jobs/{watched}/")
    other.wait_for_selector("#loss-chart[data-points]")
    web = running_board.info["pids"]["web"]
    os.kill(web, signal.SIGKILL)
    expect(other.locator("#connection")).to_have_text("reconnecting")
    before = steps_done(other)
    wait_until(lambda: running_board.info["pids"]["web"] != web, "the web is started again", 60)
    expect(other.locator("#connection")).to_have_text("live")
    wait_until(lambda: steps_done(other) > before, "on it goes", 90)
    context.close()


def steps_done(page: Page) -> int:
    return int(page.locator("#figure-step").inner_text().split(" ")[0].replace(",", ""))


OF_TABS = ("#fidelity-rows", "#checkpoint-rows", "#collectives", "#places [data-legend]", "#start [data-figures]")


def shown(page: Page) -> dict[str, Any]:
    """Read the figures of the run from all tabs of the page."""
    for name in ("training", "traffic", "time", "hosts", "overview"):
        open_tab(page, name)
        page.evaluate(DRAWN)
    texts = {name: page.locator(name).inner_text() for name in ("#figure-step", "#figure-loss", "#figure-off")}
    texts |= {name: page.locator(name).text_content() or "" for name in OF_TABS}
    return texts | {"points": page.get_attribute("#loss-chart", "data-points")}


def end(board: Board, job: str) -> None:
    """Cancel the run and wait until its history is complete."""
    if not board.get_job(job)["finished"]:
        board.call("POST", f"jobs/{job}/cancel")
    board.wait_for_status(job, "cancelled")

    def kept() -> bool:
        (attempt,) = board.call("GET", f"jobs/{job}/history")["attempts"]
        return bool(attempt["ended"]) and bool(board.get_job(job)["diagnosis"]["over"])

    wait_until(kept, "the recorder has all of it, and has judged it", 60)


@pytest.mark.extended
def test_ended_run_shows_the_same_page_without_its_stream(tab: Page, running_board: Board, watched: str) -> None:
    end(running_board, watched)
    tab.wait_for_selector("#status[data-status=cancelled]")
    live = shown(tab)
    running_board.connect_redis().delete(telemetry_stream(watched, 1))
    open_late(tab, f"{running_board.url}/jobs/{watched}/")
    tab.wait_for_selector("#loss-chart[data-points]")
    wait_until(lambda: shown(tab) == live, f"the same figures from the history: {shown(tab)} compared with {live}", 10)
    expect(tab.locator("#traffic-note")).not_to_contain_text("summary")
    assert_still(tab)


TOLD: dict[str, Any] = {
    "v": 1, "time": 1.0, "over": True, "state": "slow", "step": 9, "sampled": 3, "hang": None, "training": [],
    "sentence": "Rank 1 came last to 83% of tp all-reduces since step 5.",
    "reason": "Its compute is slow, not its link.",
    "next": "Read the log of rank 0.",
    "action": "open_log",
    "action_rank": 0,
    "evidence": [{"text": "ranks 0 and 2 waited 41 ms a step", "ranks": [0, 2], "steps": [5, 9]}],
    "planned": None, "measured": None, "waits": [], "groups": [], "start": [],
    "stragglers": [{"rank": 1, "text": "it came last to 83%"}],
}  # fmt: skip


def test_first_screen_shows_verdict_reason_and_next_step(tab: Page, running_board: Board, watched: str) -> None:
    end(running_board, watched)
    with (
        contextlib.closing(sqlite3.connect(running_board.state / "db.sqlite3", timeout=scale_timeout(30))) as database,
        database,
    ):
        database.execute("UPDATE jobs_attempt SET diagnosis = ? WHERE job_id = ?", (json.dumps(TOLD), watched))
    tab.reload()
    health = tab.locator("#health")
    expect(health).to_have_attribute("data-tone", "warn")
    expect(health.locator("[data-sentence]")).to_have_text(TOLD["sentence"])
    expect(health.locator("[data-reason]")).to_have_text(TOLD["reason"])
    expect(health.locator("[data-next]")).to_have_text(TOLD["next"])
    assert box(health.locator("[data-next]"))[3] <= 900
    expect(health.get_by_text("41 ms a step")).to_be_hidden()
    health.locator("summary", has_text="1 fact").click()
    expect(health.get_by_text("41 ms a step")).to_be_visible()
    tab.wait_for_selector("#loss-chart[data-points]")
    health.get_by_role("button", name="Show steps 5–9").click()  # noqa: RUF001
    tab.wait_for_url(re.compile(r"from=[\d.]+&to=[\d.]+"))
    open_tab(tab, "logs")
    tab.select_option("[name=log-rank]", "all")
    open_tab(tab, "overview")
    health.get_by_role("button", name="Open log of rank 0").click()
    expect(tab.locator("#tab-logs")).to_have_attribute("aria-selected", "true")
    expect(tab.locator("[name=log-rank]")).to_have_value("0")
    open_tab(tab, "hosts")
    expect(tab.locator("#places .blamed")).to_have_text("1")
