"""Measure bytes, requests, and first paint of each page with an empty cache.

    python -m benchmarks.pages [--up var/up.json] [--only WORD]

The board is a new one with real finished jobs, or a running one. First paint is first-contentful-paint of Paint Timing,
the median of REPEATS visits. Bytes are those of compressed responses with headers.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser

from tests.support.browser import log_in, run_chromium

REPEATS = 3
MAX_PAINT_S = 1.0  # the budget of a page
MAX_PAGE_BYTES = 400_000
READ_TIMINGS = """() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  const all = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return [paint ? paint.startTime / 1000 : null, all.reduce((sum, one) => sum + one.transferSize, 0), all.length];
}"""


class PageCost(NamedTuple):
    """First paint in seconds, bytes, and requests of a page."""

    paint_s: float
    num_bytes: int
    requests: int


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__.partition("\n")[0])
    options.add_argument("--up", type=Path, help="of a board that runs")
    options.add_argument("--only", default="", help="pages with this in their name")
    result = options.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.screens.pages import pages
    from tests.screens.world import a_board

    with a_board(result.up) as (made, world), run_chromium() as browser:
        state = _login(browser, made.url, made.login)
        print(f"{'page':44} {'first paint':>12} {'bytes':>10} {'requests':>9}")
        over = 0
        for page in pages(world):
            if result.only not in page.name:
                continue
            cost = measure_page(browser, made.url + page.path, state if page.logged_in else None)
            if cost is None:
                continue
            late, heavy = cost.paint_s > MAX_PAINT_S, cost.num_bytes > MAX_PAGE_BYTES
            over += late or heavy
            words = " ".join(word for word, output in (("LATE", late), ("HEAVY", heavy)) if output)
            print(f"{page.name:44} {cost.paint_s:10.2f} s {cost.num_bytes:10,} {cost.requests:9} {words}")
    print(f"budget of a page: {MAX_PAINT_S:g} s, {MAX_PAGE_BYTES:,} B; over it: {over}")


def _login(browser: Browser, url: str, login: tuple[str, str]) -> object:
    context = browser.new_context()
    log_in(context.new_page(), url, login)
    state = context.storage_state()
    context.close()
    return state


def measure_page(browser: Browser, address: str, state: object) -> PageCost | None:
    """Return the cost of a page, or None if the address is not a page."""
    seen: list[PageCost] = []
    for _ in range(REPEATS):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, storage_state=state)  # type: ignore[arg-type]
        try:
            answer = context.request.get(address, max_redirects=0)
            if answer.status >= 300 or not answer.headers.get("content-type", "").startswith("text/html"):
                return None
            page = context.new_page()
            page.goto(address, wait_until="load")
            page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
            seen.append(PageCost(*page.evaluate(READ_TIMINGS)))
        finally:
            context.close()
    middle = statistics.median(cost.paint_s for cost in seen)
    return PageCost(middle, max(cost.num_bytes for cost in seen), max(cost.requests for cost in seen))


if __name__ == "__main__":
    main()
