"""The panel of a run on several hosts."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import STATIC, call_module, open_context

pytestmark = pytest.mark.extended


def test_gang_panel_shows_hosts_clocks_and_cross_host_traffic(modules: Page) -> None:
    panel = (STATIC.parents[1] / "templates" / "jobs" / "panels" / "hosts.html").read_text()
    gang = [
        {"node": 0, "host": "anna", "first_rank": 0, "num_ranks": 2, "ended": None, "outcome": "", "reason": ""},
        {
            "node": 1,
            "host": "bert",
            "first_rank": 2,
            "num_ranks": 2,
            "ended": "x",
            "outcome": "lost",
            "reason": "its lease",
        },
    ]
    job = {"members": gang, "status": "running", "estimate": {"stages": [{}]}, "spec": {"layout": {"dp": 2, "tp": 2}}}
    lines = [{"rank": rank, "predicted": 500, "measured": 500} for rank in range(4)]
    result = [gang, {**job}, [{"axis": axis, "level": "", "ranks": lines} for axis in ("dp", "tp")], panel]
    body = """
    document.body.innerHTML = x[3];
    const panel = document.getElementById("hosts");
    const state = { members: new Map([[0, { clock: { offset_s: 300, within_s: 0.001 } }]]) };
    m.showHosts(panel, x[1], state, () => x[2]);
    const cells = (row) => [...row.children].map((one) => one.textContent);
    const rows = (id) => [...panel.querySelectorAll(`#${id} tr`)].map(cells);
    const shown = [panel.hidden, rows("host-rows"), rows("crossing-rows")];
    m.showHosts(panel, { ...x[1], estimate: {} }, state, () => x[2]);
    shown.push([panel.hidden, panel.querySelector("[data-crossing]")?.hidden, rows("crossing-rows")]);
    m.showHosts(panel, { ...x[1], members: x[0].slice(1) }, state, () => []);
    const alone = panel.hidden;
    const part = (silent) => ({ ...x[0][0], silent });
    m.showHosts(panel, { ...x[1], status: "unreachable", members: [part(true), part(false)] }, state, () => []);
    return [...shown, alone, rows("host-rows").map((row) => row[2])];
    """
    browser = modules.context.browser
    assert browser is not None
    page = open_context(browser).new_page()
    page.goto(modules.url.replace("/icon.svg", "/js/"))  # a list of files: an HTML page
    hidden, hosts, crossing, unforeseen, alone, parts = call_module(page, "job/hosts.js", body, result)
    page.close()
    assert (hidden, alone) == (False, True), "a run on one host has no such panel"
    assert parts == ["no contact", "running"], "of an unreachable job"
    assert unforeseen == [False, True, []], "without a plan the table shows no prediction"
    assert hosts == [
        ["anna", "0\u20131", "running", "\u2212300.00 s ±1.00 ms"],
        ["bert", "2\u20133", "lost: its lease", "not measured"],
    ]
    none, both = ["\u2013"] * 3, ["2,000 B", "2,000 B", "0 B"]
    assert crossing[0] == ["dp", "2 of 2", *both, *none]
    assert crossing[1] == ["tp", "0 of 2", *none, *both]
