"""The browser that tests and benchmarks drive."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.patience import patient
from tests.support.processes import wait_until

WHAT_BUTTONS_SAY = """`focused ${document.hasFocus()}, at ${document.activeElement.outerHTML.slice(0, 200)}: `
  + [...document.getElementsByTagName("button")].map((one) => one.textContent.trim()).join(" | ")"""
LONGEST_MS = patient(30) * 1e3
PRESSES = 3
expect.set_options(timeout=LONGEST_MS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """This machine's own Chromium, which tests/install_tools.sh installs: without the window around its pages, which
    takes four fifths of its time."""
    path = shutil.which("chromium-headless-shell")
    assert path, "run tests/install_tools.sh first"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def context_of(browser: Browser, **options: Any) -> BrowserContext:
    """A window of its own, as patient as tests are."""
    context = browser.new_context(**options)
    context.set_default_timeout(LONGEST_MS)
    return context


def copied(page: Page, press: Callable[[], None]) -> str:
    """What a press put on the clipboard, once its button has said so: for a moment, which a busy machine may miss. A
    browser too busy to answer while the press counts as one refuses, and is asked again, as one would."""
    page.evaluate(
        """() => {
          const buttons = document.getElementsByTagName("button");
          const say = (words) => [...buttons].some((one) => words.test(one.textContent));
          window.refused = () => say(/forbidden|closed|by hand|address bar/);
          new MutationObserver(() => {
            if (say(/^\\s*Copied\\s*$/)) window.said = "Copied";
            else if (refused()) window.said ||= "refused";
          }).observe(document.body, { childList: true, subtree: true, characterData: true });
        }"""
    )
    for _ in range(PRESSES):
        page.wait_for_function("!refused()")
        page.evaluate("() => { window.said = ''; }")
        press()
        try:
            said = wait_until(lambda: page.evaluate("window.said"), "the button says whether it copied", 30)
        except AssertionError as error:
            error.add_note(page.evaluate(WHAT_BUTTONS_SAY))
            raise
        if said == "Copied":
            return str(page.evaluate("navigator.clipboard.readText()"))
    raise AssertionError(f"refused {PRESSES} times")


def log_in(page: Page, url: str, login: tuple[str, str]) -> None:
    """To the board at `url` with a name and a password; leaves its first page open."""
    username, password = login
    page.goto(f"{url}/login/")
    page.fill("#id_username", username)
    page.fill("#id_password", password)
    page.click("main button.primary")
    page.wait_for_url(f"{url}/")


def open_tab(page: Page, name: str) -> None:
    """Open a tab of the job page."""
    page.click(f"#tab-{name}")
