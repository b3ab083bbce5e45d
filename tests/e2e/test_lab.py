"""Collectives in a browser: the example, a benchmark, its results, and the captured tensors."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.support.board import Board
from tests.support.browser import read_copied_text

CASES = {"min_bytes": "1024", "max_bytes": "4096", "factor": "4", "iterations": "3", "warmup": "1"}


def test_benchmark_of_collectives_shows_its_points_and_buffers(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/collectives/all-to-all/")
    expect(page.locator("#no-run")).to_contain_text("No run has captured this collective yet.")
    expect(page.locator(".held text.rank")).to_have_text([f"rank {rank}" for rank in range(4)])
    expect(page.locator("#film")).to_be_visible()
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Collectives").click()
    expect(page.locator("nav [aria-current=page]")).to_have_text("Collectives")
    expect(page.locator("svg.mini")).to_have_count(11)
    page.fill("[data-field='lab.ranks']", "1, 3")
    for name, value in CASES.items():
        page.fill(f"[data-field='lab.{name}']", value)
    page.get_by_role("button", name="Run benchmark").click()

    page.wait_for_selector("#status[data-status=succeeded]")
    rows = page.locator("#lab-rows tr")
    expect(rows).to_have_count(10 * 2 + 1)
    expect(page.locator("#lab-wrong")).to_have_text("All elements correct")
    expect(page.locator("#lab-note")).to_contain_text("ranks 1, 3 of 4")
    expect(rows.filter(has_text="all-to-all").first).to_contain_text("512 B")
    drawn = "document.querySelector('#lab-chart canvas').toDataURL()"
    times = page.evaluate(drawn)
    page.locator("label:has([value=busbw])").click()
    assert page.evaluate(drawn) != times
    lines = read_copied_text(page, lambda: page.click("#lab-csv")).splitlines()
    assert lines[0].startswith("primitive,num_bytes,seconds,algbw,busbw,wrong,")
    assert len(lines) == 22
    assert re.fullmatch(r"broadcast,1024,[0-9.e-]+,[0-9.]+,[0-9.]+,0,1536,1024,1024", lines[1])

    rows.filter(has_text="all-to-all").first.locator("a").click()
    picture = page.locator(".held svg.boxes")
    expect(picture.locator("text.rank")).to_have_text(["rank 1", "rank 3"])
    after = page.locator(".held tbody tr td:last-child")
    expect(after).to_have_text(["200, 201, 400, 401", "202, 203, 402, 403"])
    film = page.locator("#film")
    expect(film).to_contain_text("The tensors of the last stage equal the captured tensors.")
    film.locator("[data-film=place]").fill("2")
    played = [
        "200",
        "201",
        "202",
        "203",
        "400",
        "401",
        "402",
        "403",
        "200",
        "201",
        "400",
        "401",
        "202",
        "203",
        "402",
        "403",
    ]
    assert sorted(film.locator("svg text:not(.head, .rank)").all_text_contents()) == sorted(played)
    page.locator("[data-copies=call]").focus()
    assert read_copied_text(page, lambda: page.keyboard.press("Enter")) == "dist.all_to_all_single(received, sent)"

    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/collectives/", "/collectives/all-to-all/", "/collectives/barrier/"):
        page.goto(running_board.url + path)
        expect(page.locator("main .panel").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
