"""Buttons that copy text, and forms that start a job only once after two clicks."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

# A button that a user presses. The browser copies no selection if a script calls the function.
BUTTON = """
  const kept = navigator.clipboard;
  const deaf = { writeText: () => new Promise(() => {}) };
  Object.defineProperty(navigator, "clipboard", { configurable: true, value: x.clipboard ? deaf : undefined });
  const button = Object.assign(document.createElement("button"), { textContent: "Copy" });
  button.addEventListener("click", async () => { button.textContent = String(await m.copyText(x.text)); });
  document.body.replaceChildren(Object.assign(document.createElement("p"), { textContent: "selected" }), button);
  getSelection().selectAllChildren(document.querySelector("p"));
  window.asked = () => Object.defineProperty(navigator, "clipboard", { configurable: true, value: kept });
"""


@pytest.mark.parametrize("clipboard", [False, True], ids=["no clipboard", "one that never answers"])
def test_page_copies_without_a_clipboard(modules: Page, *, clipboard: bool) -> None:
    modules.context.grant_permissions(["clipboard-read", "clipboard-write"])
    call_module(modules, "dom.js", BUTTON, {"clipboard": clipboard, "text": "line 1\nline 2"})
    modules.click("button")
    modules.get_by_role("button", name="true").wait_for()
    modules.evaluate("window.asked()")
    assert modules.evaluate("navigator.clipboard.readText()") == "line 1\nline 2"
    assert modules.evaluate("getSelection().toString()") == "selected", "the selection stays"
    assert modules.evaluate("document.querySelectorAll('textarea').length") == 0


FORM = '<form data-once><button type="submit">Submit job</button></form><form id="other"><button>Look</button></form>'
SEND = """async ([selector, times]) => {
  await import('/js/shell/once.js');
  let sent = 0;
  const stay = (event) => { if (!event.defaultPrevented) sent += 1; event.preventDefault(); };
  addEventListener('submit', stay);
  for (let n = 0; n < times; n += 1) document.querySelector(selector).requestSubmit();
  removeEventListener('submit', stay);
  await new Promise((done) => setTimeout(done));
  return [sent, document.querySelector(selector + ' button').disabled];
}"""
BACK = "() => dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))"


def test_double_click_sends_a_form_once(modules: Page) -> None:
    with open_blank_page(modules, FORM) as page:
        assert page.evaluate(SEND, ["[data-once]", 2]) == [1, True]
        page.evaluate(BACK)
        assert page.locator("[data-once] button").is_enabled()
        assert page.evaluate(SEND, ["[data-once]", 2]) == [1, True]


def test_value_of_the_button_is_sent(modules: Page) -> None:
    """A disabled button sends no value, so a dry run would be sent as the run itself."""
    form = (
        '<form data-once action="paper.html"><button type="submit" name="kind" value="dry_run">Dry run</button></form>'
    )
    with open_blank_page(modules, form) as page:
        page.evaluate("() => import('/js/shell/once.js')")
        page.get_by_role("button").click()
        page.wait_for_url("**/paper.html?kind=dry_run")


def test_other_forms_are_unchanged(modules: Page) -> None:
    with open_blank_page(modules, FORM) as page:
        assert page.evaluate(SEND, ["#other", 2]) == [2, False]
