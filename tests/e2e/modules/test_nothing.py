"""The job page of a run that ended without data to draw."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.modules import call, paper


def changes(*statuses: str, attempt: int = 1) -> list[dict[str, Any]]:
    return [{"status": status, "attempt": attempt} for status in statuses]


UNPLACED = changes("queued", "cancelling", "cancelled")
PLACED = changes("queued", "starting", "failed")
TRAFFIC = {"kind": "traffic", "rank": 0, "time": 1.0, "dropped": 0, "cells": [
    {"phase": "setup", "op": "all_reduce", "axis": "dp", "group_size": 2, "count": 1, "completed": 1,
     "payload_bytes": 8, "algorithmic_bytes": 8, "busy_s": 0.1},
]}  # fmt: skip
LINE = {"kind": "log", "rank": 0, "time": 1.0, "first": 1, "lines": ["no module named train"], "stream": "stderr"}
HOST_GAUGE = {"kind": "gauge", "rank": -1, "time": 1.0, "cpu": 0.5}
RANK_GAUGE = {"kind": "gauge", "rank": 0, "time": 1.0, "resident_bytes": 5}


@pytest.mark.parametrize(
    ("ended", "history", "told", "kept", "never"),
    [
        ("cancelled", UNPLACED, [], None, "ran"),  # known before anybody is asked
        ("cancelled", PLACED + changes("queued", "cancelled", attempt=2), [], None, "ran"),
        ("failed", PLACED, [], False, "measured"),
        ("lost", PLACED, [], False, "measured"),
        ("failed", changes("queued", "starting", "running", "failed"), [LINE, HOST_GAUGE], True, "measured"),
        ("failed", PLACED, [], None, ""),  # the history is unknown
        ("failed", PLACED, [TRAFFIC], True, ""),
        ("failed", PLACED, [RANK_GAUGE], True, "sent"),
        ("succeeded", PLACED, [], False, ""),
        ("succeeded", PLACED, [RANK_GAUGE], True, "sent"),  # a script that makes no collective
        ("running", changes("queued", "starting", "running"), [], False, ""),
        ("queued", changes("queued"), [], None, "queued"),
    ],
)
def test_what_ended_before_it_had_anything_to_draw_is_known_as_that(
    modules: Page, ended: str, history: list[Any], told: list[Any], kept: bool | None, never: str
) -> None:
    body = """
    const store = await import('/js/store.js');
    const s = store.createState();
    store.foldBatch(s, '1-0', {v: 1, job: 'j', attempt: 1, time: 1, items: x[1]});
    return m.neverDid(x[0], s, x[2]);
    """
    finished = ended not in ("running", "queued")
    shown = {"status": ended, "finished": finished, "history": history, "attempt": history[-1]["attempt"]}
    assert call(modules, "job/nothing.js", body, [shown, told, kept]) == never


def test_a_page_without_anything_to_draw_is_short_and_says_why(modules: Page) -> None:
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
    with paper(modules, body, "css/base.css", "css/job/first.css") as page:
        ran, measured, sent, drawn = call(page, "job/nothing.js", show)
    assert ran[0] == ["health"]
    assert ran[1] == "Cancelled before it started. Nothing to show."
    assert measured[0] == ["health", "log"]
    assert measured[1] == "Cancelled before the first collective or step. Nothing to show."
    assert sent[0] == ["health", "log", "gauges"]
    assert sent[1] == "Cancelled before the first collective or step. See Memory."
    assert drawn == [["health", "log", "gauges", "loss"], ""]


def test_a_script_that_succeeds_without_a_collective_says_so_and_a_calibration_needs_none(modules: Page) -> None:
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
    with paper(modules, body, "css/base.css", "css/job/first.css") as page:
        script, calibration = call(page, "job/nothing.js", show)
    assert script == "The job succeeded without a collective or a step. See Memory."
    assert calibration == ""


def test_charts_of_gauges_alone_are_dated_by_them(modules: Page) -> None:
    body = """
    const store = await import('/js/store.js');
    return x.map((items) => {
      const s = store.createState();
      const batch = (item) => ({v: 1, job: 'j', attempt: 1, time: item.time, items: [item]});
      for (const item of items) store.foldBatch(s, `${item.time}-0`, batch(item));
      s.whole = { length: 0 }; // as a history without traffic leaves it
      const now = m.extentOf(s);
      s.time = null;
      return [now, m.extentOf(s)];
    });
    """
    at = 1.7e9
    gauges = [{**RANK_GAUGE, "time": at}, {**HOST_GAUGE, "time": at + 4}]
    step = {"kind": "step", "rank": 0, "step": 1, "steps": 9, "time": at + 2, "step_s": 1.0, "tokens": 8, "cells": []}
    none, alone, stepped = call(modules, "charts/extent.js", body, [[], gauges, [gauges[0], step, gauges[1]]])
    assert none == [None, None]
    assert alone == [[at, at + 4]] * 2
    assert stepped == [[at + 2, at + 4]] * 2, "where steps are known they say where it begins"


def test_an_ended_run_is_not_told_of_as_if_collectives_could_come(modules: Page) -> None:
    body = """
    const rows = document.createElement('tbody');
    return [[null, false], [null, true], [['step'], true]].map(([phases, finished]) => {
      m.showCollectives(rows, {ranks: new Map()}, phases, finished);
      return rows.textContent;
    });
    """
    with paper(modules, "") as page:
        told = call(page, "job/tables.js", body)
    assert told == ["No collectives yet.", "No collectives.", "No collectives in this phase."]
