"""A run whose bytes are as predicted and whose gradients are wrong fails, and the page says where and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.board import board
from tests.support.browser import context_of, log_in

RUN: dict[str, Any] = {
    "name": "averaged twice",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 30, "seq_len": 64, "eval_every": 0},
}


@pytest.mark.slow
def test_a_wrong_gradient_fails_the_job_and_the_page_names_it(browser: Browser, tmp_path: Path) -> None:
    with board(tmp_path / "board", MESHBOARD_TRAINER_MODULE="tests.workers.wrong_trainer") as made:
        job = made.wait_for(made.submit(RUN), "failed", "succeeded", timeout_s=120)
        assert job["status"] == "failed"
        assert "gradient of embedding.weight differs from one process by 7.1e-01" in job["exit"]["reason"]
        proof = job["exit"]["summary"]["proof"]
        assert (proof["one_process"]["state"], proof["replicas"]["apart"]) == ("apart", 0.0)
        page = context_of(browser).new_page()
        log_in(page, made.url, made.login)
        page.goto(f"{made.url}/jobs/{job['id']}/")
        badge = page.locator("#proof [data-verdict]")
        expect(badge).to_have_text("0 B, 0 calls; replicas agree; differs from one process")
        expect(badge).to_have_attribute("data-tone", "bad")
        expect(page.locator("#proof tbody tr", has_text="layers.2.attention.k.weight")).to_contain_text("0.5")
