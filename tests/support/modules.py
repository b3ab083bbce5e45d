"""The pages' own JavaScript modules in Chromium, imported as the pages import them, without a board."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.support.browser import context_of

STATIC = Path(__file__).parents[2] / "webapp" / "static"

POLL_S = 0.02  # how soon the server sees that it is to end


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def static_files() -> Iterator[str]:
    """The address that the static files have meanwhile."""
    handler = functools.partial(_Quiet, directory=str(STATIC))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def paper(modules: Page, body: str, *styles: str) -> Iterator[Page]:
    """A page of its own with these elements and sheets, from which `import("/js/NAME.js")` works too."""
    links = "".join(f'<link rel="stylesheet" href="/{style}">' for style in styles)
    html = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>paper</title>{links}<body>{body}'
    browser = modules.context.browser
    assert browser
    context = context_of(browser)
    page = context.new_page()
    page.route("**/paper.html*", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto(modules.url.rpartition("/")[0] + "/paper.html")
    try:
        yield page
    finally:
        context.close()


def call(page: Page, module: str, body: str, argument: object = None) -> Any:
    """Evaluate `body` (JavaScript with `m` the module and `x` the argument) in the page."""
    return page.evaluate(f"async (x) => {{ const m = await import('/js/{module}'); {body} }}", argument)
