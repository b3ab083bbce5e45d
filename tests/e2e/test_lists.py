"""The job list, the form, the comparison and the palette, by mouse and keyboard."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.board import Board
from tests.support.processes import wait_until

SPEC: dict[str, Any] = {
    "name": "left run",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 12, "global_batch": 4, "seq_len": 64, "warmup_steps": 2, "eval_every": 6, "verify": "off"},
}
LONG = "w" * 60 + " and words " * 3


@pytest.fixture(scope="module")
def runs(running_board: Board) -> list[str]:
    """Return two ended runs with different layouts."""
    other = {**SPEC, "name": LONG, "layout": {"tp": 2}}
    jobs = [running_board.submit(spec) for spec in (SPEC, other)]
    for job in jobs:
        running_board.wait_for_status(job, "succeeded")
    return jobs


def inside(page: Page, node: Locator) -> bool:
    """Return whether an element is fully visible without scrolling."""
    box, size = node.bounding_box(), page.viewport_size
    assert box, node
    assert size
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"] and box["x"] + box["width"] <= size["width"]


@pytest.mark.extended
def test_form_fits_on_one_screen(page: Page, running_board: Board) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    for field in ("name", "model.preset", "layout.dp", "layout.pp", "layout.tp", "layout.zero", "train.global_batch"):
        assert inside(page, page.locator(f"[data-for='{field}']").first), field
    for figure in ("memory", "fits", "time", "traffic"):
        assert inside(page, page.locator(f"[data-head='{figure}']")), figure
    expect(page.locator("[data-head=fits]")).to_contain_text("fits")
    assert inside(page, page.locator("#submit"))
    page.set_viewport_size({"width": 390, "height": 844})
    assert inside(page, page.locator("#submit")), "Submit stays in sight"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.extended
def test_wrong_field_opens_its_fold(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    hidden = page.locator("[data-for='train.warmup_steps']")
    expect(hidden).to_be_hidden()
    page.fill("[name='train.steps']", "5")  # fewer than the warm-up takes
    expect(hidden.locator(".problem")).to_be_visible()


def test_fills_in_the_best_layout_and_undoes_it(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    chosen = "[...document.querySelectorAll('#own-layout :checked')].map((one) => one.name + one.value).join()"
    before = page.evaluate(chosen)
    page.locator("[data-for='layout.dp'] label", has_text="4").click()
    page.locator("[data-for='layout.tp'] label", has_text="1").click()
    requests = page.evaluate(chosen)
    page.click("#best")
    shown = page.locator("#best-status [role=status]")
    expect(shown).to_contain_text(re.compile(r"Fastest of [\d,]+ layouts that fit"))
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    expect(page.locator("[data-show=world]")).to_have_text("4 ranks")
    filled = page.evaluate(chosen)
    assert filled not in (before, requests)
    page.locator("#best-status button").click()
    assert page.evaluate(chosen) == requests


@pytest.mark.extended
def test_best_layout_enables_unavailable_boxes(page: Page, running_board: Board) -> None:
    """Sequence parallelism is unavailable until tp is 2."""
    best = {"layout": {"dp": 1, "tp": 2, "sequence_parallel": True}, "micro_batches": 1, "step_s": 1}
    found = {"best": [best], "fitting": 1, "considered": 1, "complete": True, "neighbours": []}
    page.route("**/plan/search/", lambda route: route.fulfill(json=found))
    spec = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}}
    page.goto(f"{running_board.url}/jobs/new/?spec={quote(json.dumps(spec))}")
    expect(page.locator("[name='layout.sequence_parallel']")).to_be_disabled()
    page.click("#best")
    expect(page.locator("#compare")).to_have_attribute("href", re.compile("sequence_parallel%22%3Atrue"))


def test_selected_jobs_stay_selected_after_a_refresh(page: Page, running_board: Board, runs: list[str]) -> None:
    page.goto(running_board.url)
    expect(page.locator("#chosen")).to_have_text("None selected")
    for key in ("j", "x", "j", "x"):
        page.keyboard.press(key)
    expect(page.locator("#chosen")).to_have_text("2 selected")
    page.evaluate("for (const row of document.querySelectorAll('#jobs tr')) row.dataset.old = ''")
    page.evaluate("document.getElementById('jobs').dispatchEvent(new CustomEvent('refresh'))")
    expect(page.locator("tr[data-old]")).to_have_count(0)
    expect(page.locator("tr[data-chosen]")).to_have_count(2)
    expect(page.locator(".job-name:focus"), "keys continue from the current row").to_have_count(1)
    page.keyboard.press("t")
    page.keyboard.type("ci")
    page.click("button[value=tag]")
    expect(page.locator(".undo")).to_contain_text("2 of 2 jobs tagged.")
    page.locator("a.tag", has_text="ci").first.click()
    assert page.url.endswith("?tag=ci")
    expect(page.locator("tr[data-job]")).to_have_count(2)


@pytest.mark.extended
def test_key_restores_an_archived_job(page: Page, running_board: Board, runs: list[str]) -> None:
    page.goto(running_board.url)
    row = page.locator(f"tr[data-job='{runs[0]}']")
    row.locator("input").check()
    page.keyboard.press("e")
    expect(page.locator(".undo")).to_contain_text("1 of 1 jobs archived.")
    expect(row).to_have_count(0)
    page.keyboard.press("u")
    expect(page.locator(".undo")).to_contain_text("1 of 1 jobs restored.")
    expect(row).to_have_count(1)


def test_compares_runs(page: Page, running_board: Board, runs: list[str]) -> None:
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{running_board.url}/compare/?jobs={','.join(runs)}")
        expect(page.locator("#charts canvas").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    specs = page.locator("section", has=page.locator("#spec-title"))
    expect(specs.locator("tr", has_text="layout.dp").first.locator("td")).to_have_text(["2", "1"])
    expect(page.locator(".run[data-baseline] .job-name")).to_have_text("left run")
    page.locator(".pin").click()
    expect(page.locator(".run[data-baseline] .job-name")).to_have_text(LONG.strip())
    step = page.locator("section", has=page.locator("#figures-title")).locator("tr", has_text="step time").first
    expect(step.locator("td").first).to_contain_text(re.compile(r"\d times as fast"))


@pytest.mark.extended
def test_dragging_over_steps_compares_them(page: Page, running_board: Board, runs: list[str]) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{running_board.url}/compare/?jobs={','.join(runs)}")
    chart = page.locator("#charts figure", has_text="drag over slow steps").locator(".u-over")
    size = chart.bounding_box()
    assert size
    chart.hover(position={"x": 0.4 * size["width"], "y": size["height"] / 2})
    box = chart.bounding_box()
    assert box
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    shown = page.locator(".slow-steps")
    expect(shown).to_contain_text(re.compile(r"A: steps \d+ to \d+"))
    expect(shown.locator("p").first).to_contain_text("ms per step in")


def test_palette_finds_jobs_hosts_pages_and_actions_by_keyboard(
    page: Page, running_board: Board, runs: list[str]
) -> None:
    page.goto(running_board.url)
    page.keyboard.press("Control+k")
    box = page.get_by_role("combobox", name="Find a job, host, project, page, or action")
    expect(box).to_be_focused()
    expect(page.get_by_role("dialog").get_by_role("option", name="Show keyboard shortcuts")).to_be_visible()
    page.keyboard.type("left")
    options = page.get_by_role("dialog").get_by_role("option")
    expect(options.first).to_contain_text("left run")
    assert box.get_attribute("aria-activedescendant") == options.first.get_attribute("id")
    expect(options.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{runs[0]}/")
    page.keyboard.press("Control+k")
    page.keyboard.type("copy as json")
    page.keyboard.press("Enter")
    expect(page.locator(".message", has_text="Job copied as JSON.")).to_be_visible()
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["id"] == runs[0]
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)

    def at_hosts() -> bool:  # the second key counts for a moment after the first, which a busy machine may miss
        page.keyboard.press("g")
        page.keyboard.press("h")
        page.wait_for_timeout(300)
        return page.url.endswith("/hosts/")

    wait_until(at_hosts, "the page of hosts")


@pytest.mark.extended
def test_shortcut_sheet_lists_every_key(page: Page, running_board: Board, runs: list[str]) -> None:
    page.goto(running_board.url)
    expect(page.locator("#chosen")).to_have_text("None selected")
    page.keyboard.press("?")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    for words in ("Next job", "Find a job, host, project, page, or action", "New job", "Overview"):
        expect(sheet.get_by_text(words, exact=True).first).to_be_visible()
    page.keyboard.press("Escape")
    page.fill(".filters [name=q]", "")
    page.locator(".filters [name=q]").press("?")
    expect(page.locator("dialog[open]")).to_have_count(0), "what is typed is text"


def test_menu_of_a_narrow_screen_has_every_page(page: Page, running_board: Board) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{running_board.url}/overview/")
    expect(page.locator("#nav")).to_be_hidden()
    page.click("#menu")
    for name in ("Overview", "Queue", "Import"):
        assert inside(page, page.locator("#nav a", has_text=re.compile(f"^{name}$"))), name
    page.locator(".own summary").click()
    for name in ("Account", "Projects", "Notifications", "Documentation", "REST API schema", "Admin", "Log out"):
        assert inside(page, page.locator(".own").get_by_text(name, exact=True)), name
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.extended
def test_longest_project_name_fits_on_a_phone(page: Page, running_board: Board) -> None:
    name = running_board.call("POST", "projects", {"name": "p" * 60})["name"]
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/notifications/", "/projects/", f"/projects/{name}/", f"/projects/{name}/webhooks/", "/"):
        page.goto(f"{running_board.url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
