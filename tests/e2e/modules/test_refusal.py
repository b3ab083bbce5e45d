"""A server that is busy is asked again when it said."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.modules import call

ASKED = """
    const [fetched, waited, answers] = [window.fetch, window.setTimeout, x.map(([status, after]) =>
      new Response("", { status, headers: after ? { "Retry-After": after } : {} }))];
    const waits = [];
    window.fetch = async () => answers.shift();
    window.setTimeout = (done, ms) => { waits.push(ms); done(); };
    try {
      const answer = await m.fetchPatiently("/plan/");
      return { status: answer.status, waits };
    } finally {
      [window.fetch, window.setTimeout] = [fetched, waited];
    }
"""
BUSY = (503, "5")


@pytest.mark.parametrize(
    ("answers", "status", "waits"),
    [
        ([(200, None)], 200, []),
        ([BUSY, (503, "2"), (200, None)], 200, [5000, 2000]),
        ([(503, None), (200, None)], 503, []),  # it does not say when
        ([(429, "5"), (200, None)], 429, []),  # it is the reader who asks too much
        ([BUSY, BUSY, BUSY, BUSY, (200, None)], 503, [5000, 5000, 5000]),
    ],
)
def test_a_busy_server_is_asked_again_when_it_said(
    modules: Page, answers: list[tuple[int, str | None]], status: int, waits: list[int]
) -> None:
    told = call(modules, "refusal.js", ASKED, answers)
    assert (told["status"], told["waits"]) == (status, waits)


def test_a_refusal_names_each_field_once_and_ends_with_one_period(modules: Page) -> None:
    errors = [
        {"field": "layout.tp", "message": "`layout.tp` is 3. Use 1, 2 or 4."},
        {"field": "train.steps", "message": "Use at least 1."},
        {"field": "request", "message": "Try again."},
    ]
    told = call(modules, "refusal.js", "return m.failed('No estimate', m.words(x));", errors)
    assert told == ("No estimate: `layout.tp` is 3. Use 1, 2 or 4. train.steps: Use at least 1. Try again.")
