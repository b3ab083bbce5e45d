"""Copy buttons with and without a clipboard of the browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module

pytestmark = pytest.mark.extended

# A button that copies, as a person presses one: by a script's call a selection would not be copied.
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
