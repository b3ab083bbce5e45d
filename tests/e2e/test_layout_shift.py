"""Pages whose scripts, responses and sockets are slow do not shift."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.slow_pages import assert_still, open_late
from tests.support.board import Board
from tests.support.processes import wait_until

pytestmark = pytest.mark.extended

TRAINED: dict[str, Any] = {
    "name": "left run",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 6, "global_batch": 4, "seq_len": 64, "warmup_steps": 2, "eval_every": 0, "verify": "off"},
}
DRY = {**TRAINED, "name": "dry", "kind": "dry_run", "dry_ranks": [0, 1]}
NOWHERE = {**TRAINED, "name": "thought better of", "resources": {"labels": ["nowhere"]}}


def whole(history: dict[str, Any]) -> bool:
    return any(attempt["ended"] for attempt in history["attempts"])


@pytest.fixture(scope="module")
def names(running_board: Board) -> dict[str, str]:
    """Return the ids in the addresses below."""
    jobs = {"trained": running_board.submit(TRAINED), "dry": running_board.submit(DRY)}
    jobs["waiting"], jobs["cancelled"] = running_board.submit(NOWHERE), running_board.submit(NOWHERE)
    running_board.call("POST", f"jobs/{jobs['cancelled']}/cancel")
    for job in (jobs["trained"], jobs["dry"]):
        running_board.wait_for_status(job, "succeeded")
        wait_until(lambda path=f"jobs/{job}/history": whole(running_board.call("GET", path)), "its history is whole")
    return {**jobs, "host": running_board.call("GET", "hosts")[0]["name"]}


@pytest.mark.parametrize(
    ("path", "width", "drawn"),
    [
        ("/jobs/{trained}/timeline/", 390, ".timeline-canvas"),
        ("/jobs/new/", 1440, "#estimate[data-stale=false] [data-show=time] table"),
        ("/jobs/{dry}/", 390, "#dry-rows td.number"),
        ("/jobs/{waiting}/", 390, "#waiting"),
        ("/jobs/{cancelled}/", 390, "#nothing"),
        ("/hosts/{host}/", 390, "[data-age]"),
        ("/compare/?jobs={trained},{dry}", 1440, "#charts canvas"),
    ],
)
def test_page_does_not_shift_while_it_loads(
    page: Page, running_board: Board, names: dict[str, str], path: str, width: int, drawn: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    open_late(page, running_board.url + path.format(**names))
    page.wait_for_load_state()
    expect(page.locator("[data-reading]")).to_have_count(0)
    expect(page.locator(drawn).first).to_be_visible()
    assert_still(page)
