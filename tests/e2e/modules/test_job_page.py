"""The job page: retries, verdict, failure, and tabs."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended


def job(**other: Any) -> dict[str, Any]:
    members = [
        {"node": 0, "host": "anna", "first_rank": 0, "num_ranks": 2},
        {"node": 1, "host": "bert", "first_rank": 2, "num_ranks": 2},
    ]
    base = {"status": "running", "finished": False, "exit": None, "members": members, "world_size": 4}
    return {**base, "diagnosis": None, **other}


def test_job_with_wrong_gradients_has_no_retry(modules: Page) -> None:
    body = "".join(f'<div id="{name}"></div>' for name in ("states", "status", "cancel-form", "requeue-form", "notice"))
    shown = "return x.map((job) => { m.showHeader(job); return !document.getElementById('requeue-form').hidden; })"
    exit = {"outcome": "failed", "reason": "boom", "rank": 1, "exit_code": 1, "log_tail": []}
    result = {"history": [{"status": "failed", "attempt": 1, "reason": "", "at": "2026-01-01T00:00:00Z"}]}
    ends = [{**exit, "summary": {"proof": {"wrong": wrong}}} for wrong in ([], [{"name": "w"}])]
    jobs = [job(finished=True, status="failed", exit=end, **result) for end in (exit, *ends)]
    with open_blank_page(modules, body) as page:
        assert call_module(page, "job/header.js", shown, jobs) == [True, True, False]


def test_failure_is_stated_once(modules: Page) -> None:
    """The verdict states a failure, or else the notice. A long reason is cut."""
    ids = ("states", "status", "cancel-form", "requeue-form", "notice")
    body = "".join(f'<div id="{name}"></div>' for name in ids)
    words = """
    const { getVerdict } = await import('/js/job/health.js');
    return x.map((job) => {
      m.showHeader(job);
      return [document.getElementById('notice').innerText, getVerdict(job).sentence];
    });
    """
    exit = {"outcome": "failed", "reason": "boom " * 100, "rank": 1, "exit_code": 1, "log_tail": []}
    ended = {"status": "failed", "attempt": 1, "reason": "", "at": "2026-01-01T00:00:00Z"}
    placed = {**ended, "status": "starting"}
    failed = job(finished=True, status="failed", exit=exit, attempt=1, history=[placed, ended])
    unplaced = {**failed, "history": [ended], "exit": {**exit, "reason": "no host"}}
    cancelled = {**failed, "status": "cancelled", "exit": {**exit, "reason": "cancelled by anna"}}
    with open_blank_page(modules, body) as page:
        without, _, _ = call_module(page, "job/header.js", words, [failed, unplaced, cancelled])
    with open_blank_page(modules, f'{body}<section id="health"></section>') as page:
        having, never, stopped = call_module(page, "job/header.js", words, [failed, unplaced, cancelled])
    assert len(without[0]) < 220
    assert without[0].endswith("… (rank 1, exit code 1)")
    assert having == ["", f"{without[0]}."]
    assert never[0] == "Failed: no host (rank 1, exit code 1)"
    assert stopped[0] == "Cancelled by anna"


def test_verdict_shows_the_button_of_its_action(modules: Page) -> None:
    body = """
    <div id="advice"></div><div id="smaller"></div><form id="requeue-form"></form><section id="health">
    <p data-sentence></p>
    <dl><div><dd data-reason></dd></div><div><dd><i data-next></i><i data-action></i></dd></div>
    <div><dd data-log></dd></div></dl>
    <details data-evidence><summary></summary><ul></ul></details></section>"""
    show = """
    const requests = [];
    const section = document.getElementById('health');
    const openLog = (rank) => requests.push(rank);
    const shown = x.map(([action, rank, mayRetry]) => {
      const view = m.healthView(section, { showSteps() {}, mayRetry: () => mayRetry, openLog });
      const told = { sentence: 's', reason: '', next: 'n', evidence: [], state: 'slow', over: true };
      const given = action === null ? told : { ...told, action, action_rank: rank };
      view({ finished: true, status: 'failed', diagnosis: given, members: [{ host: 'anna b' }] }, '');
      const button = section.querySelector('[data-action]').firstElementChild;
      if (action === 'open_log') button.click();
      return button && [button.textContent, button.getAttribute('href')];
    });
    return [shown, requests];
    """
    actions = [
        ["", -1],
        [None, -1],
        ["calibrate", -1],
        ["retry", -1, True],
        ["retry", -1, False],
        ["resume_smaller", -1],
    ]
    actions += [["open_log", 3], ["open_log", -1], ["find_faster", -1]]
    with open_blank_page(modules, body) as page:
        shown, requests = call_module(page, "job/health.js", show, actions)
    assert shown == [
        None,
        None,
        ["Calibrate host", "/hosts/anna%20b/#calibrate"],
        ["Retry", None],
        None,
        ["Find smaller layout", "#smaller"],
        ["Open log of rank 3", None],
        ["Open log", None],
        ["Find faster layouts", "#advice"],
    ]
    assert requests == [3, -1]


def test_verdict_without_a_check_has_a_neutral_color(modules: Page) -> None:
    body = """
    <section id="health"><p data-sentence></p>
    <dl><div><dd data-reason></dd></div><div><dd><i data-next></i><i data-action></i></dd></div>
    <div><dd data-log></dd></div></dl>
    <details data-evidence><summary></summary><ul></ul></details></section>"""
    show = """
    const section = document.getElementById('health');
    const view = m.healthView(section, {});
    return x.map(([state, sentence]) => {
      const diagnosis = { sentence, state, reason: '', next: '', evidence: [], over: true };
      view({ finished: true, status: 'succeeded', diagnosis, members: [] }, '');
      return section.dataset.tone;
    });
    """
    shown = [
        ["well", "On plan: 4 ms per step."],
        ["well", "Not checked: 4 ms per step."],
        ["notice", "Not checked: x."],
    ]
    with open_blank_page(modules, body) as page:
        assert call_module(page, "job/health.js", show, shown) == ["good", "", "warn"]


def test_tabs_follow_keys_addresses_and_data(modules: Page) -> None:
    tab = '<button id="tab-{0}" role="tab" aria-controls="panel-{0}" data-tab="{0}"></button>'
    panel = '<div id="panel-{0}" role="tabpanel"><section id="in-{0}" data-needs="{0}"><p>words</p></section></div>'
    names = ("overview", "traffic", "time", "logs")
    body = "".join(tab.format(name) for name in names)
    made = f"<style>.empty {{ display: none }}</style><div id='tabs'>{body}</div>{''.join(map(panel.format, names))}"
    start = """
    document.getElementById('in-time').className = 'empty';
    window.show = m.jobTabs(document.getElementById('tabs'), () => {});
    show();
    """
    opened = """() => [document.querySelector('[aria-selected=true]').dataset.tab, location.hash,
      ...[...document.querySelectorAll('[role=tabpanel]:not([hidden])')].map((one) => one.id)]"""
    with open_blank_page(modules, made) as page:
        page.evaluate("location.hash = 'in-time'")
        call_module(page, "job/tabs.js", start)
        assert page.evaluate(opened)[0] == "overview", "the tab of the address has no data yet"
        page.evaluate("document.getElementById('in-time').className = ''; show()")
        assert page.evaluate(opened) == ["time", "#in-time", "panel-time"]
        page.evaluate("document.getElementById('in-time').className = 'empty'; show()")
        assert page.evaluate(opened)[0] == "overview"
        page.locator("#tab-overview").press("ArrowRight")
        assert page.evaluate(opened) == ["traffic", "#traffic", "panel-traffic"]
        page.keyboard.press("ArrowRight")
        assert page.evaluate(opened) == ["logs", "#logs", "panel-logs"], "the hidden tab is left out"
        page.keyboard.press("ArrowRight")
        assert page.evaluate(opened) == ["overview", "", "panel-overview"]
        page.evaluate("document.getElementById('in-logs').id = 'logs'")
        page.evaluate("location.hash = 'log-0-1'")
        page.wait_for_function("document.querySelector('[aria-selected=true]').dataset.tab === 'logs'")
