"""The verdict of the job page: actions, log lines, and the figures of a stalled run."""

from __future__ import annotations

from typing import Any

import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

HOSTS = [{"node": 0, "host": "anna", "first_rank": 0, "num_ranks": 2}]
DASH = "\N{EN DASH}"
TRACEBACK = ["Traceback (most recent call last):", '  File "boom.py", line 8, in <module>', "ValueError: no `x`"]


def verdict(sentence: str, **other: Any) -> dict[str, Any]:
    result = {"state": "failed", "sentence": sentence, "reason": "", "next": "", "evidence": [], "over": True}
    return {**result, "action": "", "action_rank": -1, **other}


def job(diagnosis: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"status": "failed", "finished": True, "exit": None, "members": HOSTS, "diagnosis": diagnosis, **other}


def shown(modules: Page, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the panel shows of each job."""
    panel = render_to_string("jobs/panels/first/health.html", {"data": {}})
    around = '<a id="copy-job" href="/new/?from=x">Copy job…</a><div id="advice"></div><div id="parts"></div>'
    body = """
    const section = document.getElementById('health');
    const view = m.healthView(section, { mayRetry: () => false, openLog() {} });
    const text = (name) => section.querySelector(`[data-${name}]`);
    return x.map((job) => {
      view(job, '');
      const button = text('action').firstElementChild;
      const facts = [...section.querySelectorAll('li')].map((one) => one.textContent);
      const log = text('log').closest('div').hidden ? null : text('log').textContent.split('\\n');
      const offered = button && [button.textContent, button.getAttribute('href')];
      return { next: text('next').innerHTML, button: offered, log, facts };
    });
    """
    with open_blank_page(modules, f"{panel}{around}") as page:
        found: list[dict[str, Any]] = call_module(page, "job/health.js", body, list(jobs))
    return found


def test_failed_run_shows_the_end_of_its_traceback_once(modules: Page) -> None:
    facts = [{"text": text, "ranks": [1], "steps": []} for text in (*TRACEBACK[1:], "another fact")]
    exit = {"rank": 1, "log_tail": ["epoch 1", *TRACEBACK, "epoch 2", "epoch 3"]}  # standard output comes late
    failed = job(verdict("Failed: rank 1, ValueError.", evidence=facts), exit=exit)
    diverged = job(verdict("Diverged: the loss is NaN at step 3."), exit=exit)
    running = job(verdict("Failed: the checkpoint after step 4 could not be written."), status="running", exit=None)
    long = job(verdict("Failed: boom."), exit={"rank": 1, "log_tail": [f"line {number}" for number in range(30)]})
    result = shown(modules, failed, diverged, running, long)
    assert result[0]["log"] == TRACEBACK
    prefixed = {"rank": 1, "log_tail": [f"[rank1]: {line}" for line in TRACEBACK] + ["epoch 2"]}
    assert shown(modules, {**failed, "exit": prefixed})[0]["log"] == prefixed["log_tail"][:-1]
    assert result[0]["facts"] == ["another fact (rank 1)"]
    assert [one["log"] for one in result[1:3]] == [None, None]
    assert result[3]["log"] == [f"line {number}" for number in range(22, 30)]


def test_verdict_button_opens_the_next_step(modules: Page) -> None:
    """The search for faster layouts needs an ended run."""
    actions = ("copy_job", "open_breakdown", "find_faster")
    result = {action: verdict("Slower than planned: x.", action=action) for action in actions}
    ended = shown(modules, *(job(result[action]) for action in actions))
    assert [one["button"] for one in ended] == [
        ["Copy job", "/new/?from=x"],
        ["Open breakdown", "#parts"],
        ["Find faster layouts", "#advice"],
    ]
    running = job({**result["find_faster"], "over": False}, status="running", finished=False)
    assert shown(modules, running)[0]["button"] is None


def test_commands_of_the_next_step_are_code(modules: Page) -> None:
    result = shown(modules, job(verdict("Stalled: x.", next="Run `kill -CONT 4711` on <anna>.")))
    assert result[0]["next"] == "Run <code>kill -CONT 4711</code> on &lt;anna&gt;."


def test_template_renders_commands_as_code() -> None:
    result = verdict("Stalled: x.", next="Run `kill -CONT 4711` on <anna>.")
    panel = render_to_string("jobs/panels/first/health.html", {"data": {"diagnosis": result}})
    assert "Run <code>kill -CONT 4711</code> on &lt;anna&gt;." in panel


@pytest.mark.parametrize(("state", "words"), [("hung", [DASH, "stalled", DASH, "stalled"]), ("slow", None)])
def test_stalled_run_shows_no_remaining_time_and_no_speed(modules: Page, state: str, words: list[str] | None) -> None:
    panel = render_to_string("jobs/panels/first/progress.html", {"job": {}})
    body = """
    const state = (await import('/js/store.js')).createState();
    state.stepTimes = Array(20).fill(0.3);
    state.progress = { step: 130, steps: 3000, rate: 1370, tokens: 53_000 };
    state.ranks.set(0, { phase: 'step' });
    const job = { status: 'running', finished: false, history: [], members: [], spec: { train: {} }, diagnosis: x };
    m.showProgress(job, state);
    return ['left', 'phase', 'rate', 'rate-note'].map((name) => document.getElementById(`figure-${name}`).textContent);
    """
    with open_blank_page(modules, panel) as page:
        result = call_module(page, "job/figures.js", body, {"state": state, "over": False, "sentence": "x"})
    if words is not None:
        assert result == words
    else:
        assert result[1:] == ["now training", "1.37k tokens/s", "mean of 20 steps"]
        assert result[0] not in ("", DASH)


def test_diverged_run_has_no_offer_of_a_smaller_layout(modules: Page) -> None:
    ids = ("states", "status", "cancel-form", "requeue-form", "notice", "smaller")
    body = "return x.map((job) => { m.showHeader(job); return document.getElementById('smaller').hidden; })"
    change = {"status": "failed", "attempt": 1, "reason": "", "at": "2026-01-01T00:00:00Z"}
    sentences = ("Failed: rank 1, OutOfMemoryError.", "Diverged: the loss is NaN at step 3.")
    jobs = [job(verdict(sentence), attempt=1, history=[change]) for sentence in sentences]
    with open_blank_page(modules, "".join(f'<div id="{name}"></div>' for name in ids)) as page:
        assert call_module(page, "job/header.js", body, jobs) == [False, True]
