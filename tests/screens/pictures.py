"""Take the pictures of the documentation from real runs: docs/pictures/*.png.

    python -m tests.screens.pictures [--up var/up.json] [--only WORD]

With `--up`, the command uses the jobs of an earlier call on a running board.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.support.board import Board, run_board
from tests.support.browser import log_in, run_chromium
from tests.support.processes import ROOT

ROOM = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1200, 800
COLOURS = 128  # a picture with flat colors shows no loss
FIRST = {"global_batch": 16, "seq_len": 128, "micro_batches": 2, "eval_every": 20, "steps": 80}
SHORT = {"global_batch": 8, "seq_len": 64, "steps": 30, "eval_every": 0}


def _train(layout: dict[str, Any], preset: str = "gpt-tiny", **train: Any) -> dict[str, Any]:
    return {"model": {"preset": preset}, "layout": layout, "train": {**SHORT, **train}}


LIVE = "job"  # of a run that is on its way
LIVE_STEPS, LIVE_FROM = 400, 250
# What is run for them, by the word that its pictures begin with.
JOBS: dict[str, dict[str, Any]] = {
    "first": {"name": "first", **_train({"dp": 2, "tp": 2, "zero": 1}, **FIRST)},
    "second": {"name": "second", **_train({"dp": 4, "zero": 1}, **FIRST)},
    "dp": {"name": "dp 4", **_train({"dp": 4})},
    "zero": {"name": "ZeRO-3 over dp 4", **_train({"dp": 4, "zero": 3})},
    "tp": {"name": "tp 4", **_train({"tp": 4})},
    "sp": {"name": "tp 4, sequence parallel", **_train({"tp": 4, "sequence_parallel": True})},
    "pp": {"name": "pp 4", **_train({"pp": 4}, micro_batches=8)},
    "cp": {"name": "cp 4", **_train({"cp": 4}, preset="llama-tiny")},
    "ep": {"name": "ep 4", **_train({"dp": 4, "ep": 4}, preset="mixtral-tiny")},
    "lab": {"kind": "lab", "name": "benchmark", "layout": {"dp": 4}, "lab": {"max_bytes": 2**18, "iterations": 5}},
}
LAB_PICTURE = ".held"
COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce"),
    *("scatter", "gather", "send-recv", "isend-irecv", "barrier"),
)


class Shot(NamedTuple):
    """A picture: the page, a CSS selector or None for the window, and the actions before it."""

    name: str
    path: str
    part: str | None = None
    before: Callable[[Page], None] | None = None
    height: int = HEIGHT


def shots(jobs: dict[str, str]) -> Iterator[Shot]:
    """Return all pictures for the ids of JOBS."""
    yield Shot("new-job", f"/jobs/new/?from={jobs['first']}", before=_planned, height=900)
    yield Shot("job-ended", f"/jobs/{jobs['first']}/", before=_drawn, height=1000)
    yield Shot("zero-bytes-off", f"/jobs/{jobs['first']}/#traffic", "#fidelity", _drawn)
    yield Shot("compare", f"/compare/?jobs={jobs['second']},{jobs['first']}", before=_drawn, height=1000)
    figures = "section[aria-labelledby='figures-title']"
    yield Shot("compare-figures", f"/compare/?jobs={jobs['second']},{jobs['first']}", figures, _drawn)
    yield Shot("planner", "/planner/", before=_searched, height=1000)
    for name in ("dp", "zero", "tp", "sp", "pp", "cp", "ep"):
        yield Shot(f"step-{name}", f"/jobs/{jobs[name]}/timeline/", "#step-timeline", _drawn)
    for slug in COLLECTIVES:
        yield Shot(f"lab-{slug}", f"/collectives/{slug}/", LAB_PICTURE, _drawn)


def _planned(page: Page) -> None:
    page.locator("#estimate[data-stale='false']").wait_for()


def _searched(page: Page) -> None:
    page.wait_for_load_state("networkidle")
    page.click("#search")
    page.locator("#results .search-results").wait_for(timeout=120_000)


def _drawn(page: Page) -> None:
    page.wait_for_load_state("networkidle")


def main() -> int:
    requests = argparse.ArgumentParser(prog="python -m tests.screens.pictures", description=__doc__.partition("\n")[0])
    requests.add_argument("--up", type=Path, help="of a board that runs")
    requests.add_argument("--only", default="", help="pictures with this in their name")
    shown = requests.parse_args()
    ROOM.mkdir(exist_ok=True)
    total = 0
    with a_board(shown.up) as made, run_chromium() as browser:
        jobs = ran(made)
        page = logged_in(browser, made)
        for shot in shots(jobs):
            if shown.only in shot.name:
                total += take(page, made.url, shot)
        if shown.only in LIVE:
            total += live(page, made)
    print(f"{total / 2**10:,.0f} KiB in {ROOM}")
    return 0


@contextlib.contextmanager
def a_board(up: Path | None) -> Iterator[Board]:
    if up is not None:
        yield Board(up.parent, None)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="meshboard-pictures-") as folder, run_board(Path(folder)) as made:
        yield made


def ran(made: Board) -> dict[str, str]:
    """Return the id of each of JOBS. The jobs run one at a time, so they share no cores."""
    known = made.state / "pictures.json"
    jobs: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    for name, spec in JOBS.items():
        if name not in jobs:
            job = made.submit(spec)
            made.wait_for_status(job, "succeeded", timeout_s=300)
            jobs[name] = job
            known.write_text(json.dumps(jobs))
    return jobs


def logged_in(browser: Browser, made: Board) -> Page:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    log_in(page, made.url, made.login)
    return page


def live(page: Page, made: Board) -> int:
    """Take a picture of a live run, and end the run."""
    train = {**FIRST, "steps": LIVE_STEPS, "eval_every": 100}
    job = made.submit({"name": "gpt-tiny on one host", **_train({"dp": 2, "tp": 2}, **train)})
    made.wait_for_status(job, "running", timeout_s=120)

    def far(opened: Page) -> None:
        past = f"() => document.querySelector('#progress')?.value >= {LIVE_FROM}"
        opened.wait_for_function(past, timeout=600_000)

    try:
        return take(page, made.url, Shot(LIVE, f"/jobs/{job}/", before=far, height=900))
    finally:
        made.call("POST", f"jobs/{job}/cancel")
        made.wait_for_status(job, "cancelled", "succeeded")


def take(page: Page, url: str, shot: Shot) -> int:
    """Return the bytes of a picture."""
    page.set_viewport_size({"width": WIDTH, "height": shot.height})
    page.goto("about:blank")  # an address that differs only in its hash does not load the page again
    page.goto(url + shot.path)
    if shot.before:
        shot.before(page)
    taken = page.screenshot() if shot.part is None else page.locator(shot.part).first.screenshot()
    target = ROOM / f"{shot.name}.png"
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS).save(target, optimize=True)
    print(f"{target.name}: {target.stat().st_size / 2**10:,.0f} KiB")
    return target.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
