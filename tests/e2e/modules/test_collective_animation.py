"""The stages of a collective: forward, back, keys, and reduced motion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from jobs.runs.collectives import picture
from planner.facts.collectives import LabRankValues, LabStep
from planner.facts.spec import LabPrimitive
from tests.jobs.collectives.test_stages import make_captured, result
from tests.support.browser import STATIC, call_module, open_context

pytestmark = pytest.mark.extended

FILM = (STATIC.parents[1] / "templates" / "lab" / "film.html").read_text()
START = """
const sheets = ["tokens", "base", "components", "fields", "tables", "lab"];
document.head.innerHTML = sheets.map((one) => `<link rel="stylesheet" href="/css/${one}.css">`).join("");
document.body.innerHTML = `<main>${x.html.replaceAll(/{[%{].*?[%}]}/gs, "")}</main>`;
await Promise.all([...document.querySelectorAll("link")].map((link) => new Promise((done) => (link.onload = done))));
m.playFilm(document.getElementById("film"), x.film);
"""


@pytest.fixture
def cinema(browser: Browser, served: str) -> Iterator[Callable[..., Page]]:
    """Open a page with the film of a collective over 4 ranks."""
    contexts = []

    def opened(primitive: LabPrimitive = "all_reduce", still: bool = True, width: int = 1280) -> Page:
        motion: Any = "reduce" if still else "no-preference"
        context = open_context(browser, viewport={"width": width, "height": 800}, reduced_motion=motion)
        contexts.append(context)
        page = context.new_page()
        page.goto(f"{served}/js/")
        step = make_captured(primitive, 4, 0, "sum", 1) if primitive != "barrier" else barrier()
        film = picture.make_film(result(4, 0, "sum"), step)
        assert film is not None
        call_module(page, "lab/film.js", START, {"html": FILM, "film": film})
        return page

    yield opened
    for context in contexts:
        context.close()


def barrier() -> LabStep:
    spans = [(0.0, 41.0), (12.5, 42.0), (3.0, 40.0), (5.0, 43.0)]
    return LabStep(
        primitive="barrier",
        holdings=tuple(LabRankValues(rank=r, before=(a,), after=(b,)) for r, (a, b) in enumerate(spans)),
    )


def rows(page: Page) -> list[str]:
    """Return the texts of all boxes in the order of ranks."""
    return page.locator("#film svg g:not(.flying) text").all_text_contents()


def test_stages_show_the_buffers_of_ranks(cinema: Callable[..., Page]) -> None:
    page = cinema()
    words = page.locator("[data-film=words]")
    expect(words).to_have_text("Before the first stage.")
    own = [str(100 * rank + i) for rank in range(1, 5) for i in range(4)]
    assert rows(page) == own
    expect(page.locator("[data-film=back]")).to_be_disabled()
    page.click("[data-film=on]")
    expect(words).to_have_text(
        "Stage 1 of 6. Every rank combines the received shard with its own shard (reduce round 1 of 3)."
    )
    assert len(set(own) - set(rows(page))) == 4, "one part of each rank is a sum now"
    page.keyboard.press("ArrowLeft")
    assert rows(page) == own
    page.keyboard.press("End")
    total = [str(1000 + 4 * i) for i in range(4)]
    assert rows(page) == total * 4
    expect(page.locator("[data-film=on]")).to_be_disabled()
    page.locator("[data-film=place]").fill("0")
    assert rows(page) == own


def test_film_plays_pauses_and_ends_with_the_captured_values(cinema: Callable[..., Page]) -> None:
    page = cinema("broadcast", still=False)
    play = page.locator("[data-film=play]")
    play.click()
    page.locator("#film .flying").first.wait_for()
    expect(play).to_have_text("Pause")
    play.click()
    expect(play).to_have_text("Play")
    expect(page.locator("#film .flying")).to_have_count(0)
    expect(page.locator("[data-film=words]")).to_contain_text("Stage 1 of 2")
    play.click()
    expect(play).to_have_text("Play again")
    assert rows(page) == ["100", "101", "102", "103"] * 4


def test_film_respects_reduced_motion(cinema: Callable[..., Page]) -> None:
    page = cinema("all_to_all", still=True, width=390)
    page.evaluate("""() => {
      window.flew = 0;
      new MutationObserver(() => (window.flew += document.querySelectorAll("#film .flying").length)).observe(
        document.getElementById("film"), { childList: true, subtree: true });
    }""")
    for _ in range(4):
        page.click("[data-film=on]")
    expect(page.locator("[data-film=words]")).to_contain_text("Stage 4 of 4")
    assert page.evaluate("window.flew") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_barrier_releases_no_rank_before_the_last_arrives(cinema: Callable[..., Page]) -> None:
    page = cinema("barrier")
    texts = []
    for _ in range(8):
        page.click("[data-film=on]")
        texts.append(page.locator("[data-film=words]").text_content() or "")
    assert ["arrives" in one for one in texts] == [True] * 4 + [False] * 4
    assert texts[-1].endswith("All ranks have left.")
    widths = page.evaluate(
        "[...document.querySelectorAll('#film svg rect')].map((one) => Number(one.getAttribute('width')))"
    )
    assert all(width > 100 for width in widths)
