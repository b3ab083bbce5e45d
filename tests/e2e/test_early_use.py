"""Pages that a user operates before their modules have loaded."""

from __future__ import annotations

import zipfile
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.e2e.slow_pages import hold_modules
from tests.support.board import Board


def test_script_chosen_before_the_modules_load_is_uploaded(page: Page, running_board: Board, tmp_path: Path) -> None:
    archive = tmp_path / "demo.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("train.py", "print('step 1 loss 2.5')")
    with hold_modules(page, f"{running_board.url}/jobs/script/"):
        page.set_input_files("#upload-file", archive)
    expect(page.locator("#upload-status")).to_contain_text("Uploaded: demo.zip, 1 file")


def test_import_sent_before_the_modules_load_is_checked(page: Page, running_board: Board, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").touch()
    with hold_modules(page, f"{running_board.url}/import/"):
        page.set_input_files("#files", tmp_path / "rank0.json")
        page.get_by_role("button", name="Import", exact=True).click()
    expect(page.locator("#upload-status")).to_have_text("rank0.json is empty.")


def test_button_pressed_before_the_modules_load_works_once(page: Page, running_board: Board) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    with hold_modules(page, f"{running_board.url}/jobs/new/"):
        for _ in range(2):
            page.get_by_role("button", name="Menu").click()
    expect(page.locator("#menu")).to_have_attribute("aria-expanded", "true")
    page.get_by_role("button", name="Menu").click()
    expect(page.locator("#menu")).to_have_attribute("aria-expanded", "false")
