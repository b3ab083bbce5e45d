"""Select Slurm in the form, and show its state on the job page, in a real browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.slurm.cluster import Cluster
from tests.slurm.installation import Installation
from tests.support.browser import log_in, open_context, run_chromium

pytestmark = pytest.mark.slow


@pytest.fixture
def page(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """Log in, and check that the console stays silent."""
    # Playwright's loop would make Django reject its synchronous ORM in this thread.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    with run_chromium() as browser:
        opened = open_context(browser, viewport={"width": 1280, "height": 900}).new_page()
        complaints: list[str] = []
        opened.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        log_in(opened, installed.board.url, installed.board.login)
        yield opened
    assert complaints == []


def save_screenshots(page: Page, name: str) -> None:
    """Save screenshots of both widths in both themes if a folder is set."""
    folder = os.environ.get("SHOTS")
    if not folder:
        return
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=f"{folder}/{name}-{width}-{scheme}.png", full_page=True)
    page.set_viewport_size({"width": 1280, "height": 900})


def test_form_selects_slurm_and_page_shows_it(slurm: Cluster, installed: Installation, page: Page) -> None:
    page.goto(f"{installed.board.url}/jobs/new/")
    page.locator("summary", has_text="Placement and scheduling").click()
    page.get_by_text("Slurm options").click()
    page.check('input[name="resources.engine"][value="slurm"]')
    page.fill('input[name="resources.slurm.partition"]', "nowhere --wrap")
    save_screenshots(page, "form")
    expect(page.locator("#submit")).to_be_disabled()
    problem = page.locator('[id="e-resources.slurm.partition"]')
    expect(problem).to_contain_text("Use comma-separated names of at most 64")
    page.fill('input[name="resources.slurm.partition"]', "other")
    page.fill('input[name="train.steps"]', "100000")
    blocker = slurm.submit_script("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5")
    page.click("#submit")
    page.wait_for_url(re.compile(r"/jobs/[a-z2-7]{10}/$"))
    expect(page.locator("#waiting [data-reason]")).to_contain_text("Slurm: waiting for")
    expect(page.locator("#engine")).to_have_text(re.compile(r"^Slurm job \d+ · partition other · pending$"))
    save_screenshots(page, "pending")
    slurm.command("scancel", blocker)
    running = re.compile(r"^Slurm job \d+ · partition other · node[01] · running$")
    expect(page.locator("#engine")).to_have_text(running)
    expect(page.locator("#status")).to_have_text("running")
    save_screenshots(page, "running")
    page.click("#cancel")
    page.click("#cancel-dialog button.danger")
    expect(page.locator("#status")).to_have_text("cancelled")
