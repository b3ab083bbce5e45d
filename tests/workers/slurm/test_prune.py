"""What goes from the cluster's folder, and what is in use there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from workers.slurm.prune import KEPT_S, prune


def old(*paths: Path) -> None:
    """As if nobody had written to these for longer than they are kept; the deepest is named last."""
    long_ago = time.time() - KEPT_S - 60
    for path in reversed(paths):
        os.utime(path, (long_ago, long_ago))


def attempt_of(folder: Path, slurm_job: str) -> list[Path]:
    log = folder / "runs" / slurm_job / "node-1" / "job" / "1" / "logs" / "rank.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    return [*list(reversed(log.parents))[-5:], log]


def test_a_run_that_is_written_to_stays_though_it_began_long_ago(tmp_path: Path) -> None:
    """A node's folder is made once: that one is as old as the run."""
    going_on, over = attempt_of(tmp_path, "7"), attempt_of(tmp_path, "8")
    old(*going_on)
    old(*over)
    going_on[-1].write_text("step 2\n")
    outputs = [tmp_path / "slurm" / f"meshboard-{name}.out" for name in ("old", "new")]
    outputs[0].parent.mkdir()
    for output in outputs:
        output.write_text("")
    old(outputs[0])
    prune(tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["7"]
    assert going_on[-1].read_text() == "step 2\n"
    assert [output.exists() for output in outputs] == [False, True]
