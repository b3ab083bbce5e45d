"""Every named URL is looked at by `python -m tests.screens`: a new page cannot be forgotten."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from django.urls import path

from tests.screens.pages import EXEMPT, World, named_urls, pages, unknown
from tests.support.processes import ROOT

WORLD = World({"trained": "a", "piped": "b", "failed": "c"}, "here")


def test_every_named_url_can_be_opened_or_says_why_not() -> None:
    assert unknown() == {}, "say in tests/screens/pages.py what these parameters are, or why it is no page"
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
    assert len(names) == len(set(names)), "each has a picture of its own"


@pytest.mark.parametrize("program", ["tests.screens", "tests.screens.sizes"])
def test_whoever_looks_at_the_pages_can_start(program: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr


urlpatterns = [
    path("moon/<str:crater>/", lambda _: None, name="moon"),
    path("jobs/<str:job_id>/mine/", lambda _: None, name="new"),
]


def test_a_new_page_is_looked_at_by_itself_and_one_that_cannot_be_is_named(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    assert unknown() == {"moon": {"crater"}}
