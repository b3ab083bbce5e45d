"""Measure the delay from the end of a collective to the browser frame that shows it. `make bench-latency`."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.latency.ticker import TICKS
from tests.support.board import run_board
from tests.support.browser import log_in, run_chromium
from tests.support.processes import wait_until

SPEC: dict[str, Any] = {"name": "ticker", "model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 1}}
SPEC["train"] |= {"warmup_steps": 0, "eval_every": 0}

# Each animation frame notes the calls that the page's table shows when that number has changed.
WATCH_FRAMES = """() => {
  window.seen = [];
  const look = () => {
    const cells = document.querySelectorAll("#collectives tr td:nth-child(4)");
    const calls = [...cells].reduce((sum, cell) => sum + Number(cell.textContent.replace(/\\D/g, "")), 0);
    const last = window.seen.at(-1);
    if (!last || last[0] !== calls) window.seen.push([calls, (performance.timeOrigin + performance.now()) / 1000]);
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        frames, ends = measure(Path(work) / "var")
    delays = []
    for tick, end in ends:
        shown = next((when for calls, when in frames if calls >= 2 * tick), None)
        assert shown is not None, f"the page never showed collective {tick}"
        delays.append(shown - end)
    delays.sort()
    p50, p99 = statistics.median(delays), delays[int(len(delays) * 0.99) - 1]
    print(f"collective end to browser frame: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, {len(delays)} collectives")
    print(f"ratio p99/p50: {p99 / p50:.2f}")


def measure(state: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return pairs (calls shown, unix time of the frame) and (tick, unix time of its end on the later rank)."""
    settings = {"MESHBOARD_TRAINER_MODULE": "benchmarks.latency.ticker"}
    with run_board(state, **settings) as made, run_chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        log_in(page, made.url, made.login)
        job = made.submit(SPEC)
        page.goto(f"{made.url}/jobs/{job}/")
        page.evaluate(WATCH_FRAMES)
        made.wait_for_status(job, "succeeded", timeout_s=120)
        wait_until(lambda: page.evaluate("window.seen.at(-1)[0]") >= 2 * TICKS, "the page shows the last collective")
        frames = page.evaluate("window.seen")
        work = state / "runs" / job / "1" / "work"
        per_rank = [read_ticks(work / f"ticks-{rank}") for rank in range(2)]
    return frames, [(tick, max(ends[tick] for ends in per_rank)) for tick in per_rank[0]]


def read_ticks(path: Path) -> dict[int, float]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(tick): float(end) for tick, end in lines}


if __name__ == "__main__":
    main()
