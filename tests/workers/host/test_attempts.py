"""An order becomes one attempt on disk, whole or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts.control import VERSION, LaunchOrder
from contracts.names import EVENTS_STREAM
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir, attempt_dir, attempts, claim, process_id, read_json, write_json
from workers.host.reporter import Reporter
from workers.host.settings import HostSettings


def order(job: str = "job", attempt: int = 1) -> LaunchOrder:
    return LaunchOrder(v=VERSION, job=job, attempt=attempt, spec={"name": job}, slots=[0])


def test_of_a_hundred_deliveries_at_once_one_claims(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = [found for found in pool.map(lambda _: claim(tmp_path, order()), range(100)) if found is not None]
    assert len(claimed) == 1
    assert read_json(claimed[0].order) == order()
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["1"]


def test_a_claim_cut_off_halfway_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("workers.host.attempts.write_json", cut_off)
        with pytest.raises(KeyboardInterrupt):
            claim(tmp_path, order())
    assert list(attempts(tmp_path)) == []
    assert claim(tmp_path, order()) is not None


def test_a_lower_attempt_than_one_seen_is_refused(tmp_path: Path) -> None:
    assert claim(tmp_path, order(attempt=2)) is not None
    assert claim(tmp_path, order(attempt=1)) is None
    assert claim(tmp_path, order(attempt=3)) is not None


@pytest.mark.parametrize(("job", "attempt"), [("../out", 1), ("", 1), ("a/b", 1), ("job", 0), ("job\n", 1)])
def test_a_name_that_could_leave_the_run_directory_is_refused(tmp_path: Path, job: str, attempt: int) -> None:
    with pytest.raises(ValueError, match="not an attempt"):
        attempt_dir(tmp_path, job, attempt)


def supervised(folder: Path, started_offset: int) -> AttemptDir:
    """An attempt that names this very process as its supervisor."""
    claimed = claim(folder, order())
    assert claimed is not None
    me = process_id(os.getpid())
    assert me is not None
    write_json(claimed.supervisor, {"pid": me.pid, "started": me.started + started_offset})
    return claimed


def test_a_pid_that_another_process_took_is_no_living_supervisor(tmp_path: Path) -> None:
    assert supervised(tmp_path / "a", 0).supervisor_alive()
    assert not supervised(tmp_path / "b", -1).supervisor_alive()


def settings(redis_url: str, run_dir: Path) -> HostSettings:
    return HostSettings(redis_url, "testhost", 4, "cpu", run_dir, run_dir, run_dir, run_dir, "workers.trainer")


def test_only_a_dead_supervisor_without_a_report_is_lost(redis_service: RedisServer, tmp_path: Path) -> None:
    alive, dead, done = (supervised(tmp_path / name, offset) for name, offset in (("a", 0), ("b", -1), ("c", -1)))
    write_json(done.exit, {"outcome": "succeeded"})
    found = [
        Reporter(settings(redis_service.url, attempt.path.parents[1])).bury_the_dead()
        for attempt in (alive, dead, done)
    ]
    assert found == [False, True, False]
    assert not alive.exit.exists()
    assert read_json(dead.exit)["outcome"] == "lost"
    assert read_json(done.exit)["outcome"] == "succeeded"
    assert redis_service.client().xlen(EVENTS_STREAM) == 0
