"""Attempts on disk: states from files, and broken files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.control import LaunchOrder
from tests.support.host import build_launch_order
from tests.support.processes import ROOT, RedisServer
from workers.disk import MAX_JSON_BYTES, BadFileError, read_json, write_json
from workers.host.attempt_watcher import AttemptWatcher, read_report_or_note
from workers.host.attempts import AttemptDir, build_host_exit_report, claim_attempt, get_attempt_dir
from workers.host.processes import get_process_id


def supervised(folder: Path, started_offset: int, asked: LaunchOrder | None = None) -> AttemptDir:
    """Claim an attempt with the test process as its supervisor. An offset makes the supervisor invalid."""
    claimed = claim_attempt(folder, asked or build_launch_order())
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
