"""A script of one's own, from the form to its bytes on the page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.board import Board

SCRIPTS = Path(__file__).parents[1] / "workers/meter/scripts"


def test_a_script_runs_unchanged_and_its_groups_are_counted(page: Page, running_board: Board) -> None:
    shutil.copy(SCRIPTS / "groups.py", running_board.state / "scripts" / "groups.py")
    page.get_by_role("link", name="Run a script").click()
    page.fill("[data-field='script.path']", "groups.py")
    page.fill("[data-field='layout.dp']", "4")
    page.get_by_role("button", name="Run it").click()
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.get_by_text("A script of your own")).to_be_visible()
    expect(page.locator(".job-line")).to_contain_text("script · groups.py · 4 ranks")
    expect(page.locator("#script-steps")).to_have_text(
        re.compile("^(no optimiser step|optimiser steps|[0-9]+ .*) seen$")
    )
    expect(page.locator("main")).not_to_contain_text("gpt-tiny")
    expect(page.locator("main")).not_to_contain_text("Waiting")
    page.select_option("#phase", "setup")
    rows = page.locator("#collectives tr")
    expect(rows.filter(has_text="ranks 0,2")).to_contain_text("all-reduce")
    expect(rows.filter(has_text="all-to-all")).to_contain_text("128 B")


@pytest.mark.slow
def test_a_script_that_is_not_there_says_so(running_board: Board) -> None:
    missing = running_board.submit({"kind": "script", "layout": {"dp": 2}, "script": {"path": "none.py"}})
    found = running_board.wait_for(missing, "failed")
    assert "there is no 'none.py' below the script root" in found["exit"]["reason"]
