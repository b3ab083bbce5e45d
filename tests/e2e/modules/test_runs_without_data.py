"""The job page of a run that ended without data to draw."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended


def changes(*statuses: str, attempt: int = 1) -> list[dict[str, Any]]:
    return [{"status": status, "attempt": attempt} for status in statuses]


HOST_GAUGE = {"kind": "gauge", "rank": -1, "time": 1.0, "cpu": 0.5}
RANK_GAUGE = {"kind": "gauge", "rank": 0, "time": 1.0, "resident_bytes": 5}


def test_page_without_data_is_short_and_states_the_reason(modules: Page) -> None:
    body = """<main id="main"><p id="nothing" hidden></p><section id="health"></section>
    <section id="log" data-needs="ran"></section><section id="gauges" data-needs="measured"></section>
    <section id="loss" data-needs="sent"></section></main>"""
    show = """
    const state = (await import('/js/store.js')).createState();
    const show = m.nothingView(document.getElementById('main'), document.getElementById('nothing'));
    const starting = [{status: 'starting', attempt: 1}];
    const gauges = new Map([[0, {}]]);
    const cases = [[[]], [starting], [starting, {gauges}], [starting, {progress: {}}]];
    return cases.map(([history, told]) => {
      show({finished: true, status: 'cancelled', attempt: 1, history}, {...state, ...told}, false);
      const seen = [...document.querySelectorAll('section')].filter((one) => one.checkVisibility());
      return [seen.map((one) => one.id), document.getElementById('nothing').innerText];
    });
    """
    with open_blank_page(modules, body, "css/base.css", "css/job/first.css") as page:
        ran, measured, sent, drawn = call_module(page, "job/nothing.js", show)
    assert ran[0] == ["health"]
    assert ran[1] == "Cancelled before it started. Nothing to show."
    assert measured[0] == ["health", "log"]
    assert measured[1] == "Cancelled before the first collective or step. Nothing to show."
    assert sent[0] == ["health", "log", "gauges"]
    assert sent[1] == "Cancelled before the first collective or step. See Memory."
    assert drawn == [["health", "log", "gauges", "loss"], ""]


def test_script_without_collectives_has_a_note_and_a_calibration_has_none(modules: Page) -> None:
    show = """
    const state = (await import('/js/store.js')).createState();
    state.gauges.set(0, {});
    const line = document.getElementById('nothing');
    const told = {finished: true, status: 'succeeded', attempt: 1, history: [{status: 'starting', attempt: 1}]};
    return ['<section id="traffic" data-needs="sent"></section>', ''].map((panel) => {
      document.getElementById('panels').innerHTML = panel;
      m.nothingView(document.getElementById('main'), line)(told, state, true);
      return line.innerText;
    });
    """
    body = '<main id="main"><p id="nothing"></p><div id="panels"></div></main>'
    with open_blank_page(modules, body, "css/base.css", "css/job/first.css") as page:
        script, calibration = call_module(page, "job/nothing.js", show)
    assert script == "The job succeeded without a collective or a step. See Memory."
    assert calibration == ""


def test_ended_run_expects_no_more_collectives(modules: Page) -> None:
    body = """
    const rows = document.createElement('tbody');
    return [[null, false], [null, true], [['step'], true]].map(([phases, finished]) => {
      m.showCollectives(rows, {ranks: new Map()}, phases, finished);
      return rows.textContent;
    });
    """
    with open_blank_page(modules, "") as page:
        shown = call_module(page, "job/tables.js", body)
    assert shown == ["No collectives yet.", "No collectives.", "No collectives in this phase."]
