"""Write batch scripts for Slurm that handle the warning signal."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs.queue.slurm.script import Site, build_submission
from planner.facts.parse_spec import parse_spec
from tests.support.processes import scale_timeout, wait_until

TRAIN = {"checkpoint_every": 100}


def made(folder: Path, train: dict[str, Any] = TRAIN, **asked: Any) -> tuple[tuple[str, ...], str]:
    data = {"model": {"preset": "gpt-tiny"}, "train": train}
    spec = parse_spec({**data, "resources": {"engine": "slurm", "slurm": asked}})
    built = build_submission(spec, "abc", 2, {"some": "order"}, Site(str(folder), "/python", "https://board"), 300)
    return built.options, built.script


def warning(options: tuple[str, ...]) -> list[str]:
    return [option for option in options if option.startswith("--signal")]


@pytest.mark.parametrize(
    ("limit", "seconds"), [(None, 300), ("1:00:00", 300), ("0:10:00", 150), ("0:01:00", 15), ("2-00:00:00", 300)]
)
def test_script_requests_a_warning_in_time_to_save(tmp_path: Path, limit: str | None, seconds: int) -> None:
    asked = {} if limit is None else {"time_limit": limit}
    assert warning(made(tmp_path, **asked)[0]) == [f"--signal=B:USR1@{seconds}"]


def test_run_without_checkpoints_is_not_stopped_early(tmp_path: Path) -> None:
    assert warning(made(tmp_path, {"checkpoint_every": 0})[0]) == []


SRUN = """#!/bin/sh
echo $$ >"$SEEN.pid"
cat >"$SEEN"
: >"$SEEN.whole"
while ! [ -e "$RUNS/17.warned" ]; do sleep 0.02; done
exit 7
"""
# The warning is not over before srun is, and the shell has taken its end in.
SLOW_TOUCH = """#!/bin/sh
/usr/bin/touch "$@"
while kill -0 $(cat "$SEEN.pid") 2>/dev/null; do sleep 0.02; done
"""


@pytest.mark.parametrize("as_it_ends", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_warning_writes_a_file_and_ends_nothing(tmp_path: Path, as_it_ends: bool, terminated: bool) -> None:
    folder, seen = tmp_path / "a folder of 'theirs'", tmp_path / "seen"
    (folder / "runs").mkdir(parents=True)
    for name, text in (("srun", SRUN), ("touch", SLOW_TOUCH if as_it_ends else "")):
        if text:
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = {"PATH": path, "SLURM_JOB_ID": "17", "SEEN": str(seen), "RUNS": str(folder / "runs")}
    shell = subprocess.Popen(["/bin/sh", "-c", made(folder)[1]], env=told)
    try:
        wait_until(seen.with_suffix(".whole").exists, "srun has its order")
        if terminated:
            shell.send_signal(signal.SIGTERM)
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(scale_timeout(20)) == 7, "it ends as srun does"
    finally:
        shell.kill()
        shell.wait(scale_timeout(10))
    assert seen.read_text().strip() == "eyJzb21lIjogIm9yZGVyIn0="
