"""What a page costs its first visitor: bytes over the wire, requests, and when something is seen; with nothing cached.

    python -m benchmarks.pages [--up var/up.json] [--only WORD]

On a board of its own with real finished jobs, or on one that runs. First paint is the browser's own (Paint Timing's
first-contentful-paint), the median of REPEATS visits; bytes are of responses as they travelled, headers included.
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
PAINT_S = 1.0  # the budget of a page
PAGE_BYTES = 400_000
TELL = """() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  const all = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return [paint ? paint.startTime / 1000 : null, all.reduce((sum, one) => sum + one.transferSize, 0), all.length];
}"""


class Cost(NamedTuple):
    """Of one page: seconds, bytes, requests."""

    paint_s: float
    num_bytes: int
    requests: int


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__.partition("\n")[0])
    asked.add_argument("--up", type=Path, help="of a board that runs")
    asked.add_argument("--only", default="", help="pages with this in their name")
    told = asked.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.screens.pages import pages
    from tests.screens.world import a_board

    with a_board(told.up) as (made, world), run_chromium() as browser:
        state = _login(browser, made.url, made.login)
        print(f"{'page':44} {'first paint':>12} {'bytes':>10} {'requests':>9}")
        over = 0
        for page in pages(world):
            if told.only not in page.name:
                continue
            cost = visit(browser, made.url + page.path, state if page.logged_in else None)
            if cost is None:
                continue
            late, heavy = cost.paint_s > PAINT_S, cost.num_bytes > PAGE_BYTES
            over += late or heavy
            words = " ".join(word for word, said in (("LATE", late), ("HEAVY", heavy)) if said)
            print(f"{page.name:44} {cost.paint_s:10.2f} s {cost.num_bytes:10,} {cost.requests:9} {words}")
    print(f"budget of a page: {PAINT_S:g} s, {PAGE_BYTES:,} B; over it: {over}")


def _login(browser: Browser, url: str, login: tuple[str, str]) -> object:
    context = browser.new_context()
    log_in(context.new_page(), url, login)
    state = context.storage_state()
    context.close()
    return state


def visit(browser: Browser, address: str, state: object) -> Cost | None:
    """None where nothing is painted: no page."""
    seen: list[Cost] = []
    for _ in range(REPEATS):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, storage_state=state)  # type: ignore[arg-type]
        try:
            answer = context.request.get(address, max_redirects=0)
            if answer.status >= 300 or not answer.headers.get("content-type", "").startswith("text/html"):
                return None
            page = context.new_page()
            page.goto(address, wait_until="load")
            page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
            seen.append(Cost(*page.evaluate(TELL)))
        finally:
            context.close()
    middle = statistics.median(cost.paint_s for cost in seen)
    return Cost(middle, max(cost.num_bytes for cost in seen), max(cost.requests for cost in seen))


if __name__ == "__main__":
    main()
