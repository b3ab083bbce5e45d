"""The link that a new installation prints."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, expect

from tests.support.board import Board
from tests.support.browser import open_context


def test_one_time_link_logs_in_once(browser: Browser, running_board: Board) -> None:
    """Each login makes earlier links invalid, so this test makes its own link after the logins of other tests."""
    assert re.search(r"http\S+/login/once/\?sesame=\S+", (running_board.state / "runner.log").read_text())
    path = running_board.manage("meshboard_user", "--keep", str(running_board.state / "up.json"))["one_time_url_path"]
    link = f"{running_board.url}{path}"
    context = open_context(browser)
    tab = context.new_page()
    tab.goto(link)
    assert tab.url == f"{running_board.url}/"
    expect(tab.locator(".account")).to_contain_text(running_board.login[0])
    context.close()
    second = open_context(browser)
    refused = second.new_page().goto(link)
    assert refused is not None
    assert refused.status == 403
    second.close()
