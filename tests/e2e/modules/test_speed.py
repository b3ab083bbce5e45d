"""A run's speed on its page, tokens over time, is the one REST, compare and gates tell; and over what it is taken."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from contracts.telemetry.words import SPEED_STEPS
from tests.support.modules import call

TIMES = [0.01, *(0.1 + 0.01 * (number % 3) for number in range(SPEED_STEPS + 4)), 0.5]
TOKENS = 64
BODY = """
const { createState, foldBatch, foldSummary } = await import('/js/store.js');
const s = createState();
x.items.forEach((item, i) => foldBatch(s, `${i}-0`, { v: 1, job: 'j', attempt: 1, time: 1.0, items: [item] }));
if (x.summary) foldSummary(s, x.summary);
return m.speedOf({ finished: x.summary !== null, exit: { summary: x.summary }, estimate: { tokens_per_step: 64 } }, s);
"""


def items(times: list[float]) -> list[dict[str, Any]]:
    """Steps as rank 0 tells them, each told by a slower clock of rank 1 before."""
    step = {"kind": "step", "time": 1.0, "steps": 99, "tokens": TOKENS, "loss": 2.0, "cells": []}
    step |= {"grad_norm": 1.0, "learning_rate": 0.1, "parts": None}
    return [
        {**step, "step": number, "ran": number, "rank": rank, "step_s": seconds * (1 + rank)}
        for number, seconds in enumerate(times, 1)
        for rank in (1, 0)
    ]


def test_the_speed_of_a_run_is_tokens_over_time_as_its_summary_will_have_it(modules: Page) -> None:
    last = TIMES[-SPEED_STEPS:]
    rate = TOKENS * len(last) / sum(last)
    told = call(modules, "job/figures.js", BODY, {"items": items(TIMES), "summary": None})
    assert told["rate"] == f"{rate:.0f} tokens/s"
    assert told["note"] == f"mean of the last {SPEED_STEPS} steps"
    told = call(modules, "job/figures.js", BODY, {"items": items([0.5]), "summary": None})
    assert told == {"rate": "128 tokens/s", "note": "one step"}


def test_an_ended_run_s_speed_is_its_summary_s(modules: Page) -> None:
    summary = {"steps": 26, "tokens_per_s": 3588.1, "losses": [], "eval_losses": [], "cells": {}, "verdict": {}}
    expected = {"rate": "3.59k tokens/s", "note": f"mean of the last {SPEED_STEPS} steps"}
    for seen in (items(TIMES), []):
        assert call(modules, "job/figures.js", BODY, {"items": seen, "summary": summary}) == expected
    short = {**summary, "steps": 26, "ran_steps": 3}
    assert call(modules, "job/figures.js", BODY, {"items": [], "summary": short})["note"] == "mean of the last 3 steps"
    unknown = {**summary, "tokens_per_s": None}
    told = call(modules, "job/figures.js", BODY, {"items": [], "summary": unknown})
    assert told == {"rate": "\u2013", "note": ""}
