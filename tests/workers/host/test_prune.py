"""A host forgets what the controller has taken note of, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.orders import order
from workers.host.attempts import AttemptDir, kept, report_of_host
from workers.host.files import write_json
from workers.host.prune import MEMORY_S, prune
from workers.host.start.claims import claim

DAY_S = 86400.0
MEBI = 2**20


def ended(run_dir: Path, job: str, attempt: int = 1, days_ago: float | None = 0.0, mebibytes: int = 1) -> AttemptDir:
    """An attempt with a log, that ended; acknowledged so many days ago, or never."""
    made = claim(run_dir, order(job, attempt))
    assert made is not None
    (made.logs / "launcher.log").write_bytes(b"x" * mebibytes * MEBI)
    (made.work / "away").symlink_to("/etc")
    write_json(made.exit, report_of_host(made, "succeeded", "well"))
    if days_ago is not None:
        made.acknowledged.touch()
        os.utime(made.acknowledged, (time.time() - days_ago * DAY_S,) * 2)
    return made


def jobs(run_dir: Path) -> list[str]:
    return [attempt.job for attempt in kept(run_dir)]


def test_old_ones_go_and_their_attempts_never_run_again(tmp_path: Path) -> None:
    old, young = ended(tmp_path, "old", 3, days_ago=8), ended(tmp_path, "young", days_ago=6)
    assert prune(tmp_path, 7 * DAY_S, 2**40) == [old]
    assert (jobs(tmp_path), old.given.exists(), young.given.exists()) == (["young"], False, True)
    assert [claim(tmp_path, order("old", number)) for number in (1, 2, 3)] == [None] * 3
    assert claim(tmp_path, order("old", 4)) is not None


def test_the_oldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    for number, job in enumerate(("a", "b", "c", "d")):
        ended(tmp_path, job, days_ago=4 - number, mebibytes=2)
    prune(tmp_path, 7 * DAY_S, 5 * MEBI)
    assert jobs(tmp_path) == ["c", "d"]
    prune(tmp_path, 7 * DAY_S, 0)
    assert jobs(tmp_path) == []


def test_what_lives_or_was_not_acknowledged_stays_however_large(tmp_path: Path) -> None:
    ended(tmp_path, "untold", days_ago=None, mebibytes=4)
    living = claim(tmp_path, order("living"))
    assert living is not None
    assert prune(tmp_path, 0, 0) == []
    assert jobs(tmp_path) == ["living", "untold"]
    assert Path("/etc/hostname").exists(), "no link out of a job's directory was followed"


def test_the_memory_of_a_job_and_a_claim_cut_off_go_in_the_end_too(tmp_path: Path) -> None:
    gone = ended(tmp_path, "gone", days_ago=8)
    prune(tmp_path, 7 * DAY_S, 0)
    draft = gone.own.parent / ".claim-abc"
    draft.mkdir()
    for path in (draft, gone.own.parent / "newest"):
        os.utime(path, (time.time() - MEMORY_S - 1,) * 2)
    prune(tmp_path, 7 * DAY_S, 0)
    assert not gone.own.parent.exists()
    assert not gone.given.parent.exists()
