"""Fixtures of browser tests: one installation per process, and one browser per module."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.error
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page

from jobs.models import TERMINAL
from tests.support.board import Board, run_board
from tests.support.browser import log_in, open_context, run_chromium, serve_static_files
from tests.support.processes import wait_until

PLANNER_PATHS = re.compile(r"/plan/.*|/api/v1/jobs/[^/]+/(advice|smaller)")


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """Start the installation that all browser tests of a process share."""
    with run_board(tmp_path_factory.mktemp("board")) as made:
        yield made


@pytest.fixture(scope="module")
def running_board(installation: Board) -> Iterator[Board]:
    """Return the installation, and cancel the jobs of the module at the end."""
    yield installation
    (jobs,) = wait_until(lambda: listed(installation), "the board answers")
    for job in jobs:
        with contextlib.suppress(urllib.error.HTTPError):  # the job may have ended
            installation.call("POST", f"jobs/{job['id']}/cancel")


def listed(board: Board) -> tuple[list[dict[str, Any]]] | tuple[()]:
    """Return the jobs that have not ended, or an empty tuple if the board does not respond."""
    with contextlib.suppress(urllib.error.URLError, TimeoutError):
        return ([job for job in board.call("GET", "jobs") if job["status"] not in TERMINAL],)
    return ()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright's own loop would make Django refuse its synchronous ORM in this thread.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with run_chromium() as launched:
        yield launched
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture(scope="package")
def served() -> Iterator[str]:
    """Return the address of the static files."""
    with serve_static_files() as address:
        yield address


@pytest.fixture(scope="module")
def modules(browser: Browser, served: str) -> Iterator[Page]:
    """Open a page from which `import("/js/NAME.js")` works."""
    context = open_context(browser)
    page = context.new_page()
    page.goto(f"{served}/icon.svg")
    yield page
    context.close()


@pytest.fixture
def page(browser: Browser, running_board: Board) -> Iterator[Page]:
    """Open a logged-in page, and check that its console stays empty."""
    context = open_context(browser, viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda m: complaints.append(f"{m.text} {m.location['url']}") if _complains(m) else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    log_in(opened, running_board.url, running_board.login)
    yield opened
    context.close()
    assert complaints == []


def _complains(shown: ConsoleMessage) -> bool:
    """Return whether a console message is a fault. Pages retry a request that a busy planner refused."""
    if "status of 503" in shown.text and PLANNER_PATHS.fullmatch(urlsplit(shown.location["url"]).path):
        return False
    return shown.type in ("error", "warning")
