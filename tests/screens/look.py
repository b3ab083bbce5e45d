"""Open pages, take pictures, and find faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page

from tests.screens.pages import Shown
from tests.support.browser import log_in

SIZES = {"1440x900": (1440, 900), "390x844": (390, 844)}
THEMES = ("light", "dark")
GRAVE = ("serious", "critical")
FAULTS = (Path(__file__).parent / "faults.js").read_text()
SETTLE_MS = 400  # for charts and what a socket brings first
SCROLL_MS = 150  # at each screenful
TALLEST = 6000


class Look(NamedTuple):
    """A visited page, or None for JSON and addresses without GET."""

    picture: str
    faults: list[str]


class Visitor:
    """A browser window of one size and theme, with and without a login."""

    def __init__(self, browser: Browser, url: str, login: tuple[str, str], size: tuple[int, int], theme: Any) -> None:
        self._url, self._axe = url, Axe()
        look = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": theme}
        self._guest: BrowserContext = browser.new_context(**look)  # type: ignore[arg-type]
        self._user: BrowserContext = browser.new_context(**look)  # type: ignore[arg-type]
        page = self._user.new_page()
        log_in(page, url, login)
        page.close()

    def close(self) -> None:
        self._guest.close()
        self._user.close()

    def look(self, shown: Shown, picture: Path | None) -> Look | None:
        """Visit a page. Errors of Playwright pass if the page does not respond."""
        context = self._user if shown.logged_in else self._guest
        if not _is_page(context, self._url + shown.path):
            return None
        page = context.new_page()
        said: list[str] = []
        page.on(
            "console", lambda m: said.append(f"console: {m.text[:200]}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: said.append(f"script: {error}"))
        try:
            answer = page.goto(self._url + shown.path, wait_until="load")
            page.wait_for_function("() => !document.querySelector('[data-reading]')")
            page.wait_for_timeout(SETTLE_MS)
            if picture is not None:
                _take(page, picture)
            if answer is not None and answer.status >= 400:
                said = [one for one in said if "the server responded with a status of" not in one]
            return Look(picture.name if picture else "", [*said, *faults(page), *grave(page, self._axe)])
        finally:
            page.close()


def faults(page: Page) -> list[str]:
    """Return elements that overflow, are cut, or scroll without a sign."""
    found: list[str] = page.evaluate(f"({FAULTS})()")
    return found


def grave(page: Page, axe: Axe) -> list[str]:
    """Return serious and critical faults of axe-core."""
    found = axe.run(page).response["violations"]
    return [
        f"axe {one['impact']}: {one['id']}: {one['help']}: "
        + "; ".join(str(node["target"][-1])[:80] for node in one["nodes"][:3])
        + (f" and {len(one['nodes']) - 3} more" if len(one["nodes"]) > 3 else "")
        for one in found
        if one["impact"] in GRAVE
    ]


def _is_page(context: BrowserContext, address: str) -> bool:
    """Return whether a GET returns HTML."""
    answer = context.request.get(address, max_redirects=0)
    return (
        answer.status != 405 and answer.status < 600 and _says_html(answer.headers) and not 300 <= answer.status < 400
    )


def _says_html(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/html")


def _take(page: Page, picture: Path) -> None:
    """Take a picture of the whole page, including elements that are drawn when visible."""
    for _ in range(
        0, min(TALLEST, page.evaluate("document.documentElement.scrollHeight")), page.evaluate("innerHeight")
    ):
        page.mouse.wheel(0, page.evaluate("innerHeight"))
        page.wait_for_timeout(SCROLL_MS)
    page.evaluate("scrollTo(0, 0)")
    height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
    width = page.viewport_size["width"] if page.viewport_size else 1440
    page.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
