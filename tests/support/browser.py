"""Run Chromium for tests and benchmarks, and call JavaScript modules of the pages in it."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.support.processes import scale_timeout, wait_until

STATIC = Path(__file__).parents[2] / "webapp" / "static"
DESCRIBE_BUTTONS = """`focused ${document.hasFocus()}, at ${document.activeElement.outerHTML.slice(0, 200)}: `
  + [...document.getElementsByTagName("button")].map((one) => one.textContent.trim()).join(" | ")"""
TIMEOUT_MS = scale_timeout(30) * 1e3
MAX_COPY_ATTEMPTS = 3
SHUTDOWN_POLL_S = 0.02
expect.set_options(timeout=TIMEOUT_MS)


@contextmanager
def run_chromium() -> Iterator[Browser]:
    """Run the headless Chromium shell of tests/install_tools.sh, which takes a fifth of the time of a full browser."""
    path = shutil.which("chromium-headless-shell")
    assert path, "run tests/install_tools.sh first"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def open_context(browser: Browser, **options: Any) -> BrowserContext:
    """Open a browser context with the timeout of tests."""
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    return context


def log_in(page: Page, url: str, login: tuple[str, str]) -> None:
    """Log in to the board at `url` with a user name and a password."""
    username, password = login
    page.goto(f"{url}/login/")
    page.fill("#id_username", username)
    page.fill("#id_password", password)
    page.click("main button.primary")
    page.wait_for_url(f"{url}/")


def open_tab(page: Page, name: str) -> None:
    """Open a tab of the job page."""
    page.click(f"#tab-{name}")


def read_copied_text(page: Page, press: Callable[[], None]) -> str:
    """Press a copy button, and return the text in the clipboard.

    An observer records the label of the button, which changes back soon. A busy browser may refuse to copy, because
    the press no longer counts as a user action. Then the press is repeated.
    """
    page.evaluate(
        """() => {
          const buttons = document.getElementsByTagName("button");
          const hasLabel = (words) => [...buttons].some((one) => words.test(one.textContent));
          window.isRefused = () => hasLabel(/forbidden|closed|by hand|address bar/);
          new MutationObserver(() => {
            if (hasLabel(/^\\s*Copied\\s*$/)) window.copyResult = "Copied";
            else if (isRefused()) window.copyResult ||= "refused";
          }).observe(document.body, { childList: true, subtree: true, characterData: true });
        }"""
    )
    for _ in range(MAX_COPY_ATTEMPTS):
        page.wait_for_function("!isRefused()")
        page.evaluate("() => { window.copyResult = ''; }")
        press()
        try:
            result = wait_until(lambda: page.evaluate("window.copyResult"), "the button says whether it copied", 30)
        except AssertionError as error:
            error.add_note(page.evaluate(DESCRIBE_BUTTONS))
            raise
        if result == "Copied":
            return str(page.evaluate("navigator.clipboard.readText()"))
    raise AssertionError(f"refused {MAX_COPY_ATTEMPTS} times")


class _StaticFileHandler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_static_files() -> Iterator[str]:
    """Serve the static files without a board, and return their address."""
    handler = functools.partial(_StaticFileHandler, directory=str(STATIC))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[SHUTDOWN_POLL_S])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def wait_for_requests(page: Page, held: list[Route], count: int) -> None:
    """Wait until a handler of `page.route` has put this number of requests into `held`."""
    wait_until(lambda: page.evaluate("true") and len(held) >= count, f"the page sends {count} requests")


@contextmanager
def open_blank_page(modules: Page, body: str, *styles: str) -> Iterator[Page]:
    """Open a page with these elements and style sheets, which can import modules such as "/js/NAME.js"."""
    links = "".join(f'<link rel="stylesheet" href="/{style}">' for style in styles)
    html = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>paper</title>{links}<body>{body}'
    browser = modules.context.browser
    assert browser
    context = open_context(browser)
    page = context.new_page()
    page.route("**/paper.html*", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto(modules.url.rpartition("/")[0] + "/paper.html")
    try:
        yield page
    finally:
        context.close()


def call_module(page: Page, module: str, body: str, argument: object = None) -> Any:
    """Evaluate JavaScript in the page, with `m` for the module and `x` for the argument."""
    return page.evaluate(f"async (x) => {{ const m = await import('/js/{module}'); {body} }}", argument)
