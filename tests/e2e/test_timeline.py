"""Heatmaps, timelines and imports by mouse and keyboard."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from contracts.names import requested_timelines_key
from tests.jobs.traces.hostile import HOSTILE
from tests.jobs.traces.test_imports import gpu_trace
from tests.support.browser import open_context
from tests.support.processes import ROOT, run_redis
from tests.support.telemetry import create_synthetic_run
from tests.support.traces import build_collective, build_inspector_log
from tests.support.traces import trace_folder as trace_folder
from tests.support.web import Site, run_site


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    static = shutil.copytree(ROOT / "webapp" / "static", folder / "static")
    with (
        run_redis(folder / "redis") as redis,
        run_site(
            f"sqlite:///{folder / 'db.sqlite3'}", redis, folder / "web", MESHBOARD_STATIC_ROOT=str(static)
        ) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def job(here: Site) -> str:
    return create_synthetic_run(here, 4)


def visit(browser: Browser, here: Site, path: str, who: str = "owner") -> Page:
    context = open_context(browser, viewport={"width": 1280, "height": 900})
    context.add_cookies([{"name": "sessionid", "value": here.users[who]["session"], "url": here.url}])
    page = context.new_page()
    page.goto(f"{here.url}{path}")
    return page


def window_of(page: Page) -> tuple[float, float]:
    found = page.locator(".timeline-canvas")
    return float(found.get_attribute("data-from") or "nan"), float(found.get_attribute("data-to") or "nan")


@pytest.mark.extended
def test_legend_color_and_label_stay_on_one_line(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/")
    legend = page.locator(".timeline-canvas ~ .legend")
    expect(legend.locator(".swatch").first).to_be_visible()
    for width in range(20, 200, 4):  # wherever on a line an entry begins, among however many
        lines = legend.evaluate(
            """(legend, width) => {
            legend.style.width = `${width}px`;
            return [...legend.querySelectorAll(".swatch")].map(square => {
                const [words, box] = [document.createRange(), square.getBoundingClientRect()];
                words.selectNode(square.nextSibling);
                return [...words.getClientRects()].map(line => Math.abs(line.top + line.bottom - box.top - box.bottom));
            });
        }""",
            width,
        )
        assert lines, "no colour is told"
        assert all(len(of) == 1 and of[0] < 20 for of in lines), (width, lines)


def test_timeline_zooms_and_moves_by_mouse_and_keys(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/")
    canvas = page.locator(".timeline-canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Timeline of step 16: 4 ranks, \d+ events"))
    start, end = window_of(page)
    assert start == 0
    box = canvas.bounding_box()
    assert box
    canvas.hover(position={"x": 64 + (box["width"] - 64) / 2, "y": 40})
    page.mouse.wheel(0, -300)
    page.wait_for_function("() => Number(document.querySelector('.timeline-canvas').dataset.from) > 0")
    near = window_of(page)
    assert near[1] - near[0] == pytest.approx(end / 1.25)
    assert (near[0] + near[1]) / 2 == pytest.approx(end / 2, rel=0.02), "the event at the pointer stays in place"
    page.mouse.move(0, 0)  # keys continue from the event at the pointer
    canvas.focus()
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('.timeline-canvas').dataset.from === '0'")
    shown = page.locator(".timeline-status")
    page.keyboard.press(".")
    expect(shown).to_contain_text("forward of micro-batch 0")
    page.keyboard.press("ArrowDown")
    expect(shown).to_contain_text("dp all-reduce")
    page.keyboard.press("ArrowDown")
    expect(shown).to_contain_text("tp all-reduce")
    expect(shown).to_contain_text("for rank 1")
    rows = page.locator("#timeline-collectives tr")
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("rank 1")
    page.select_option("#timeline-step", "8")
    expect(canvas).to_have_attribute("aria-label", re.compile("Timeline of step 8"))
    link = page.locator("[data-format=chrome]").get_attribute("href")
    assert link is not None
    assert "step=8" in link
    assert here.call("GET", link, headers=here.build_cookie_header("owner")).json()["traceEvents"]
    page.context.close()


@pytest.mark.extended
def test_timeline_page_is_live(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/")
    badge = page.locator(".job-title .badge[role=status]")
    expect(badge).to_have_text("live")
    expect(badge).to_have_attribute("data-tone", "good")


@pytest.mark.extended
def test_timeline_page_requests_a_traced_step(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/")
    page.fill("#timeline-wanted", "77")
    page.click("#timeline-ask button")
    expect(page.locator("#timeline-ask output")).to_contain_text("Tracing step 77.")
    assert here.redis.client().smembers(requested_timelines_key(job, 1)) == {b"77"}
    page.context.close()


def test_heatmap_shows_both_ranks_bytes_and_units(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/")
    cells = page.locator("#pairs-measured .heat-cells")
    cells.scroll_into_view_if_needed()
    expect(page.locator("#pairs-legend")).to_contain_text("MB")
    shown = page.locator("#pairs-status")
    expect(page.locator(".timeline-canvas")).to_have_attribute("aria-label", re.compile("Timeline of step"))
    expect(shown).to_contain_text("means of 30 steps")  # and with that all has come that moves the map
    box = cells.bounding_box()
    assert box
    cells.hover(position={"x": box["width"] * 0.6, "y": box["height"] * 0.1})
    expect(shown).to_have_text(re.compile(r"rank 0 to rank 2, per step: [\d,]+ B measured, [\d,]+ B predicted"))
    before = shown.text_content()
    cells.focus()
    page.keyboard.press("ArrowRight")
    expect(shown).not_to_have_text(before or "")
    expect(shown).to_contain_text("to rank 3")
    page.select_option("#pairs-axis", "tp")
    expect(page.locator("#pairs-status")).to_contain_text("rank 0 to rank 3, per step: 0 B measured")
    over_time = page.locator("#heat-time .heat-cells")
    over_time.scroll_into_view_if_needed()
    expect(page.locator("#heat-time .heat-rows span")).to_have_text(["0", "1", "2", "3"])
    over_time.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#heat-time-status")).to_have_text(re.compile(r"rank 1 · .*B/s over 500 ms"))
    page.select_option("#heat-what", "still")
    expect(page.locator("#heat-time-legend")).to_contain_text("%")
    page.context.close()


@pytest.mark.extended
def test_timeline_of_an_invisible_job_is_missing(browser: Browser, here: Site, job: str) -> None:
    page = visit(browser, here, f"/jobs/{job}/timeline/", who="stranger")
    expect(page.locator(".timeline-canvas")).to_have_count(0)
    page.context.close()


FILES: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "kineto": ([(f"r{rank}.json", gpu_trace(rank)) for rank in (0, 1)], "Kineto · 2 ranks"),
    "inspector": (
        [(f"{rank}.log", build_inspector_log(rank, build_collective(1, 100 + 30 * rank, 50))) for rank in (0, 1)],
        "NCCL Inspector · 2 ranks",
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", FILES)
def test_imported_files_have_a_timeline(browser: Browser, here: Site, tmp_path: Path, name: str) -> None:
    files, words = FILES[name]
    drawn(browser, here, [_written(tmp_path, *file) for file in files], words)


def test_imported_flight_recorder_dump_has_a_timeline(browser: Browser, here: Site, trace_folder: Path) -> None:
    drawn(browser, here, [trace_folder / "fr_rank_0", trace_folder / "fr_rank_1"], "flight recorder · 2 ranks")


def drawn(browser: Browser, here: Site, paths: list[Path], words: str) -> None:
    page = visit(browser, here, "/import/")
    page.set_input_files("#files", [str(path) for path in paths])
    page.click("#upload button")
    page.wait_for_url(re.compile(r"/import/i[a-z2-7]{11}/$"))
    expect(page.locator(".page-head")).to_contain_text(words)
    expect(page.locator(".timeline-canvas")).to_have_attribute("aria-label", re.compile("2 ranks"))
    canvas: Any = page.locator(".timeline-canvas")
    canvas.focus()
    page.keyboard.press(".")
    expect(page.locator(".timeline-status")).to_contain_text("rank 0")
    page.locator("#pairs-measured .heat-cells").focus()
    expect(page.locator("#pairs-status")).to_contain_text("rank 0 to rank 0")
    page.context.close()


@pytest.mark.extended
def test_hostile_file_is_refused_with_its_name(browser: Browser, here: Site, tmp_path: Path) -> None:
    page = visit(browser, here, "/import/")
    path = _written(tmp_path, "nice_rank_0", HOSTILE["stack global"])
    page.set_input_files("#files", str(path))
    page.click("#upload button")
    expect(page.locator("#upload-status")).to_contain_text("nice_rank_0: Byte 14 is the opcode STACK_GLOBAL")
    expect(page.locator("#upload-status")).to_contain_text("pickle: ")
    page.context.close()


def _written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.extended
def test_respects_reduced_motion_and_explains_missing_scripts(browser: Browser, here: Site) -> None:
    still = open_context(browser, reduced_motion="reduce")
    page = still.new_page()
    page.goto(f"{here.url}/login/")
    moving = """() => {
      document.body.insertAdjacentHTML("beforeend", '<span class="badge" data-status="running">running</span>');
      return document.getAnimations().length;
    }"""
    assert page.evaluate(moving) == 0
    still.close()
    plain = open_context(browser, java_script_enabled=False)
    page = plain.new_page()
    page.goto(f"{here.url}/login/")
    expect(page.locator("noscript .message")).to_be_visible()
    plain.close()


@pytest.mark.extended
def test_overlays_of_the_list_close_with_escape(browser: Browser, here: Site) -> None:
    page = visit(browser, here, "/?q=nothing")
    states = page.locator("summary", has_text="Status")
    box = page.get_by_role("checkbox", name="failed")
    states.focus()
    page.keyboard.press("Enter")
    expect(box).to_be_visible()
    box.focus()
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    expect(states).to_be_focused()
    states.click()
    expect(box).to_be_visible()
    page.locator("h1").click()
    expect(box).to_be_hidden()
    page.context.close()


TURNED = """() => {
  const turns = /[\\u202a-\\u202e\\u2066-\\u2069]/, found = [];
  const walk = document.createTreeWalker(document.body, 5); // elements and text
  for (let node = walk.currentNode; node; node = walk.nextNode()) {
    if (node.parentElement?.closest("script")) continue;
    const named = (name) => node.getAttribute(name) ?? "";
    const words = node.nodeType === 3 ? [node.data] : ["title", "aria-label"].map(named);
    found.push(...words.filter((text) => turns.test(text)));
  }
  return found;
}"""


@pytest.mark.extended
def test_bidi_characters_of_old_names_do_not_reverse_text(browser: Browser, here: Site) -> None:
    """Names appear in templates, in JSON, and on a socket."""
    spec = {"name": "old", "model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}}
    made = here.submit_job(spec)
    old = "paid \u202egnp.exe"
    stored = sqlite3.connect(here.database_url.removeprefix("sqlite:///"), timeout=30)
    with contextlib.closing(stored) as database, database:
        named = json.dumps({**spec, "name": old})
        database.execute("UPDATE jobs_job SET name = ?, wait_reason = ? WHERE id = ?", (old, f"waits for {old}", made))
        database.execute("UPDATE jobs_job SET spec = json_patch(spec, ?) WHERE id = ?", (named, made))
        database.execute("UPDATE jobs_statechange SET reason = ? WHERE job_id = ?", (old, made))
    assert here.call("GET", f"/api/v1/jobs/{made}", headers=here.build_token_header("owner")).json()["name"] == old
    page = visit(browser, here, f"/jobs/{made}/")
    expect(page.locator("#waiting [data-reason]")).to_have_text("waits for paid \\u202egnp.exe")
    assert page.evaluate(TURNED) == []
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Find a job").fill("paid")
    expect(page.locator("#palette-list li").first).to_contain_text("paid \\u202egnp.exe")
    assert page.evaluate(TURNED) == []
    for path in ("/", "/queue/", "/overview/", f"/jobs/new/?from={made}"):
        page.goto(f"{here.url}{path}")
        page.wait_for_load_state("networkidle")
        assert page.evaluate(TURNED) == [], path
    page.context.close()
