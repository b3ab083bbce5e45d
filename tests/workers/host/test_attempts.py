"""Attempts on disk: states from files, claims, failures to start, and pruning."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.control import LaunchOrder
from contracts.names import TASK_ACKNOWLEDGE, host_queue
from tests.support.host import HOST_NAME, build_launch_order, run_host
from tests.support.processes import PAGE_BYTES, ROOT, RedisServer, fill_disk, mount_full_disk, wait_until
from tests.workers.host.test_reporter import heartbeats, settings
from tests.workers.test_disk import immutable, make_nested
from workers.disk import MAX_JSON_BYTES, BadFileError, read_json, write_json
from workers.host import attempt_watcher
from workers.host.attempt_watcher import AttemptStarter, AttemptWatcher, HostExits, read_report_or_note
from workers.host.attempts import (
    REMEMBER_PRUNED_S,
    AttemptDir,
    Pruner,
    build_host_exit_report,
    claim_attempt,
    get_attempt_dir,
    iterate_attempts,
    iterate_unacknowledged,
    prune_attempts,
)
from workers.host.processes import get_process_id, get_start_id
from workers.host.reporter import Reporter

ONE_RANK = {"model": {"preset": "gpt-tiny"}}
DAY_S = 86400.0
MEBI = 2**20


def supervised(folder: Path, started_offset: int, request: LaunchOrder | None = None) -> AttemptDir:
    """Claim an attempt with the test process as its supervisor. An offset makes the supervisor invalid."""
    claimed = claim_attempt(folder, request or build_launch_order())
    assert claimed is not None
    me = get_process_id(os.getpid())
    assert me is not None
    write_json(claimed.pid_file, {"pid": me.pid, "started": me.started + started_offset})
    return claimed


@pytest.mark.parametrize(("job", "attempt"), [("../out", 1), ("", 1), ("a/b", 1), ("job", 0), ("job\n", 1)])
def test_rejects_a_job_name_that_could_leave_the_run_directory(tmp_path: Path, job: str, attempt: int) -> None:
    with pytest.raises(ValueError, match="not an attempt"):
        get_attempt_dir(tmp_path, job, attempt)


def test_reused_pid_is_not_a_supervisor(tmp_path: Path) -> None:
    assert supervised(tmp_path / "a", 0).get_supervisor() is not None
    assert supervised(tmp_path / "b", -1).get_supervisor() is None


def test_host_files_are_outside_the_job_tree(tmp_path: Path) -> None:
    attempt = supervised(tmp_path, 0)
    hosts = (
        attempt.order_file,
        attempt.pid_file,
        attempt.exit_file,
        attempt.running_marker,
        attempt.acknowledged_marker,
        attempt.note_file,
    )
    jobs = (attempt.spec, attempt.work, attempt.logs, attempt.failure_file)
    assert [path for path in hosts if path.is_relative_to(attempt.job_dir) or path.is_relative_to(attempt.work)] == []
    assert [path for path in jobs if path.is_relative_to(attempt.host_dir)] == []


def test_attempt_is_lost_only_without_supervisor_and_report(redis_service: RedisServer, tmp_path: Path) -> None:
    alive, dead, done = (supervised(tmp_path / name, offset) for name, offset in (("a", 0), ("b", -1), ("c", -1)))
    write_json(done.exit_file, build_host_exit_report(done, "succeeded", "well"))
    found = [AttemptWatcher(attempt.run_dir, redis_service.client()).check() for attempt in (alive, dead, done)]
    assert found == [False, True, False]
    assert not alive.exit_file.exists()
    assert read_json(dead.exit_file)["outcome"] == "lost"
    assert read_json(done.exit_file)["outcome"] == "succeeded"
    assert redis_service.client().keys("*events*") == []


def test_attempt_before_a_restart_failed_because_of_its_host(redis_service: RedisServer, tmp_path: Path) -> None:
    before, after = supervised(tmp_path / "a", -1), supervised(tmp_path / "b", -1)
    for attempt, start in ((before, "other/1"), (after, get_start_id())):
        write_json(attempt.pid_file, {**read_json(attempt.pid_file), "start": start})
        AttemptWatcher(attempt.run_dir, redis_service.client()).check()
    exit = read_json(before.exit_file)
    assert (exit["outcome"], exit["host_fault"]) == ("failed", "restart")
    assert exit["reason"] == "the machine or container of the host restarted"
    assert read_json(after.exit_file)["outcome"] == "lost", "only the supervisor ended"


def test_supervisor_has_any_time_to_start(
    redis_service: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a supervisor that a busy machine keeps in its imports. After its end, the job can run on another host."""
    monkeypatch.setattr(attempt_watcher, "SUPERVISOR_START_TIMEOUT_S", -1.0)
    claimed = claim_attempt(tmp_path, build_launch_order())
    assert claimed is not None
    watch = AttemptWatcher(tmp_path, redis_service.client())
    arguments = ["-m", "workers.host.supervisor", str(tmp_path), claimed.job, str(claimed.attempt)]
    importing = [sys.executable, "-c", "import sys; sys.stdin.read()", *arguments]
    with subprocess.Popen(importing, stdin=subprocess.PIPE):  # reads until the end of the block
        assert watch.check() is False
        assert claimed.read_exit() is None
    assert watch.check() is True
    report = read_json(claimed.exit_file)
    assert (report["outcome"], report["reason"]) == ("failed", "the supervisor did not start")
    assert report["host_fault"] == "launch"


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def vast(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(2**40)


BROKEN: dict[str, Callable[[Path], object]] = {
    "half a report": lambda path: path.write_text('{"v": 1, "job": "job"'),
    "no report": lambda path: path.write_text('{"outcome": "succeeded"}'),
    "not a number": lambda path: path.write_text('{"outcome": NaN}'),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "nested too deep": deep,
    "a tebibyte": vast,
    "a FIFO": os.mkfifo,
    "a folder": lambda path: (path / "in it").mkdir(parents=True),
    "a link": lambda path: path.symlink_to("/etc/hostname"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "of another attempt": lambda path: path.write_text(
        json.dumps(build_host_exit_report(AttemptDir(path.parent, "other", 7), "succeeded", "well"))
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_exit_report_affects_only_its_attempt(redis_service: RedisServer, tmp_path: Path, what: str) -> None:
    """Check files that once stopped the host's heartbeats."""
    broken = supervised(tmp_path, -1, build_launch_order("broken", slots=[0]))
    sound = supervised(tmp_path, 0, build_launch_order("sound", slots=[1]))
    BROKEN[what](broken.exit_file)
    watch = AttemptWatcher(tmp_path, redis_service.client())
    watch.check()
    report = read_report_or_note(broken)
    assert (report["state"], report["slots"], report["exit"]["outcome"]) == ("exited", [0], "lost")
    assert report["exit"]["reason"].startswith("the supervisor ended, and its report cannot be read: exit.json")
    assert read_report_or_note(sound)["state"] == "starting"
    assert watch.check() is False


@pytest.mark.parametrize("name", ["order_file", "pid_file", "note_file", "running_marker"])
def test_broken_file_does_not_hide_other_attempts(redis_service: RedisServer, tmp_path: Path, name: str) -> None:
    for what, damage in BROKEN.items():
        run_dir = tmp_path / what
        broken = supervised(run_dir, 0, build_launch_order("broken", slots=[0]))
        dead = supervised(run_dir, -1, build_launch_order("dead", slots=[1]))
        path: Path = getattr(broken, name)
        path.unlink(missing_ok=True)
        damage(path)
        AttemptWatcher(run_dir, redis_service.client()).check()
        assert read_report_or_note(broken)["job"] == "broken", what
        assert read_report_or_note(dead)["exit"]["outcome"] == "lost", what


def test_attempt_that_cannot_end_does_not_delay_others(redis_service: RedisServer, tmp_path: Path) -> None:
    stuck = supervised(tmp_path, -1, build_launch_order("a-stuck", slots=[0]))
    (stuck.host_dir / f".{stuck.exit_file.name}.{os.getpid()}").mkdir()  # where its report would be drafted
    dead = supervised(tmp_path, -1, build_launch_order("dead", slots=[1]))
    assert AttemptWatcher(tmp_path, redis_service.client()).check() is True
    assert read_report_or_note(dead)["exit"]["outcome"] == "lost"
    assert read_report_or_note(stuck)["state"] == "starting"


def test_unreadable_file_is_not_a_broken_file(tmp_path: Path) -> None:
    """Check that a report is kept when file descriptors run out."""
    whole = tmp_path / "exit.json"
    whole.write_text("1")
    script = """
import os, resource, sys
from pathlib import Path
from workers.disk import BadFileError, read_json
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    read_json(Path(sys.argv[1]))
except BadFileError:
    print("broken")
except OSError as error:
    print("for now", error.errno)
"""
    ran = subprocess.run([sys.executable, "-c", script, whole], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout == "for now 24\n", ran.stderr


def test_reads_files_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('"' + "x" * (MAX_JSON_BYTES - 2) + '"')
    assert len(read_json(path)) == MAX_JSON_BYTES - 2
    path.write_text('"' + "x" * (MAX_JSON_BYTES - 1) + '"')
    with pytest.raises(BadFileError, match="larger than"):
        read_json(path)


def test_claims_an_order_once_in_a_hundred_deliveries(tmp_path: Path) -> None:
    request = build_launch_order()
    with ThreadPoolExecutor(8) as pool:
        claimed = [
            found for found in pool.map(lambda _: claim_attempt(tmp_path, request), range(100)) if found is not None
        ]
    assert len(claimed) == 1
    assert read_json(claimed[0].order_file) == request
    assert read_json(claimed[0].spec) == request["spec"]
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
    outcome = report["state"], report["exit"]["outcome"], report["exit"]["host_fault"]
    assert outcome == ("exited", "failed", "launch"), "the job returns to the queue"
    assert report["exit"]["reason"] == "not started: attempt 2 of job holder still uses slot 1 of this host"
    write_json(holder.exit_file, build_host_exit_report(holder, "succeeded", "well"))
    assert claim_attempt(tmp_path, build_launch_order("later", slots=[1])) is not None


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
    values = {"MESHBOARD_RUN_DIR": folder, "MESHBOARD_MIN_FREE_BYTES": "0"}
    with run_host(redis_service, tmp_path / "host", **values) as machine, machine.run_worker():
        machine.send_launch_order("crowded", spec=ONE_RANK, times=3)
        report = machine.wait_for_exit("crowded", 10)
        assert report["outcome"] == "failed"
        assert report["reason"].startswith(f"No disk space on {HOST_NAME}: No space left on device: {folder}")
        assert report["reason"].endswith(", 0 bytes are free")
        assert report["host_fault"] == "launch"
        assert "has no free space" in machine.read_events("host")[-1]["problem"]
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
    values = {"MESHBOARD_RUN_DIR": str(folder), "MESHBOARD_MIN_FREE_BYTES": "0"}
    with run_host(redis_service, tmp_path / "host", **values) as machine, machine.run_worker():
        fill_disk(full)
        with (full / "filling").open("r+b") as filling:  # a page for the spec, and one for the order
            filling.truncate(filling.seek(0, os.SEEK_END) - 2 * PAGE_BYTES)
        machine.send_launch_order("crowded", spec=ONE_RANK)
        report = machine.wait_for_exit("crowded", 10)
        claimed = get_attempt_dir(folder, "crowded", 1)
        assert claimed.order_file.exists()
        assert (report["outcome"], report["host_fault"]) == ("failed", "launch")
        result = re.escape(f"No disk space on {HOST_NAME}: No space left on device: {claimed.pid_file} needs ")
        assert re.fullmatch(rf"{result}\d+ bytes, 0 bytes are free", report["reason"])
        assert [path.name for path in claimed.host_dir.glob(".*")] == [], "no draft of it is left"


def test_failed_claim_leaves_no_files(full: Path, started: list[AttemptDir]) -> None:
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", full), ends).start(build_launch_order())
    assert [result["exit"]["outcome"] for result in ends.get_reports().values()] == ["failed"]
    left = [path for path in full.rglob("*") if path.is_file() and path.name not in ("filling", "lock")]
    assert (left, started) == ([], [])


def test_reports_any_disk_error(tmp_path: Path, started: list[AttemptDir]) -> None:
    (tmp_path / "job").write_text("a file where the job's folder would be")
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", tmp_path), ends).start(build_launch_order())
    (result,) = ends.get_reports().values()
    assert result["exit"]["reason"] == f"Not started on testhost: [Errno 17] File exists: '{tmp_path}/job'"
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
    (result,) = ends.get_reports().values()
    assert result["job"] == "after"
    assert result["exit"]["reason"].startswith("Not started on testhost: [Errno 30] Read-only file system")


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

    monkeypatch.setattr("workers.host.health_check._find_interpreter_problem", lambda: "")
    monkeypatch.setattr("workers.host.attempt_watcher.subprocess.run", refuse)
    ends = HostExits()
    AttemptStarter(settings("redis://nobody", tmp_path), ends).start(build_launch_order())
    report = get_attempt_dir(tmp_path, "job", 1).read_exit()
    assert report is not None
    assert (report["outcome"], report["host_fault"]) == ("failed", "launch")
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
    (result,) = heartbeats(redis_service)[-1]["attempts"]
    assert (result["state"], result["exit"]["outcome"]) == ("exited", "lost")
    reporter.exits.acknowledge(claimed)
    reporter._send()
    (result,) = heartbeats(redis_service)[-1]["attempts"]
    assert (result["state"], "exit" in result) == ("exited", False)
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
    assert prune_attempts(tmp_path, 7 * DAY_S, 2**40).removed == [old]
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
    assert prune_attempts(tmp_path, 0, 0).removed == []
    assert jobs(tmp_path) == ["living", "untold"]
    assert Path("/etc/hostname").exists(), "no link out of a job's directory was followed"


def test_one_folder_that_cannot_be_removed_costs_only_that_folder(
    redis_service: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prune a run directory in which the oldest attempts have a deep tree and an immutable file."""
    days = {"deep": 9.0, "locked": 8.5, "other": 8.0, "young": 1.0}
    deep, locked, other, _ = (ended(tmp_path, job, days_ago=days_ago) for job, days_ago in days.items())
    make_nested(deep.work / "tree", 1100)
    host = replace(settings(redis_service.url, tmp_path), keep_runs_bytes=3 * MEBI // 2)
    pruner = Pruner(host)
    made = Reporter(host, "Jobs run as root.", pruner=pruner)
    with immutable(locked.logs / "launcher.log"):
        pruner.prune()
        pruner.prune()
        assert jobs(tmp_path) == ["locked", "young"], "the bytes of the stuck attempt do not cost the young attempt"
        assert [path.exists() for path in (deep.job_dir, locked.work, other.job_dir)] == [False] * 3
        assert str(locked.job_dir) in pruner.problem
        assert "launcher.log" in pruner.problem
        assert [record.message for record in caplog.records].count(pruner.problem) == 1
        made._send()
        problem = pruner.problem
    pruner.prune()
    assert (jobs(tmp_path), pruner.problem) == (["young"], "")
    made._send()
    notes = [event["note"] for event in heartbeats(redis_service)]
    assert notes == [f"{problem} Jobs run as root.", "Jobs run as root."]


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
