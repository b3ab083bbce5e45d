"""The verification of a run: a wrong gradient, and a check compared with a single-process reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.board import Board, run_board
from tests.support.browser import log_in, open_context, open_tab

RUN: dict[str, Any] = {
    "name": "averaged twice",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 30, "seq_len": 64, "eval_every": 0},
}


@pytest.mark.slow
def test_wrong_gradient_fails_the_job_and_is_named(browser: Browser, tmp_path: Path) -> None:
    with run_board(tmp_path / "board", MESHBOARD_TRAINER_MODULE="tests.workers.wrong_trainer") as made:
        job = made.wait_for_status(made.submit(RUN), "failed", "succeeded", timeout_s=120)
        assert job["status"] == "failed"
        assert "gradient of embedding.weight differs from the reference by 7.1e-01" in job["exit"]["reason"]
        proof = job["exit"]["summary"]["proof"]
        assert (proof["one_process"]["state"], proof["replicas"]["apart"]) == ("apart", 0.0)
        page = open_context(browser).new_page()
        log_in(page, made.url, made.login)
        page.goto(f"{made.url}/jobs/{job['id']}/#proof")
        badge = page.locator("#proof [data-verdict]")
        expect(badge).to_have_text("difference found")
        expect(badge).to_have_attribute("data-tone", "bad")
        expect(page.locator("#proof tbody tr", has_text="layers.2.attention.k.weight")).to_contain_text("0.5")


@pytest.mark.extended
@pytest.mark.slow
def test_button_starts_a_reference_check(running_board: Board, browser: Browser) -> None:
    job = running_board.submit({**RUN, "name": "unverified", "train": {**RUN["train"], "verify": "off"}})
    running_board.wait_for_status(job, "succeeded", timeout_s=120)
    page = open_context(browser).new_page()
    log_in(page, running_board.url, running_board.login)
    page.goto(f"{running_board.url}/jobs/{job}/#proof")
    expect(page.locator("#proof [data-verdict]")).to_have_text("not fully checked")
    page.get_by_role("button", name="Run reference check").click()
    page.wait_for_url(lambda url: f"/jobs/{job}/" not in url)
    check = page.url.rstrip("/").rpartition("/")[2]
    held = page.context.new_page()  # the run's page, open while its check runs
    held.goto(f"{running_board.url}/jobs/{job}/#proof")
    expect(held.locator("#check")).to_contain_text("Reference check:")
    expect(held.locator("#check form")).to_be_hidden()
    running_board.wait_for_status(check, "succeeded", timeout_s=120)
    open_tab(page, "verification")
    expect(page.locator("#proof [data-part]").last).to_contain_text(
        "gradients, updates, and norms match the reference within"
    )
    expect(page.locator("#check")).to_be_hidden()
    found = "Reference check: gradients, updates, and norms match the reference within"
    expect(held.locator("#check")).to_contain_text(found)
    page.get_by_role("link", name="unverified", exact=True).click()
    expect(page.locator("#check")).to_contain_text(found)
    expect(page.locator("#check form")).to_be_hidden()
