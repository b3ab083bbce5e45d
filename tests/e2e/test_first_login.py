"""The link that a new installation prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.board import Board, board
from tests.support.browser import context_of


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Board]:
    """A board that nobody has logged in to."""
    with board(tmp_path / "new") as made:
        yield made


def test_the_one_time_link_logs_in_once(browser: Browser, new: Board) -> None:
    link = re.search(r"http\S+/login/once/\S+", (new.state / "runner.log").read_text())
    assert link
    context = context_of(browser)
    tab = context.new_page()
    tab.goto(link[0])
    assert tab.url == f"{new.url}/"
    expect(tab.get_by_text("No job yet")).to_be_visible()
    context.close()
    second = context_of(browser)
    refused = second.new_page().goto(link[0])
    assert refused is not None
    assert refused.status == 403
    second.close()
