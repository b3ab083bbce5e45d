"""The command palette before the response of the board and without a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

BODY = """<main id="main"></main><button id="theme-toggle">Theme</button>
<button id="palette-open" data-find-url="/find"></button>
<script type="application/json" id="job">{"id": "j"}</script>"""
OPEN = "m.palette(document.getElementById('palette-open'))();"
NOTHING, LOOKING = "No results.", "Searching\u2026"
CANNOT = "Search is unavailable. The board did not answer."


@pytest.fixture
def page(modules: Page) -> Iterator[Page]:
    with open_blank_page(modules, BODY) as made:
        yield made


def found(*jobs: str) -> dict[str, Any]:
    shown = [{"id": name, "name": name, "status": "running", "url": f"/jobs/{name}/"} for name in jobs]
    return {"jobs": shown, "hosts": [], "projects": []}


def test_palette_reports_no_results_only_after_the_response(page: Page) -> None:
    held: list[Route] = []
    page.route(
        "**/find?*", lambda route: held.append(route) if "q=zzz" in route.request.url else route.fulfill(json=found())
    )
    call_module(page, "shell/palette.js", OPEN)
    with page.expect_request("**/find?q=zzz"):
        page.fill(".palette input", "zzz")
    lines = page.locator("#palette-list li")
    expect(lines).to_have_text([LOOKING])
    held[0].fulfill(json=found())
    expect(lines).to_have_text([NOTHING])


@pytest.mark.parametrize("status", [503, 429, None])
def test_palette_shows_an_error_if_the_board_does_not_respond(page: Page, status: int | None) -> None:
    page.route("**/find?*", lambda route: route.fulfill(status=status) if status else route.abort())
    call_module(page, "shell/palette.js", OPEN)
    page.fill(".palette input", "zzz")
    expect(page.locator("#palette-list li")).to_have_text([CANNOT])
    expect(page.locator(".palette [role=status]")).to_have_text(f"0 results. {CANNOT}")


def test_palette_lists_results(page: Page) -> None:
    page.route("**/find?*", lambda route: route.fulfill(json=found("zzz")))
    call_module(page, "shell/palette.js", OPEN)
    page.fill(".palette input", "zzz")
    expect(page.locator("#palette-list li")).to_have_text(["zzzzzzrunning"])
    expect(page.locator(".palette [role=status]")).to_have_text("1 result.")


def test_failed_copy_of_a_job_names_the_board(page: Page) -> None:
    page.route("**/api/v1/jobs/j", lambda route: route.fulfill(status=503))
    page.route("**/find?*", lambda route: route.fulfill(json=found()))
    call_module(page, "shell/palette.js", OPEN)
    page.get_by_role("option", name="Copy as JSON").click()
    expect(page.locator("#main .message")).to_have_text(
        "The board did not return the job. Open the JSON at /api/v1/jobs/j"
    )


@pytest.mark.parametrize("there", [True, False])
def test_shortcut_sheet_lists_the_palette_if_the_page_has_one(modules: Page, there: bool) -> None:
    with open_blank_page(modules, BODY if there else '<main id="main"></main>') as page:
        call_module(page, "shell/keys.js", "m.showKeys();")
        expect(page.locator("dialog.keys kbd").filter(has_text="Ctrl+K")).to_have_count(int(there))
