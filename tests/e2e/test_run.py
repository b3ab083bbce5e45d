"""The first minutes of a new user, with a real run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.board import Board
from tests.support.browser import open_tab
from tests.support.processes import is_gone, wait_until

LONG: dict[str, Any] = {
    "name": "long",
    "model": {"preset": "llama-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 5000, "global_batch": 4, "seq_len": 64, "eval_every": 0},
}


def picture(page: Page) -> str:
    """Return the current picture of the traffic chart."""
    drawn: str = page.evaluate("document.querySelector('#traffic-chart canvas').toDataURL()")
    return drawn


def test_submitted_job_streams_live_and_matches_the_plan(page: Page, running_board: Board) -> None:
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#figures")).to_contain_text("dp 2 x pp 1 x tp 2")
    expect(page.locator("label", has=page.locator("[name='layout.tp'][value='8']"))).to_have_attribute(
        "title", re.compile("4 heads are not divisible by 8")
    )
    page.fill("[data-field='name']", "first dp2 x tp2")
    page.fill("[data-field='train.steps']", "120")
    page.click("summary:text-is('Training')")
    page.fill("[data-field='train.eval_every']", "40")
    page.fill("[data-field='train.seq_len']", "999")
    expect(page.locator("[data-for='train.seq_len'] .problem")).to_contain_text("max_seq_len 512")
    expect(page.locator("#submit")).to_be_disabled()
    page.fill("[data-field='train.seq_len']", "64")
    expect(page.locator("#submit")).to_be_enabled()
    page.click("#submit")

    page.wait_for_selector("#figure-off[data-tone]")
    before = picture(page)
    wait_until(lambda: picture(page) != before, "the graph moves", 15)
    page.select_option("#by-axis", "tp")
    page.select_option("#by-op", "all_reduce")
    expect(page.locator("#connection")).to_have_text("live")

    page.reload()  # leaving and coming back loses nothing
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.locator("#fidelity")).to_contain_text("120 steps on each of 4 ranks")
    assert page.get_attribute("#fidelity", "data-difference") == "0"
    open_tab(page, "verification")
    expect(page.locator("#verdict-summary")).to_contain_text("All 4 ranks: no difference in bytes or calls")
    expect(page.locator("#proof [data-verdict]")).to_have_text("all checks passed")
    proven = re.compile(r"gradients, updates, and norms match the reference within \d(e-\d)?$")
    expect(page.locator("#proof [data-part] dd:first-of-type")).to_have_text(["0 B, 0 calls", "replicas match", proven])
    expect(page.locator("#fidelity-badge")).to_have_text("exact: difference 0 B, 0 calls")
    open_tab(page, "memory")
    for part in ("parameters", "optimizer state", "gradients"):
        expect(page.locator("#planned-rows tr", has=page.locator(f"th:text('{part}')")).first).to_contain_text("0%")
    for axis in ("dp", "tp", "world"):
        expect(page.locator("#fidelity > .table-wrap tr", has_text=axis)).to_contain_text("0 B")
    open_tab(page, "logs")
    log = page.locator("#log")
    expect(log).to_contain_text("step 120/120 loss")
    open_tab(page, "traffic")
    expect(page.locator("#collectives")).to_contain_text("all-reduce")
    job = running_board.get_job(page.url.partition("#")[0].rstrip("/").rsplit("/", 1)[1])
    losses = [point["loss"] for point in job["exit"]["summary"]["losses"]]
    assert len(losses) == 120
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_cancel_ends_every_process(page: Page, running_board: Board) -> None:
    first = running_board.submit(LONG)
    second = running_board.submit({**LONG, "name": "behind"})
    page.goto(f"{running_board.url}/jobs/{second}/")
    waiting = page.locator("#waiting")
    expect(waiting).to_contain_text("The job needs 4 CPU slots on one host. Host here has 0 of 4 slots free.")
    expect(waiting.locator("[data-place]")).to_have_text("1 of 1 in the queue")
    expect(waiting.locator("[data-starts]")).not_to_be_empty()
    expect(waiting.locator("[data-next]")).not_to_be_empty()
    expect(page.locator("main .panel:visible")).to_have_count(1)  # no panel is empty
    page.goto(f"{running_board.url}/jobs/{first}/")
    page.wait_for_selector("#status[data-status=running]")
    pids = running_board.list_processes(first)
    assert len(pids) >= 5
    page.click("#cancel")
    page.click("#keep")
    page.click("#cancel")
    page.click("#cancel-dialog button.danger")
    wait_until(lambda: all(is_gone(pid) for pid in pids), "every process is gone", 15)
    page.wait_for_selector("#status[data-status=cancelled]")
    expect(page.locator("#notice")).to_contain_text("Cancelled on request")
    expect(page.locator("#figure-left-name")).to_have_text("Duration")
    expect(page.locator("#figure-left")).to_contain_text(re.compile(r"\d"))
    running_board.wait_for_status(second, "starting", "running")
    running_board.call("POST", f"jobs/{second}/cancel")
    running_board.wait_for_status(second, "cancelled")


def test_copied_curl_command_submits_the_job(page: Page, running_board: Board) -> None:
    import os
    import subprocess

    page.goto(f"{running_board.url}/jobs/new/")
    page.fill("[data-field='name']", "it's curl")
    page.fill("[data-field='train.steps']", "1000")
    page.wait_for_selector("#figures dd")
    page.click("#copy-curl")
    expect(page.locator("#copied")).to_contain_text("Copied.")
    command = page.evaluate("navigator.clipboard.readText()")
    environment = {**os.environ, "MESHBOARD_TOKEN": running_board.info["api_token"]}
    answer = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout
    assert '"name":"it\'s curl"' in answer
    job = re.search(r'"id":"([a-z2-7]{10})"', answer)
    assert job
    running_board.call("POST", f"jobs/{job[1]}/cancel")
    running_board.wait_for_status(job[1], "cancelled")


@pytest.mark.extended
def test_idle_page_keeps_one_socket(page: Page, running_board: Board) -> None:
    opened: list[str] = []
    page.on("websocket", lambda socket: opened.append(socket.url))
    jobs = running_board.call("GET", "jobs")
    page.goto(f"{running_board.url}/jobs/{jobs[-1]['id']}/")
    expect(page.locator("#connection")).to_have_text("live")
    page.wait_for_timeout(11_000)  # the idleness itself: a socket timeout of 5 s would show
    assert len(opened) == 1
    expect(page.locator("#connection")).to_have_text("live")


def test_every_page_fits_on_a_phone(page: Page, running_board: Board) -> None:
    jobs = running_board.call("GET", "jobs")
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/", "/jobs/new/", f"/jobs/{jobs[-1]['id']}/"):
        page.goto(running_board.url + path)
        expect(page.locator("main .panel:visible").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_logs_contain_no_secrets(running_board: Board) -> None:
    up = running_board.info
    logs = [running_board.read_log(name) for name in ("web", "controller", "host", "redis")]
    for secret in (up["password"], up["api_token"], (running_board.state / "redis_password").read_text()):
        assert not any(secret in log for log in logs)
    assert (running_board.state / "up.json").stat().st_mode & 0o777 == 0o600
