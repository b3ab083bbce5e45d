"""The planned step time and the current phase of a run."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

WAITING = "Hatched: waiting for the slowest rank."

TOLD: dict[str, Any] = {
    "step_s": 0.2,
    "sure": 0.0,
    "steps": 10,
    "parts": [
        {"name": "compute", "kind": "compute", "seconds": 0.08, "waiting_s": 0.0},
        {"name": "tp", "kind": "exposed", "seconds": 0.05, "waiting_s": 0.02},
        {"name": "dp", "kind": "hidden", "seconds": 0.04, "waiting_s": 0.0},
        {"name": "bubble", "kind": "bubble", "seconds": 0.06, "waiting_s": 0.0},
        {"name": "data", "kind": "data", "seconds": 0.01, "waiting_s": 0.0},
    ],
}


@pytest.mark.parametrize(
    ("share", "total", "note"),
    [(0, "200 ms", ""), (0.45, "200 ms ±45%", ""), (9, "200 ms", "Planned: within a factor of 10. ")],
)
def test_planned_step_time_has_a_margin_of_error(modules: Page, share: float, total: str, note: str) -> None:
    body = """
    const section = document.querySelector('section');
    m.stepBar(section)({ diagnosis: { planned: x }, estimate: {} }, { ranks: new Map(), stepTimes: [] });
    return [section.querySelector('.total').textContent, section.querySelector('[data-note]').textContent];
    """
    made = "<section><div data-bars></div><dl data-figures></dl><p data-note></p></section>"
    with open_blank_page(modules, made) as page:
        shown, result = call_module(page, "job/stepbar.js", body, {**TOLD, "sure": share})
    assert shown == total
    assert result == f"{note}Solid: exposed communication. {WAITING} Striped: communication overlapped with compute."


def test_figures_name_the_current_phase(modules: Page) -> None:
    ids = ("phase", "left-name", "left")
    body = """
    const state = { ranks: new Map(x.map((phase, rank) => [rank, { phase }])), evals: new Map(), progress: null };
    m.showProgress({ status: 'running', finished: false, members: [], history: [] }, state);
    return document.getElementById('figure-phase').textContent;
    """
    with open_blank_page(modules, "".join(f'<b id="figure-{name}"></b>' for name in ids)) as page:
        assert call_module(page, "job/figures.js", body, ["step", "step"]) == "now training"
        assert call_module(page, "job/figures.js", body, ["step", "eval"]) == "now training, validating"
