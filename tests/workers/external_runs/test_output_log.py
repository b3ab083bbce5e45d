"""Log of the output of a command that torchrun prints with the lines of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.external_runs.child_process import OutputLog

FAILURE = b"E1129 12:00:00.000 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: python\n"
OUTPUT = b"start\n[default0]:step 1\n[W] warning\n\n[rank1]: Traceback\n" + FAILURE + b"[3/4] done"
SHOWN = b"start\n[W] warning\n\n" + FAILURE + b"[3/4] done"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_leaves_out_the_lines_of_ranks_with_their_own_logs(tmp_path: Path, size: int) -> None:
    path = tmp_path / "launcher.log"
    log = OutputLog(path, separate_logs=True)
    for at in range(0, len(OUTPUT), size):
        log.add(OUTPUT[at : at + size])
    log.close()
    assert path.read_bytes() == SHOWN
    assert "failed (exitcode: -9) local_rank: 1" in log.failure_line


def test_writes_the_state_of_a_progress_bar_at_once(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    log = OutputLog(path, separate_logs=False)
    log.add(b"\r 10%")
    assert path.read_bytes() == b"\r 10%"
    log.add(b"\r100%\nnext\n")
    assert path.read_bytes() == b"\r 10%\r100%\nnext\n"
