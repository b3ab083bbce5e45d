"""Long texts at several page widths: figures of a million steps, the cards of the queue, reasons in the job list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.template.loader import render_to_string
from django.test import RequestFactory
from django.utils import timezone
from playwright.sync_api import Page, expect

from jobs.pages.jobs.listing import COLUMNS, OPTIONAL
from tests.screens.look import FAULTS
from tests.support.browser import call_module, open_blank_page

OF_A_JOB = (
    *("css/tokens.css", "css/base.css", "css/components.css", "css/fields.css", "css/pages.css"),
    *("css/job/first.css", "css/job/charts.css"),
)
CUT = """() => [...document.querySelectorAll('.figures dt, .figures dd, .figures small, .note')]
  .filter((one) => one.scrollWidth > one.clientWidth && !(one.title && one.matches('small, .note') && innerWidth > 704))
  .map((one) => `${one.textContent}: ${one.scrollWidth} of ${one.clientWidth} px at ${innerWidth}`)"""


@pytest.mark.extended
def test_figures_of_a_million_steps_fit_at_every_width(modules: Page) -> None:
    panels = [render_to_string(f"jobs/panels/first/{name}.html", {"job": {}}) for name in ("progress", "traffic")]
    body = """async () => {
      const { showOff, showProgress } = await import('/js/job/figures.js');
      const state = (await import('/js/store.js')).createState();
      state.lastLoss = { step: 999_999, loss: -3.4e38 };
      state.evals.set(1_000_000, { time: 1, loss: 2.4e38 });
      ['setup', 'checkpoint', 'eval', 'teardown'].forEach((phase, rank) => state.ranks.set(rank, { phase }));
      state.stepTimes = Array.from({ length: 50 }, (_, place) => 0.392 + 0.03 * place);
      state.progress = { step: 999_999, steps: 1_000_000, rate: 999_499, tokens: 59_940_000 };
      showProgress({ finished: false, history: [], members: [], spec: { train: {} } }, state);
      document.getElementById('figure-left').textContent = '2777 h 46 min';
      showOff({ bytesOff: 9_999_999, callsOff: 1_000_000 }, true);
      const note = document.getElementById('traffic-note');
      const told = 'Ranks 0-15 of 1,024. Tables include all ranks. 1,000,000 timing records were dropped.';
      note.textContent = note.title = told;
    }"""
    with open_blank_page(modules, f'<main><div class="first">{"".join(panels)}</div></main>', *OF_A_JOB) as page:
        page.evaluate(body)
        for width in (390, 720, 1024, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(CUT) == []


@pytest.mark.extended
def test_silent_hosts_are_named_if_they_are_few(modules: Page) -> None:
    panel = render_to_string("jobs/panels/first/progress.html", {"job": {}})
    body = """async (host) => {
      const { showProgress } = await import('/js/job/figures.js');
      const state = (await import('/js/store.js')).createState();
      const said = (...hosts) => {
        const members = hosts.map((host) => ({ host, silent: true }));
        showProgress({ status: 'unreachable', finished: false, history: [], members, spec: { train: {} } }, state);
        return document.getElementById('figure-phase').textContent;
      };
      return [said(), said(...Array(64).fill(host)), said('anna', host)];
    }"""
    long = "gpu-" + "w" * 59
    with open_blank_page(modules, f'<main><div class="first">{panel}</div></main>', *OF_A_JOB) as page:
        hosts = ("the host", "64 hosts", f"anna, {long}")
        assert page.evaluate(body, long) == [f"no contact with {host}" for host in hosts]
        for width in (390, 720, 1024, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(CUT) == []


@pytest.mark.extended
def test_step_time_fits_on_a_wide_page(modules: Page) -> None:
    panel = render_to_string("jobs/panels/first/progress.html", {"job": {}})
    body = """
    document.getElementById('figure-step-time').textContent = '59 min 59 s';
    document.getElementById('figure-spread').textContent = 'median of 500 steps, 392 ms to 1.80 s';
    return [...document.querySelectorAll('.figures small')].map((one) => one.scrollWidth - one.clientWidth);
    """
    # The width of the page at 1440 px.
    with open_blank_page(
        modules, f'<main style="width: 80rem"><div class="first">{panel}</div></main>', *OF_A_JOB
    ) as page:
        page.set_viewport_size({"width": 1440, "height": 900})
        assert max(call_module(page, "job/figures.js", body)) <= 0


OF_LISTS = ("css/tokens.css", "css/base.css", "css/components.css", "css/tables.css", "css/pages.css")


@pytest.mark.extended
def test_queue_figures_have_labels_on_a_narrow_page(modules: Page) -> None:
    row = {"id": "a", "name": "run", "project": "default", "points": 1.0, "priority": 0, "place": 1, "num_slots": 2}
    shown = {"rows": [{**row, "parts": {"waited": 0, "share": 0}, "layout": "dp2", "reason": "the queue is paused"}]}
    words = """
    return [...document.querySelectorAll('td')].map((cell) => getComputedStyle(cell, '::before').content);
    """
    with open_blank_page(modules, render_to_string("queue/rows.html", shown), *OF_LISTS, "css/queue.css") as page:
        page.set_viewport_size({"width": 390, "height": 800})
        narrow = call_module(page, "format.js", words)
        page.set_viewport_size({"width": 1440, "height": 800})
        wide = call_module(page, "format.js", words)
    names = ("Position", "Project", "Priority score", "Reason", "Estimated start")
    assert narrow == [f'"{name} "' for name in names]
    assert wide == ["none"] * len(names)


FAILED = "Rank 1 on gpu-host-12 raised ValueError: shapes (3, 4) and (5, 6) do not fit (train.py, line 12)."
ONE_ROW: dict[str, Any] = {
    "kind": "training run",
    "subject": "gpt-tiny",
    "owner": "owner",
    "layout": "dp2",
    "status": "running",
}
ONE_ROW |= {"steps": 100_000, "step": 99_999, "duration_s": 65.2, "step_s": 0.0283, "loss": 2.4931, "reason": ""}
LISTED = [
    {"id": "a", "name": "w" * 64, "tags": ["ci", "nightly", "t" * 50], "archived": True},
    {"id": "b", "name": "waits", "status": "queued", "reason": "Needs 4 CPU slots on one host. " * 8, "step": None},
    {"id": "c", "name": "failed", "status": "failed", "reason": FAILED, "subject": "train.py " + "--option value " * 8},
    {"id": "d", "name": "lost", "status": "unreachable", "layout": "pp2 x dp2 x cp2 x ep2 x tp2 · zero-1 · sp · 1F1B"},
    {"id": "e", "name": "of another", "owner": "o" * 64, "loss": None, "step_s": None, "duration_s": None},
]
LINES = """() => [...document.querySelectorAll('tbody tr')].map((row) => row.clientHeight)"""
CLIPPED = """() => [...document.querySelectorAll('tbody tr *')]
  .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
  .filter((one) => !one.closest('[title]') || getComputedStyle(one).textOverflow !== 'ellipsis')
  .map((one) => `${one.className}: ${one.textContent.trim()}`)"""


def list_of_jobs() -> str:
    columns = [name for name in COLUMNS if name not in OPTIONAL]
    rows = [{**ONE_ROW, "created": timezone.now(), **row} for row in LISTED]
    return render_to_string("jobs/rows.html", {"rows": rows, "columns": columns}, RequestFactory().get("/"))


@pytest.mark.extended
@pytest.mark.parametrize("width", [1024, 1440])
def test_job_has_one_line_on_a_wide_page(modules: Page, width: int) -> None:
    with open_blank_page(modules, f"<main>{list_of_jobs()}</main>", *OF_LISTS, "css/list.css") as page:
        page.set_viewport_size({"width": width, "height": 800})
        heights = page.evaluate(LINES)
        assert max(heights) < 42, heights  # two lines have at least 50 px
        assert max(heights) - min(heights) <= 1, heights
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("[data-job=c] .reason").get_attribute("title") == FAILED
        if width == 1440:
            hidden = page.locator(".scroll-x").evaluate("(box) => box.scrollWidth - box.clientWidth")
            assert hidden <= 0, "all columns are visible"


def test_job_is_a_card_with_full_texts_on_a_phone(modules: Page) -> None:
    with open_blank_page(modules, f"<main>{list_of_jobs()}</main>", *OF_LISTS, "css/list.css") as page:
        page.set_viewport_size({"width": 390, "height": 800})
        cut = (
            "() => [...document.querySelectorAll('tbody tr *')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
        )
        assert page.evaluate(f"({cut})().filter((one) => one.clientWidth).map((one) => one.className)") == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        names = "(one) => getComputedStyle(one, '::before').content"
        assert page.locator("[data-job=c] .reason").evaluate(names) == '"Reason "'
        expect(page.locator("[data-job=e] [data-label=Loss]")).to_be_hidden()


LONG = "w" * 64


def host_cards() -> str:
    host = {"name": LONG, "device_name": "8 x " + LONG, "slots": 8, "last_seen": timezone.now(), "note": "m" * 200}
    gauge = {"label": "Disk (checkpoints)", "value": 9, "most": 10, "words": "75 GiB free", "bad": True}
    card = {"host": host, "state": "draining", "tone": "warn", "free": 8, "gauges": [gauge]}
    legend = {"colour": "slot-1", "job": {"id": "a", "name": LONG}, "slots": 8}
    shown = {"grid": {"hosts": [card], "legend": [legend]}, "listed": {"slots": 8}, "free": 8}
    return render_to_string("hosts/grid.html", shown)


def overview() -> str:
    running = {**ONE_ROW, "id": "a", "name": LONG, "rate": 1e9, "layout": "pp2 x dp2 x cp2 x ep2 x tp2 · zero-1 · 1F1B"}
    job = {"name": LONG, "status": "queued", "attempt": 3}
    change = {"job": job, "job_id": "a", "attempt": 2, "status": "failed", "at": timezone.now(), "reason": LONG * 2}
    host = {"host": {"name": LONG, "device_name": "8 x " + LONG, "slots": 8}, "held": 2, "state": "draining"}
    counts = dict.fromkeys(
        ("num_hosts", "held", "slots", "num_running", "num_measured", "num_waiting", "num_failed"), 1
    )
    counts |= {"connected": 1, "failed_jobs": 1}
    lists = {"running": [running], "waiting": [{**running, "wait_reason": LONG * 2}], "failed": [change]}
    shown = {**counts, **lists, "hosts": [host], "any_job": True, "rate": 1e9, "waited_s": 5.0}
    return render_to_string("overview/live.html", shown)


@pytest.mark.extended
@pytest.mark.parametrize("page_of", [host_cards, overview])
def test_long_names_stay_inside_their_panel(modules: Page, page_of: Callable[[], str]) -> None:
    styles = (*OF_LISTS, "css/hosts.css", "css/overview.css")
    with open_blank_page(modules, f"<main>{page_of()}</main>", *styles) as page:
        for width in (390, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(f"({FAULTS})()") == [], width
