"""Orders: claimed once and completely, or reported as failed."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contracts.names import TASK_ACKNOWLEDGE, host_queue
from tests.support.host import HOST_NAME, build_launch_order, run_host
from tests.support.processes import PAGE_BYTES, RedisServer, fill_disk, mount_full_disk, wait_until
from tests.workers.host.test_reporter import heartbeats, settings
from workers.disk import read_json, write_json
from workers.host import attempt_watcher
from workers.host.attempt_watcher import AttemptStarter, HostExits, read_report_or_note
from workers.host.attempts import (
    AttemptDir,
    build_host_exit_report,
    claim_attempt,
    get_attempt_dir,
    iterate_unacknowledged,
)
from workers.host.processes import get_process_id
from workers.host.reporter import Reporter


def test_claims_an_order_once_in_a_hundred_deliveries(tmp_path: Path) -> None:
    asked = build_launch_order()
    with ThreadPoolExecutor(8) as pool:
        claimed = [
            found for found in pool.map(lambda _: claim_attempt(tmp_path, asked), range(100)) if found is not None
        ]
    assert len(claimed) == 1
    assert read_json(claimed[0].order_file) == asked
    assert read_json(claimed[0].spec) == asked["spec"]
    assert [path.name for path in claimed[0].host_dir.parent.iterdir()] == ["1"]


def test_interrupted_claim_does_not_block_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("workers.host.attempts.write_json", cut_off)
        with pytest.raises(KeyboardInterrupt):
            claim_attempt(tmp_path, build_launch_order())
    assert list(iterate_unacknowledged(tmp_path)) == []
    assert claim_attempt(tmp_path, build_launch_order()) is not None


def test_rejects_an_attempt_lower_than_a_known_one(tmp_path: Path) -> None:
    assert claim_attempt(tmp_path, build_launch_order(attempt=2)) is not None
    assert claim_attempt(tmp_path, build_launch_order(attempt=1)) is None
    assert claim_attempt(tmp_path, build_launch_order(attempt=3, slots=[1])) is not None


def test_rejects_an_order_for_a_slot_in_use(tmp_path: Path) -> None:
    holder = claim_attempt(tmp_path, build_launch_order("holder", 2, slots=[0, 1]))
    assert holder is not None
    assert claim_attempt(tmp_path, build_launch_order("beside", slots=[2, 3])) is not None
    assert claim_attempt(tmp_path, build_launch_order("late", slots=[4, 1])) is None
    refused = next(attempt for attempt in iterate_unacknowledged(tmp_path) if attempt.job == "late")
    report = read_report_or_note(refused)
    assert (report["state"], report["exit"]["outcome"]) == ("exited", "failed")
    assert report["exit"]["reason"] == "not started: attempt 2 of job holder still uses slot 1 of this host"
    write_json(holder.exit_file, build_host_exit_report(holder, "succeeded", "well"))
    assert claim_attempt(tmp_path, build_launch_order("later", slots=[1])) is not None


ONE_RANK = {"model": {"preset": "gpt-tiny"}}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk that is full."""
    with mount_full_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AttemptDir]:
    """Record the attempts whose supervisors would start."""
    found: list[AttemptDir] = []
    monkeypatch.setattr(AttemptStarter, "_start_supervisor", lambda _, attempt: found.append(attempt))
    return found


def test_job_on_a_full_disk_fails_with_the_reason(redis_service: RedisServer, full: Path, tmp_path: Path) -> None:
    """Check a job that once stayed at its start, because its order was delivered repeatedly."""
    folder = str(full / "runs")
    with run_host(redis_service, tmp_path / "host", MESHBOARD_RUN_DIR=folder) as machine, machine.run_worker():
        machine.send_launch_order("crowded", spec=ONE_RANK, times=3)
        report = machine.wait_for_exit("crowded", 10)
        assert report["outcome"] == "failed"
        assert report["reason"].startswith(f"No disk space on {HOST_NAME}: No space left on device: {folder}")
        assert report["reason"].endswith(", 0 bytes are free")
        machine._sender.send_task(TASK_ACKNOWLEDGE, args=["crowded", 1], queue=host_queue(HOST_NAME))
        wait_until(lambda: machine.read_events("host")[-1]["attempts"] == [], "it is not reported again")
        (full / "filling").unlink()
        machine.send_launch_order("crowded", spec=ONE_RANK)
        machine.send_launch_order("roomy", spec={**ONE_RANK, "train": {"steps": 1, "warmup_steps": 1}})
        assert machine.wait_for_exit("roomy")["outcome"] == "succeeded"
        assert {report["state"] for report in machine.read_reports("crowded")} == {"exited"}


def test_reports_a_disk_that_rejects_the_pid_file(redis_service: RedisServer, full: Path, tmp_path: Path) -> None:
    folder = full / "runs"
    (full / "filling").unlink()
    with run_host(redis_service, tmp_path / "host", MESHBOARD_RUN_DIR=str(folder)) as machine, machine.run_worker():
        fill_disk(full)
        with (full / "filling").open("r+b") as filling:  # a page for the spec, and one for the order
            filling.truncate(filling.seek(0, os.SEEK_END) - 2 * PAGE_BYTES)
        machine.send_launch_order("crowded", spec=ONE_RANK)
        report = machine.wait_for_exit("crowded", 10)
        claimed = get_attempt_dir(folder, "crowded", 1)
        assert claimed.order_file.exists()
        assert report["outcome"] == "failed"
        told = re.escape(f"No disk space on {HOST_NAME}: No space left on device: {claimed.pid_file} needs ")
        assert re.fullmatch(rf"{told}\d+ bytes, 0 bytes are free", report["reason"])
        assert [path.name for path in claimed.host_dir.glob(".*")] == [], "no draft of it is left"


def test_failed_claim_leaves_no_files(full: Path, started: list[AttemptDir]) -> None:
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", full), ends).start(build_launch_order())
    assert [told["exit"]["outcome"] for told in ends.get_reports().values()] == ["failed"]
    left = [path for path in full.rglob("*") if path.is_file() and path.name not in ("filling", "lock")]
    assert (left, started) == ([], [])


def test_reports_any_disk_error(tmp_path: Path, started: list[AttemptDir]) -> None:
    (tmp_path / "job").write_text("a file where the job's folder would be")
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", tmp_path), ends).start(build_launch_order())
    (told,) = ends.get_reports().values()
    assert told["exit"]["reason"] == f"Not started on testhost: [Errno 17] File exists: '{tmp_path}/job'"
    assert started == []


def test_read_only_disk_rejects_new_attempts_and_keeps_started_ones(full: Path, started: list[AttemptDir]) -> None:
    (full / "filling").unlink()
    ends = HostExits()
    starter = AttemptStarter(settings("redis://nobody", full), ends)
    starter.start(build_launch_order("before"))
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    starter.start(build_launch_order("before"))
    starter.start(build_launch_order("after", slots=[1]))
    assert [attempt.job for attempt in started] == ["before"]
    (told,) = ends.get_reports().values()
    assert told["job"] == "after"
    assert told["exit"]["reason"].startswith("Not started on testhost: [Errno 30] Read-only file system")


def test_failed_start_stays_failed_after_space_is_freed(tmp_path: Path, started: list[AttemptDir]) -> None:
    in_the_way = tmp_path / "job"
    in_the_way.touch()
    ends = HostExits()
    starter = AttemptStarter(settings("redis://nobody", tmp_path), ends)
    starter.start(build_launch_order())
    in_the_way.unlink()
    starter.start(build_launch_order())
    ends.acknowledge(get_attempt_dir(tmp_path, "job", 1))
    starter.start(build_launch_order())
    assert started == []
    starter.start(build_launch_order(attempt=2))
    assert [attempt.attempt for attempt in started] == [2]


def test_second_delivery_does_not_fail_a_started_attempt(
    tmp_path: Path, started: list[AttemptDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliver an order ten times on a disk that fails after the first delivery."""
    claims = iter([claim_attempt])

    def goes_bad(*arguments: Any) -> Any:
        return next(claims, _refuses)(*arguments)

    monkeypatch.setattr("workers.host.attempt_watcher.claim_attempt", goes_bad)
    ends = HostExits()
    starter = AttemptStarter(settings("redis://nobody", tmp_path), ends)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: starter.start(build_launch_order()), range(10)))
    assert len(started) == 1
    assert ends.get_reports() == {}


def _refuses(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_reports_a_supervisor_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "setsid")

    monkeypatch.setattr("workers.host.attempt_watcher.subprocess.run", refuse)
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", tmp_path), ends).start(build_launch_order())
    report = get_attempt_dir(tmp_path, "job", 1).read_exit()
    assert report is not None
    assert report["outcome"] == "failed"
    assert report["reason"].startswith("Not started on testhost: [Errno 11] Resource temporarily unavailable")
    assert ends.get_reports() == {}, "it is reported from disk"


def test_keeps_an_exit_report_in_memory_until_the_disk_accepts_it(redis_service: RedisServer, full: Path) -> None:
    """Check that the slots become free before the report is on disk."""
    (full / "filling").unlink()
    claimed = claim_attempt(full, build_launch_order())
    assert claimed is not None
    claimed.pid_file.write_text('{"pid": 1, "started": 1}')
    fill_disk(full)
    reporter = Reporter(settings(redis_service.url, full))
    assert reporter._watcher.check() is True
    assert reporter._watcher.check() is False
    reporter._send()
    (told,) = heartbeats(redis_service)[-1]["attempts"]
    assert (told["state"], told["exit"]["outcome"]) == ("exited", "lost")
    reporter.exits.acknowledge(claimed)
    reporter._send()
    (told,) = heartbeats(redis_service)[-1]["attempts"]
    assert (told["state"], "exit" in told) == ("exited", False)
    (full / "filling").unlink()
    assert reporter._watcher.check() is True
    assert reporter.exits.get_reports() == {}
    report = claimed.read_exit()
    assert report is not None
    assert report["outcome"] == "lost"


def test_does_not_report_a_late_supervisor_as_lost(
    redis_service: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a supervisor that starts while its attempt is being reported as lost."""
    claimed = claim_attempt(tmp_path, build_launch_order())
    assert claimed is not None
    late = get_process_id(os.getpid())
    assert late is not None

    def begins(*_asked: object) -> list[int]:
        claimed.pid_file.write_text(json.dumps({**late._asdict(), "folder": str(tmp_path / "socket")}))
        return []

    monkeypatch.setattr(attempt_watcher, "SUPERVISOR_START_TIMEOUT_S", -1.0)
    monkeypatch.setattr(attempt_watcher, "kill_processes", begins)
    reporter = Reporter(settings(redis_service.url, tmp_path))
    reporter._watcher.check()
    assert claimed.read_exit() is None
