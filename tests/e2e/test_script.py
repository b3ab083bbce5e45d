"""Your own script, from the form to its traffic on the page."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.board import Board
from tests.support.browser import open_tab

SCRIPTS = Path(__file__).parents[1] / "workers/meter/scripts"


def test_script_runs_unchanged_with_measured_groups(page: Page, running_board: Board) -> None:
    shutil.copy(SCRIPTS / "groups.py", running_board.state / "scripts" / "groups.py")
    page.get_by_role("link", name="Run a script").click()
    page.fill("[data-field='script.path']", "groups.py")
    page.fill("[data-field='layout.dp']", "4")
    page.get_by_role("button", name="Run script").click()
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.get_by_role("heading", name="Script", exact=True)).to_be_visible()
    expect(page.locator(".job-line")).to_contain_text("script · groups.py · 4 ranks")
    expect(page.locator("#script-steps")).to_have_text(re.compile("^(no step|steps|[0-9]+ .*) seen$"))
    expect(page.locator("main")).not_to_contain_text("gpt-tiny")
    expect(page.locator("main")).not_to_contain_text("Waiting", use_inner_text=True)
    open_tab(page, "traffic")
    page.select_option("#phase", "setup")
    rows = page.locator("#collectives tr")
    expect(rows.filter(has_text="ranks 0,2")).to_contain_text("all-reduce")
    expect(rows.filter(has_text="all-to-all")).to_contain_text("128 B")
    page.locator("#heat-pairs").scroll_into_view_if_needed()
    expect(page.locator("#pairs-predicted")).to_be_hidden()
    open_tab(page, "memory")
    expect(page.locator("#gauges")).not_to_contain_text("plan")


def test_uploaded_folder_runs_on_a_host_and_is_kept_in_a_copy(page: Page, running_board: Board, tmp_path: Path) -> None:
    archive = tmp_path / "demo.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("lib.py", "WORD = 'from the upload'\nprint('step 3 loss 2.5')")
        packed.writestr("train.py", "import lib\nopen('written', 'w').close()\nprint(lib.WORD, flush=True)\n")
    page.get_by_role("link", name="Run a script").click()
    page.set_input_files("#upload-file", archive)
    expect(page.locator("#upload-status")).to_contain_text("Uploaded: demo.zip, 2 files")
    expect(page.locator("[data-field='script.path']")).to_have_value("train.py")
    page.fill("[data-field='layout.dp']", "1")
    page.get_by_role("button", name="Run script").click()
    page.wait_for_selector("#status[data-status=succeeded]")
    expect(page.locator("#figure-loss")).to_have_text("2.5000")
    expect(page.locator("#figure-loss-step")).to_have_text("step 3")
    expect(page.locator("#upload")).to_contain_text("Script: train.py from upload demo.zip (sha256 ")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert Path(download.value.path()).read_bytes() == archive.read_bytes()
    job = page.url.rstrip("/").rpartition("/")[2]
    running_board.wait_for_line(job, "from the upload")
    page.click("#copy-job")
    expect(page.locator("#upload-status")).to_have_text("Uploaded: demo.zip, 2 files.")
    expect(page.locator("[data-field='script.path']")).to_have_value("train.py")


WAITING = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
raise SystemExit("nothing was joined" + "!" * 600)
"""


@pytest.mark.extended
def test_script_that_fails_early_shows_no_empty_panel(page: Page, running_board: Board) -> None:
    go = running_board.state / "scripts" / "go"
    (running_board.state / "scripts" / "waiting.py").write_text(WAITING)
    script = {"path": "waiting.py", "args": [str(go)]}
    job = running_board.submit({"kind": "script", "layout": {"dp": 2}, "script": script})
    page.goto(f"{running_board.url}/jobs/{job}/#memory")
    page.wait_for_selector("#memory-chart[data-points]")  # the tab appears with the first gauge and opens by itself
    go.touch()
    page.wait_for_selector("#status[data-status=failed]")
    page.reload()
    expect(page.locator("#nothing")).to_be_hidden()  # the verdict states the failure
    expect(page.locator("#tab-traffic")).to_be_hidden()
    for panel in ("traffic", "timeline-panel", "heat-pairs", "heat-time", "collectives-panel"):
        expect(page.locator(f"#{panel}")).to_be_hidden()
    page.wait_for_selector("#memory-chart[data-window]")
    first, last = map(float, str(page.locator("#memory-chart").get_attribute("data-window")).split())
    assert first > 1.6e9, "dated by what was measured"
    assert last > first


@pytest.mark.extended
@pytest.mark.slow
def test_missing_script_has_a_message(running_board: Board) -> None:
    missing = running_board.submit({"kind": "script", "layout": {"dp": 2}, "script": {"path": "none.py"}})
    found = running_board.wait_for_status(missing, "failed")
    assert "is 'none.py', which does not exist below the script root" in found["exit"]["reason"]
