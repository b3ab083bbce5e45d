"""Checkpoints and dry runs on the job page and in the form."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.board import Board
from tests.support.browser import open_tab

SAVING: dict[str, Any] = {
    "name": "saving",
    "model": {"preset": "mixtral-tiny"},
    "layout": {"dp": 4, "ep": 2, "zero": 1},
    "train": {"steps": 9, "global_batch": 8, "seq_len": 32, "warmup_steps": 2, "eval_every": 0, "checkpoint_every": 3},
}


@pytest.mark.slow
def test_checkpoint_resumes_with_another_layout(page: Page, running_board: Board) -> None:
    saved = running_board.submit(SAVING)
    running_board.wait_for_status(saved, "succeeded")
    page.goto(f"{running_board.url}/jobs/{saved}/#checkpoints")
    rows = page.locator("#checkpoint-rows tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text(f"{saved}/1/step-00000009")
    expect(rows.nth(2)).to_contain_text("deleted")
    assert page.get_attribute("#fidelity", "data-difference") == "0"
    open_tab(page, "verification")
    expect(page.locator("#verdict-summary")).to_contain_text("All 4 ranks: no difference in bytes or calls")
    open_tab(page, "training")
    rows.nth(1).get_by_role("link", name="Resume").click()
    expect(page.locator("[data-field='train.resume']")).to_have_value(f"{saved}/1/step-00000006")
    for field, value in (("layout.ep", "1"), ("layout.zero", "0"), ("layout.dp", "1"), ("layout.tp", "2")):
        page.locator("label", has=page.locator(f"[name='{field}'][value='{value}']")).click()
    page.fill("[data-field='name']", "resumed")
    expect(page.locator("#submit")).to_be_enabled()
    page.click("#submit")
    page.wait_for_selector("#status[data-status=succeeded]")
    open_tab(page, "logs")
    expect(page.locator("#log")).to_contain_text("resumed from step-00000006: 6 steps done, with a different layout")
    expect(page.locator("#fidelity")).to_contain_text("3 steps on each of 2 ranks")
    assert page.get_attribute("#fidelity", "data-difference") == "0"
    before, after = (
        running_board.get_job(job)["exit"]["summary"]["losses"] for job in (saved, page.url.rsplit("/", 2)[1])
    )
    wanted = {point["step"]: point["loss"] for point in before}
    assert [point["step"] for point in after] == [7, 8, 9]
    assert all(abs(point["loss"] - wanted[point["step"]]) / point["loss"] < 1e-5 for point in after)


@pytest.mark.slow
def test_form_starts_a_dry_run_of_a_layout_too_large_for_the_hosts(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    page.fill("[data-field='name']", "dry")
    page.locator("label", has=page.locator("[name='layout.dp'][value='8']")).click()
    page.fill("[data-field='train.global_batch']", "64")
    page.click("summary:text-is('Dry run')")
    page.fill("[data-field='dry_ranks']", "0, 15")
    page.get_by_role("button", name="Dry run").click()
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.locator("#dry-rows tr")).to_have_count(2)
    expect(page.locator("#dry-fit")).to_contain_text("on the rank with the most memory, rank")
    expect(page.locator("#dry-rows")).to_contain_text("rank 15")
    expect(page.locator("#dry-memory-rows tr.group")).to_have_text(["rank 0", "rank 15"])
    weights = page.locator("#dry-memory-rows tr", has_text="parameters")
    expect(weights.locator("td:last-child")).to_have_text(["0%", "0%"])
    open_tab(page, "verification")
    expect(page.locator("#verdict-summary")).to_contain_text("All 2 ranks: no difference in bytes or calls")
