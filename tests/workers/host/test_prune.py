"""Pruning of acknowledged attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.host import build_launch_order
from workers.disk import write_json
from workers.host.attempts import (
    REMEMBER_PRUNED_S,
    AttemptDir,
    build_host_exit_report,
    claim_attempt,
    iterate_attempts,
    prune_attempts,
)

DAY_S = 86400.0
MEBI = 2**20


def ended(run_dir: Path, job: str, attempt: int = 1, days_ago: float | None = 0.0, mebibytes: int = 1) -> AttemptDir:
    """Create an ended attempt with a log, acknowledged some days ago or never."""
    made = claim_attempt(run_dir, build_launch_order(job, attempt))
    assert made is not None
    (made.logs / "launcher.log").write_bytes(b"x" * mebibytes * MEBI)
    (made.work / "away").symlink_to("/etc")
    write_json(made.exit_file, build_host_exit_report(made, "succeeded", "well"))
    if days_ago is not None:
        made.acknowledged_marker.touch()
        os.utime(made.acknowledged_marker, (time.time() - days_ago * DAY_S,) * 2)
    return made


def jobs(run_dir: Path) -> list[str]:
    return [attempt.job for attempt in iterate_attempts(run_dir)]


def test_prunes_old_attempts_which_never_run_again(tmp_path: Path) -> None:
    old, young = ended(tmp_path, "old", 3, days_ago=8), ended(tmp_path, "young", days_ago=6)
    assert prune_attempts(tmp_path, 7 * DAY_S, 2**40) == [old]
    assert (jobs(tmp_path), old.job_dir.exists(), young.job_dir.exists()) == (["young"], False, True)
    assert [claim_attempt(tmp_path, build_launch_order("old", number)) for number in (1, 2, 3)] == [None] * 3
    assert claim_attempt(tmp_path, build_launch_order("old", 4)) is not None


def test_prunes_the_oldest_until_the_rest_fits(tmp_path: Path) -> None:
    for number, job in enumerate(("a", "b", "c", "d")):
        ended(tmp_path, job, days_ago=4 - number, mebibytes=2)
    prune_attempts(tmp_path, 7 * DAY_S, 5 * MEBI)
    assert jobs(tmp_path) == ["c", "d"]
    prune_attempts(tmp_path, 7 * DAY_S, 0)
    assert jobs(tmp_path) == []


def test_keeps_living_and_unacknowledged_attempts(tmp_path: Path) -> None:
    ended(tmp_path, "untold", days_ago=None, mebibytes=4)
    living = claim_attempt(tmp_path, build_launch_order("living"))
    assert living is not None
    assert prune_attempts(tmp_path, 0, 0) == []
    assert jobs(tmp_path) == ["living", "untold"]
    assert Path("/etc/hostname").exists(), "no link out of a job's directory was followed"


def test_removes_old_attempt_numbers_and_interrupted_claims(tmp_path: Path) -> None:
    gone = ended(tmp_path, "gone", days_ago=8)
    prune_attempts(tmp_path, 7 * DAY_S, 0)
    draft = gone.host_dir.parent / ".claim-abc"
    draft.mkdir()
    for path in (draft, gone.host_dir.parent / "newest"):
        os.utime(path, (time.time() - REMEMBER_PRUNED_S - 1,) * 2)
    prune_attempts(tmp_path, 7 * DAY_S, 0)
    assert not gone.host_dir.parent.exists()
    assert not gone.job_dir.parent.exists()
