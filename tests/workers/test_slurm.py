"""Pruning of the cluster's shared folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.workers.test_disk import make_nested
from workers.disk import TreeWalk
from workers.slurm import KEEP_RUNS_S, prune_shared_folder


def old(*paths: Path) -> None:
    """Set old modification times. Name the deepest path last."""
    long_ago = time.time() - KEEP_RUNS_S - 60
    for path in reversed(paths):
        os.utime(path, (long_ago, long_ago))


def make_attempt(folder: Path, slurm_job: str) -> list[Path]:
    log = folder / "runs" / slurm_job / "node-1" / "job" / "1" / "logs" / "rank.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    return [*list(reversed(log.parents))[-5:], log]


def test_keeps_an_old_run_with_recent_writes(tmp_path: Path) -> None:
    """Check a node's folder, which is as old as the run."""
    going_on, over = make_attempt(tmp_path, "7"), make_attempt(tmp_path, "8")
    old(*going_on)
    old(*over)
    going_on[-1].write_text("step 2\n")
    outputs = [tmp_path / "slurm" / f"meshboard-{name}.out" for name in ("old", "new")]
    outputs[0].parent.mkdir()
    for output in outputs:
        output.write_text("")
    old(outputs[0])
    prune_shared_folder(tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["7"]
    assert going_on[-1].read_text() == "step 2\n"
    assert [output.exists() for output in outputs] == [False, True]


def test_a_deep_tree_does_not_stop_pruning(memory_path: Path) -> None:
    deep, over = memory_path / "runs" / "7", make_attempt(memory_path, "8")
    make_nested(deep, 1500)
    for parent, name, _ in TreeWalk(deep):
        os.utime(name, (0, 0), dir_fd=parent)
    old(deep)
    old(*over)
    prune_shared_folder(memory_path)
    assert list((memory_path / "runs").iterdir()) == []
