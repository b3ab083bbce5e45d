"""Tables and panels of a live run: reused elements, the note of a stale panel, and the end of a session."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import call_module, open_blank_page

TABLE = "<table><tbody id='rows'></tbody></table><p id='note'></p><section id='section'></section>"


def checkpoint(step: int, num_bytes: int = 100) -> dict[str, Any]:
    shown = {"kind": "checkpoint", "rank": 0, "time": 1.0, "step": step, "name": f"step-{step}", "num_bytes": num_bytes}
    return {**shown, "stall_s": 0.1, "save_s": 0.2}


@pytest.mark.extended
def test_refill_reuses_rows_by_key_and_changes_only_text(modules: Page) -> None:
    body = """
    const { el } = await import("/js/dom.js");
    const body = document.getElementById("rows");
    const row = ([key, words]) => {
      const line = el("tr", { title: words }, el("td", {}, words), el("td", {}, key));
      line.dataset.key = key;
      return line;
    };
    const seen = [];
    const rows = new Map();
    for (const told of x) {
      m.refill(body, ...told.map(row));
      const same = [...body.children].filter((one) => rows.get(one.dataset.key) === one).map((one) => one.dataset.key);
      for (const one of body.children) rows.set(one.dataset.key, one);
      seen.push([[...body.children].map((one) => [one.dataset.key, one.title]), same.join("")]);
    }
    m.refill(body, el("tr", {}, el("td", { className: "note" }, "none")));
    return [seen, body.innerHTML];
    """
    steps = [
        [["b", "1"], ["c", "2"]],
        [["a", "3"], ["b", "1"], ["c", "9"]],
        [["c", "9"], ["d", ""]],
        [["d", ""], ["c", ""]],
    ]
    with open_blank_page(modules, TABLE) as page:
        seen, rest = call_module(page, "refill.js", body, steps)
    assert [shown for shown, _ in seen] == steps
    assert [same for _, same in seen] == ["", "bc", "c", "dc"]
    assert rest == '<tr><td class="note">none</td></tr>'


@pytest.mark.extended
def test_pressed_button_of_a_live_table_survives_a_refresh(modules: Page) -> None:
    """A click begins and ends on one element only if the element stays."""
    checkpoints = """
    const [section, body] = [document.getElementById("section"), document.getElementById("rows")];
    const show = (items) => m.showCheckpoints(section, body, new Map(items.map((item) => [item.step, item])), 2, "j");
    show(x.slice(0, 1));
    const link = body.querySelector("a");
    link.focus();
    show(x.slice(0, 1));
    show(x);
    return [document.activeElement === link, [...body.querySelectorAll("code")].map((one) => one.textContent)];
    """
    axes = """
    const body = document.getElementById("rows");
    const note = document.getElementById("note");
    const cell = { phase: "step", op: "all_reduce", axis: "dp", group_size: 2, count: 1, completed: 1 };
    const ranks = (bytes) => new Map([[0, { exactStep: 1, exactCells: [{ ...cell, payload_bytes: bytes }] }]]);
    const none = () => ({});
    const show = (bytes, open) => m.showComparison(body, note, { ranks: ranks(bytes) }, none, new Set(open), false);
    show(10, []);
    const button = body.querySelector("button");
    button.focus();
    show(20, []);
    const words = body.textContent;
    show(30, ["dp"]);
    const told = [words.includes("20 B"), body.textContent.includes("30 B")];
    return [document.activeElement === button, ...told, button.ariaExpanded];
    """
    with open_blank_page(modules, TABLE) as page:
        assert call_module(page, "job/checkpoints.js", checkpoints, [checkpoint(5), checkpoint(9)]) == [
            True,
            ["step-9", "step-5"],
        ]
    with open_blank_page(modules, TABLE) as page:
        assert call_module(page, "job/tables.js", axes) == [True, True, True, "true"]


PANEL = """<script src="/vendor/htmx/htmx.min.js"></script>
<div id="jobs" data-poll="3600" hx-get="/rows?part=rows" hx-trigger="refresh" hx-target="#jobs">first</div>"""


def test_panel_shows_the_time_of_its_last_refresh_after_failures(modules: Page) -> None:
    """The page reloads after the end of its session."""
    with open_blank_page(modules, PANEL) as page:
        rows = page.locator("#jobs")
        ask = "document.getElementById('jobs').dispatchEvent(new CustomEvent('refresh'))"
        note = page.get_by_text("No update since")
        page.evaluate("import('/js/shell/poll.js')")
        page.route("**/rows**", lambda route: route.fulfill(status=502, body="away"))
        page.evaluate(ask)
        expect(note).to_contain_text(":")
        expect(rows).to_have_text("first")
        page.route("**/rows**", lambda route: route.fulfill(body="second"))
        page.evaluate(ask)
        expect(rows).to_have_text("second")
        expect(note).to_have_count(0)
        page.route("**/rows**", lambda route: route.abort())
        page.evaluate(ask)
        expect(note).to_have_count(1)
        page.route("**/rows**", lambda route: route.fulfill(status=302, headers={"Location": "/icon.svg"}))
        with page.expect_event("load"):
            page.evaluate(ask)
        expect(rows).to_have_text("first")
