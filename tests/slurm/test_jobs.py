"""Jobs of a whole board on a real Slurm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Installation

pytestmark = pytest.mark.slow


def spec(steps: int = 5, nodes: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": "on slurm",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2} if nodes > 1 else {"dp": 2},
        "train": {"steps": steps, "global_batch": 4, "seq_len": 32, "eval_every": 0},
        "resources": {"engine": "slurm", "slurm": {"nodes": nodes, **more}},
    }


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_runs_on_slurm_and_its_page_shows_all_of_it(slurm: Cluster, installed: Installation, nodes: int) -> None:
    board = installed.board
    job = board.wait_for(board.submit(spec(nodes=nodes)), "succeeded", "failed", "lost")
    assert (job["status"], job["exit"]["reason"]) == ("succeeded", "finished after step 5")
