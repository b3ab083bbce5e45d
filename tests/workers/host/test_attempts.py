"""What a host knows of its attempts from their files, however broken one of them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.control import LaunchOrder
from tests.support.orders import order
from tests.support.processes import ROOT, RedisServer
from workers.host.attempts import AttemptDir, attempt_dir, report_of_host
from workers.host.files import MOST_BYTES, BadFileError, read_json, write_json
from workers.host.processes import process_id
from workers.host.start.claims import claim
from workers.host.watch import Watch, told_of


def supervised(folder: Path, started_offset: int, asked: LaunchOrder | None = None) -> AttemptDir:
    """An attempt that names this very process as its supervisor; an offset makes it one that is gone."""
    claimed = claim(folder, asked or order())
    assert claimed is not None
    me = process_id(os.getpid())
    assert me is not None
    write_json(claimed.supervisor, {"pid": me.pid, "started": me.started + started_offset})
    return claimed


@pytest.mark.parametrize(("job", "attempt"), [("../out", 1), ("", 1), ("a/b", 1), ("job", 0), ("job\n", 1)])
def test_a_name_that_could_leave_the_run_directory_is_refused(tmp_path: Path, job: str, attempt: int) -> None:
    with pytest.raises(ValueError, match="not an attempt"):
        attempt_dir(tmp_path, job, attempt)


def test_a_pid_that_another_process_took_is_no_living_supervisor(tmp_path: Path) -> None:
    assert supervised(tmp_path / "a", 0).supervisor_id() is not None
    assert supervised(tmp_path / "b", -1).supervisor_id() is None


def test_nothing_of_the_hosts_lies_where_the_job_works(tmp_path: Path) -> None:
    attempt = supervised(tmp_path, 0)
    hosts = (attempt.order, attempt.supervisor, attempt.exit, attempt.running, attempt.acknowledged, attempt.note)
    jobs = (attempt.spec, attempt.work, attempt.logs, attempt.failure)
    assert [path for path in hosts if path.is_relative_to(attempt.given) or path.is_relative_to(attempt.work)] == []
    assert [path for path in jobs if path.is_relative_to(attempt.own)] == []


def test_only_a_dead_supervisor_without_a_report_is_lost(redis_service: RedisServer, tmp_path: Path) -> None:
    alive, dead, done = (supervised(tmp_path / name, offset) for name, offset in (("a", 0), ("b", -1), ("c", -1)))
    write_json(done.exit, report_of_host(done, "succeeded", "well"))
    found = [Watch(attempt.run_dir, redis_service.client()).look() for attempt in (alive, dead, done)]
    assert found == [False, True, False]
    assert not alive.exit.exists()
    assert read_json(dead.exit)["outcome"] == "lost"
    assert read_json(done.exit)["outcome"] == "succeeded"
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
        json.dumps(report_of_host(AttemptDir(path.parent, "other", 7), "succeeded", "well"))
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_exit_report_is_a_fact_about_its_attempt_alone(
    redis_service: RedisServer, tmp_path: Path, what: str
) -> None:
    """Once such a file in a script's working directory stopped the host's heartbeats for good."""
    broken = supervised(tmp_path, -1, order("broken", slots=[0]))
    sound = supervised(tmp_path, 0, order("sound", slots=[1]))
    BROKEN[what](broken.exit)
    watch = Watch(tmp_path, redis_service.client())
    watch.look()
    report = told_of(broken)
    assert (report["state"], report["slots"], report["exit"]["outcome"]) == ("exited", [0], "lost")
    assert report["exit"]["reason"].startswith("the supervisor ended, and its report cannot be read: exit.json")
    assert told_of(sound)["state"] == "starting"
    assert watch.look() is False


@pytest.mark.parametrize("name", ["order", "supervisor", "note", "running"])
def test_no_broken_file_keeps_another_attempt_from_being_told(
    redis_service: RedisServer, tmp_path: Path, name: str
) -> None:
    for what, damage in BROKEN.items():
        run_dir = tmp_path / what
        broken = supervised(run_dir, 0, order("broken", slots=[0]))
        dead = supervised(run_dir, -1, order("dead", slots=[1]))
        path: Path = getattr(broken, name)
        path.unlink(missing_ok=True)
        damage(path)
        Watch(run_dir, redis_service.client()).look()
        assert told_of(broken)["job"] == "broken", what
        assert told_of(dead)["exit"]["outcome"] == "lost", what


def test_an_attempt_that_cannot_be_buried_holds_up_no_other(redis_service: RedisServer, tmp_path: Path) -> None:
    stuck = supervised(tmp_path, -1, order("a-stuck", slots=[0]))
    (stuck.own / f".{stuck.exit.name}.{os.getpid()}").mkdir()  # where its report would be drafted
    dead = supervised(tmp_path, -1, order("dead", slots=[1]))
    assert Watch(tmp_path, redis_service.client()).look() is True
    assert told_of(dead)["exit"]["outcome"] == "lost"
    assert told_of(stuck)["state"] == "starting"


def test_a_file_that_cannot_be_read_now_is_not_a_broken_one(tmp_path: Path) -> None:
    """As when descriptors run out: a good report must not be thrown away for it."""
    whole = tmp_path / "exit.json"
    whole.write_text("1")
    script = """
import os, resource, sys
from pathlib import Path
from workers.host.files import BadFileError, read_json
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


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('"' + "x" * (MOST_BYTES - 2) + '"')
    assert len(read_json(path)) == MOST_BYTES - 2
    path.write_text('"' + "x" * (MOST_BYTES - 1) + '"')
    with pytest.raises(BadFileError, match="larger than"):
        read_json(path)
