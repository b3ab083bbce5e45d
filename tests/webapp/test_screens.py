"""`python -m tests.screens` opens every named URL, and a test fails if a new page is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from django.urls import path

from tests.screens.pages import EXEMPT, World, named_urls, pages, unknown
from tests.support.processes import ROOT

WORLD = World({"trained": "a", "piped": "b", "failed": "c"}, "here")


def test_screens_open_every_named_url() -> None:
    assert unknown() == {}, (
        "add values of these parameters to tests/screens/pages.py, or exempt the address with a reason"
    )
    assert set(named_urls()) >= set(EXEMPT)
    shown = {page.path.partition("?")[0] for page in pages(WORLD)}
    assert {
        "/",
        "/jobs/new/",
        "/jobs/a/",
        "/jobs/b/",
        "/jobs/c/",
        "/collectives/barrier/",
        "/hosts/here/",
        "/login/",
    } <= shown
    assert "/admin/jobs/job/" in shown
    names = [page.name for page in pages(WORLD)]
    assert len(names) == len(set(names)), "each page has its own picture"


@pytest.mark.parametrize("program", ["tests.screens", "tests.screens.sizes"])
def test_screens_can_start(program: str) -> None:
    content = subprocess.run(
        [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert content.returncode == 0, content.stderr


urlpatterns = [
    path("moon/<str:crater>/", lambda _: None, name="moon"),  # type: ignore[return-value]
    path("jobs/<str:job_id>/mine/", lambda _: None, name="new"),  # type: ignore[return-value]
]


def test_screens_include_new_pages(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    assert unknown() == {"moon": {"crater"}}
