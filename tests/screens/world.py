"""Create jobs of every kind and result on a board for its pages."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.screens.pages import World
from tests.support.board import Board, run_board

TRAIN = {"steps": 40, "global_batch": 8, "seq_len": 64, "eval_every": 10}
BOOM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(60):
    print(f"\\x1b[32mINFO\\x1b[0m step {step} of the script", flush=True)
    dist.all_reduce(torch.ones(1000))
    if step == 50 and dist.get_rank() == 1:
        raise ValueError("shapes (3, 4) and (5, 6) do not fit")
"""
ENDING: dict[str, dict[str, Any]] = {
    "trained": {"name": "gpt-tiny over dp and tp", "layout": {"dp": 2, "tp": 2, "zero": 1}, "train": TRAIN},
    "piped": {
        "name": "w" * 100,
        "layout": {"dp": 2, "pp": 2},
        "train": {**TRAIN, "micro_batches": 4, "checkpoint_every": 20},
    },
    "failed": {"kind": "script", "name": "a script that fails", "script": {"path": "boom.py"}, "layout": {"dp": 4}},
    "lab": {"kind": "lab", "name": "lab", "layout": {"dp": 4}, "lab": {"max_bytes": 2**16, "iterations": 5}},
    "dry": {
        "kind": "dry_run",
        "name": "dry run of 64 ranks",
        "layout": {"dp": 8, "pp": 2, "tp": 4},
        "train": {**TRAIN, "global_batch": 16, "micro_batches": 2},
        "dry_ranks": [0, 63],
    },
}
RUNNING = {"name": "runs while it is looked at", "layout": {"dp": 2}, "train": {**TRAIN, "steps": 100_000}}
QUEUED = {"name": "waits for a slot", "layout": {"dp": 4}, "train": TRAIN}


@contextlib.contextmanager
def a_board(up: Path | None) -> Iterator[tuple[Board, World]]:
    """Return the board of an up.json, or start one. A board is filled once."""
    if up is None:
        with tempfile.TemporaryDirectory(prefix="meshboard-pages-") as folder, run_board(Path(folder)) as made:
            yield made, fill(made)
            empty(made)
        return
    running = Board(up.parent, None)  # type: ignore[arg-type]
    known = up.parent / "screens.json"
    world = World(**json.loads(known.read_text())) if known.exists() else fill(running)
    known.write_text(json.dumps(world._asdict()))
    yield running, world


def fill(board: Board) -> World:
    """Run the jobs, which takes a minute."""
    scripts = board.state / "scripts"
    scripts.mkdir(exist_ok=True)
    (scripts / "boom.py").write_text(BOOM)
    jobs = {name: board.submit(_whole(spec)) for name, spec in ENDING.items()}
    for job in jobs.values():
        board.wait_for_status(job, "succeeded", "failed", timeout_s=300)
    jobs["running"] = board.submit(_whole(RUNNING))
    jobs["queued"] = board.submit(_whole(QUEUED))
    board.wait_for_status(jobs["running"], "running", timeout_s=120)
    cancelled = board.submit(_whole({**QUEUED, "name": "thought better of"}))
    board.call("POST", f"jobs/{cancelled}/cancel")
    return World({**jobs, "cancelled": cancelled}, board.call("GET", "hosts")[0]["name"])


def empty(board: Board) -> None:
    """Cancel the running jobs."""
    for job in board.call("GET", "jobs"):
        if job["status"] not in ("succeeded", "failed", "cancelled", "lost"):
            board.call("POST", f"jobs/{job['id']}/cancel")
            board.wait_for_status(job["id"], "cancelled")


def _whole(spec: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"preset": "gpt-tiny"}, **spec} if spec.get("kind") not in ("script", "lab") else spec
