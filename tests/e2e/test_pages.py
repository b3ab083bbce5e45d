"""Pages of a real installation: a dropped socket, a page without scripts, and choices of the reader."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
from django.contrib import admin
from playwright.sync_api import Browser, Page, WebSocketRoute, expect

from benchmarks.pages import MAX_PAGE_BYTES, measure_page
from contracts.names import telemetry_stream
from jobs.runs.history.store.folder import MANIFEST
from tests.support.board import Board
from tests.support.browser import open_context, open_tab, read_copied_text
from tests.support.processes import wait_until

SPEC: dict[str, Any] = {
    "name": "dropped line",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 80, "global_batch": 4, "seq_len": 64, "warmup_steps": 5, "eval_every": 0, "verify": "off"},
}


ICONS = """() => [...document.querySelectorAll(".material-symbols-outlined")]
  .filter((one) => one.checkVisibility() && one.textContent.trim())
  .map((one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    return [one.textContent.trim(), range.getBoundingClientRect().width / parseFloat(getComputedStyle(one).fontSize)];
  })"""


def test_admin_pages_are_small_and_show_icons(page: Page, running_board: Board) -> None:
    browser = page.context.browser
    assert browser
    for path in ("/admin/", "/admin/jobs/host/", "/admin/auth/user/1/change/"):
        cost = measure_page(browser, running_board.url + path, page.context.storage_state())
        assert cost is not None, path
        assert cost.num_bytes <= MAX_PAGE_BYTES, path
        page.goto(running_board.url + path)
        page.evaluate("document.fonts.ready")
        icons = page.evaluate(ICONS)
        assert icons, path
        assert [name for name, width in icons if width > 1.1] == [], path  # a word is wider than it is high


ADMIN_LINKS = """() => [...document.querySelectorAll("a[href]")]
  .map((link) => new URL(link.href))
  .filter((url) => url.origin === location.origin && url.pathname.startsWith("/admin/"))
  .map((url) => url.pathname)"""


def _visit_row(page: Page, board: str, address: str) -> list[str]:
    """Open a page of a row, and its pages for the history and the deletion. Return the addresses of the latter."""
    own = re.sub(r"change/$", "", address)
    further: list[str] = []
    for visited in (address, own + "history/", own + "delete/"):
        if visited == address or visited in further:
            answer = page.goto(board + visited)
            assert answer is not None
            assert answer.status == 200, visited
        if visited == address:
            further = [link for link in page.evaluate(ADMIN_LINKS) if link.startswith(own)]
    return further


@pytest.mark.extended
def test_admin_pages_of_every_model_open_without_errors(page: Page, running_board: Board) -> None:
    """The fixture `page` fails for errors in the console, such as those of the content security policy."""
    running_board.submit(SPEC)
    page.goto(f"{running_board.url}/admin/")
    lists = {f"/admin/{path}/" for path in re.findall(r'href="/admin/(\w+/\w+)/"', page.content())}
    labels = {f"/admin/{model._meta.app_label}/{model._meta.model_name}/" for model in admin.site._registry}
    assert lists == labels
    visited = []
    for path in sorted(lists):
        answer = page.goto(running_board.url + path)
        assert answer is not None
        assert answer.status == 200, path
        links = sorted({link for link in page.evaluate(ADMIN_LINKS) if link.startswith(path) and link != path})
        kinds = {re.sub(r"[^/]+(?=/change/$)", "ID", link.removeprefix(path)): link for link in links}
        for link in kinds.values():
            visited += [link, *_visit_row(page, running_board.url, link)]
    for part in ("/add/", "/change/", "/history/"):
        assert any(part in address for address in visited), part


def test_page_reconnects_without_data_loss(page: Page, running_board: Board) -> None:
    lines: list[str] = []

    def drop_twice(route: WebSocketRoute) -> None:
        lines.append(route.url)
        server = route.connect_to_server()
        if len(lines) > 2:
            return
        passed, limit = 0, 6 if len(lines) == 1 else 2

        def forward(message: str | bytes) -> None:
            nonlocal passed
            passed += 1
            if passed <= limit:
                route.send(message)
            if passed == limit:
                server.close()
                route.close(code=1012)

        server.on_message(forward)

    page.route_web_socket("**/ws/jobs/**", drop_twice)
    job = running_board.submit(SPEC)
    page.goto(f"{running_board.url}/jobs/{job}/")
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.locator("#fidelity-note")).to_contain_text("80 steps on each of 2 ranks")
    assert len(lines) >= 3
    assert "after=0-0" in lines[0]
    assert "after=0-0" not in lines[2]
    assert page.get_attribute("#fidelity", "data-difference") == "0"
    open_tab(page, "logs")
    # The state and the log arrive on different streams.
    expect(page.locator("#log")).to_contain_text("step 80/80")
    text = read_copied_text(page, lambda: page.click("[data-log=copy]"))
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert steps == [f"{step}/80" for step in range(1, 81)]
    expect(page.locator("#gap")).to_be_hidden()


@pytest.mark.extended
def test_long_name_fits_in_the_admin_list(page: Page, running_board: Board) -> None:
    running_board.submit({**SPEC, "name": "w" * 100, "train": {**SPEC["train"], "steps": 6}})
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(f"{running_board.url}/admin/jobs/job/")
    headings = page.locator("#result_list thead th")
    expect(headings.last).to_contain_text("Created")
    right = headings.last.evaluate("heading => heading.getBoundingClientRect().right")
    assert right <= 1280


def test_the_form_works_without_script(browser: Browser, running_board: Board) -> None:
    context = open_context(browser, java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{running_board.url}/login/?next=/jobs/new/")
    tab.fill("#id_username", running_board.info["username"])
    tab.fill("#id_password", running_board.info["password"])
    tab.click("main button.primary")
    tab.fill("[data-field='name']", "no script")
    tab.fill("[data-field='train.steps']", "many")
    tab.click("#submit")
    expect(tab.locator("[data-for='train.steps'] .problem")).to_have_text('train.steps is "many". Use a whole number.')
    expect(tab.locator("[data-field='name']")).to_have_value("no script")
    tab.fill("[data-field='train.steps']", "1000")
    tab.click("#submit")
    expect(tab.locator("h1")).to_have_text("no script")
    expect(tab.locator("#status")).to_have_text("queued")
    tab.click("#cancel")
    expect(tab.locator("#status")).to_contain_text("cancel")
    context.close()


# Texts that end with an ellipsis clip their content, so only the box of such an element counts.
FITS = """() => [...document.querySelectorAll(".jobs tbody tr > *")].filter((cell) => {
  const clips = (element) => getComputedStyle(element).overflowX === "hidden";
  const isInClipped = ({ parentElement: outside }) =>
    clips(outside) || (outside !== cell && isInClipped(outside));
  const outer = cell.getBoundingClientRect();
  const boxes = [...cell.querySelectorAll("*")].filter((e) => !isInClipped(e)).map((e) => e.getBoundingClientRect());
  if (!clips(cell) && cell.children.length === 0) {
    const content = document.createRange();
    content.selectNodeContents(cell);
    boxes.push(content.getBoundingClientRect());
  }
  return boxes.some((inner) => inner.right > outer.right + 1 || inner.left < outer.left - 1);
}).map((cell) => cell.textContent.trim())"""


@pytest.mark.extended
def test_cells_of_the_job_list_do_not_overlap(page: Page, running_board: Board) -> None:
    spec = {**SPEC, "name": "a" * 59 + " name of a hundred characters, as they go", "layout": {"dp": 2, "tp": 2}}
    spec["train"] = {**SPEC["train"], "steps": 12}
    job = running_board.submit(spec)
    running_board.wait_for_status(job, "succeeded")
    for width in (1440, 1280, 1000, 700, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(running_board.url)
        expect(page.locator(".jobs .steps span").first).to_have_text("12 of 12")
        assert page.evaluate(FITS) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.extended
def test_times_show_day_and_zone(page: Page, running_board: Board) -> None:
    job = running_board.call("GET", "jobs")[0]["id"]
    for path in ("/", f"/jobs/{job}/", "/hosts/"):
        page.goto(running_board.url + path)
        expect(page.locator("time").first).to_have_text(
            re.compile(r"^\d{1,2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}(:\d{2})? [A-Z]")
        )
    page.goto(running_board.url)
    page.locator("time").first.hover()
    expect(page.locator("time").first).to_have_attribute("title", re.compile(r"ago · \d"))


@pytest.mark.extended
@pytest.mark.slow
def test_diverged_run_shows_the_reason(page: Page, running_board: Board) -> None:
    train = {"steps": 200, "learning_rate": 10, "grad_clip": 0, "weight_decay": 10}
    job = running_board.submit({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": train})
    beside = running_board.submit(SPEC)
    page.goto(f"{running_board.url}/jobs/{job}/")
    page.wait_for_selector("#status[data-status=failed]")
    reason = re.compile(r"(loss|gradient norm) is (nan|inf) at step \d+; learning rate 10 .*gradient clip off")
    expect(page.locator("#health [data-sentence]")).to_contain_text(reason)
    running_board.wait_for_status(beside, "succeeded")


@pytest.mark.extended
@pytest.mark.slow
def test_run_with_expired_stream_shows_its_traffic(page: Page, running_board: Board) -> None:
    job = running_board.submit(SPEC)
    running_board.wait_for_status(job, "succeeded")
    saved = running_board.state / "history" / job / "1"
    manifest = saved / MANIFEST
    wait_until(lambda: manifest.exists() and json.loads(manifest.read_text())["ended"], "its history is whole")
    running_board.connect_redis().delete(telemetry_stream(job, 1))
    wait_until(lambda: shutil.rmtree(saved, ignore_errors=True) or not saved.exists(), "it is gone")
    page.goto(f"{running_board.url}/jobs/{job}/")
    expect(page.locator("#traffic-chart")).to_contain_text("is no longer stored")
    expect(page.locator("#fidelity")).to_contain_text("0 B")


@pytest.mark.extended
def test_explanation_shows_its_last_column(page: Page, running_board: Board) -> None:
    for width in (1440, 1000, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{running_board.url}/jobs/new/")
        page.locator("[data-explain]").first.click()
        source = page.locator("#explain .source").first
        expect(source).to_be_visible()
        box, frame = source.bounding_box(), page.locator("#explain").bounding_box()
        assert box
        assert frame
        assert box["x"] + box["width"] <= frame["x"] + frame["width"]
        assert box["width"] >= 200


def test_chosen_theme_stays(page: Page, running_board: Board) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    light = background()
    page.click("#theme-toggle")
    dark = background()
    assert light != dark
    page.reload()
    assert background() == dark
    expect(page.locator("#theme-toggle")).to_have_text("Light")


@pytest.mark.extended
def test_unavailable_choices_show_the_reason(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    holder = page.locator("[data-for='layout.tp']")
    expect(holder.locator("input[value='8']")).to_be_disabled()
    expect(holder.locator(".reasons")).to_contain_text("4 heads are not divisible by 8")
    assert "r-layout.tp" in (holder.get_attribute("aria-describedby") or "")


@pytest.mark.extended
def test_rank_grid_works_by_keyboard(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    page.locator(".rank-grid button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-show=ranks] .note")).to_have_text("rank 2: pp 0 · dp 1 · tp 0 · layers 0–3")  # noqa: RUF001


@pytest.mark.extended
def test_custom_sizes_start_from_the_preset(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    page.select_option("#f-model\\.preset", "llama-tiny")
    page.select_option("#f-model\\.preset", "")
    expect(page.locator("[data-field='model.ffn_hidden_size']")).to_have_value("352")
    page.fill("[data-field='model.num_layers']", "3")
    page.locator("label", has=page.locator("[name='layout.dp'][value='1']")).click()
    page.locator("label", has=page.locator("[name='layout.tp'][value='1']")).click()
    expect(page.locator("#figures")).to_contain_text("dp 1 x pp 1 x tp 1")
    expect(page.locator("[data-show=traffic]")).to_contain_text("A single rank sends no traffic.")
    page.fill("[data-field='train.steps']", "1000")
    page.click("#submit")
    page.wait_for_url("**/jobs/*/")
    job = page.url.rstrip("/").rsplit("/", 1)[1]
    model = running_board.get_job(job)["spec"]["model"]
    assert (model["num_layers"], model["preset"], model["arch"]) == (3, None, "llama")
    running_board.call("POST", f"jobs/{job}/cancel")
    running_board.wait_for_status(job, "cancelled")
