"""An order that this machine cannot carry out is told as failed, for good, and never of one that was started."""

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
from tests.support.disks import PAGE, fill, full_disk
from tests.support.host import NAME, host
from tests.support.orders import order
from tests.support.processes import RedisServer, wait_until
from tests.workers.host.test_reporter import heartbeats, settings
from workers.host import watch
from workers.host.attempts import AttemptDir, attempt_dir
from workers.host.ends import Ends
from workers.host.processes import process_id
from workers.host.reporter import Reporter
from workers.host.start.claims import claim
from workers.host.start.starting import Starter

ONE_RANK = {"model": {"preset": "gpt-tiny"}}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk without a byte left."""
    with full_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AttemptDir]:
    """Whose supervisors were started: none is."""
    found: list[AttemptDir] = []
    monkeypatch.setattr(Starter, "_start_supervisor", lambda _, attempt: found.append(attempt))
    return found


def test_a_job_on_a_full_disk_fails_with_the_reason(redis_service: RedisServer, full: Path, tmp_path: Path) -> None:
    """Once it was starting for ever: the error went to Celery, and the order came again and again."""
    folder = str(full / "runs")
    with host(redis_service, tmp_path / "host", MESHBOARD_RUN_DIR=folder) as machine, machine.worker():
        machine.order("crowded", spec=ONE_RANK, times=3)
        report = machine.exit_of("crowded", 10)
        assert report["outcome"] == "failed"
        assert report["reason"].startswith(f"No disk space on {NAME}: No space left on device: {folder}")
        assert report["reason"].endswith(", 0 bytes are free")
        machine._sender.send_task(TASK_ACKNOWLEDGE, args=["crowded", 1], queue=host_queue(NAME))
        wait_until(lambda: machine.events("host")[-1]["attempts"] == [], "it is not told any more")
        (full / "filling").unlink()
        machine.order("crowded", spec=ONE_RANK)
        machine.order("roomy", spec={**ONE_RANK, "train": {"steps": 1, "warmup_steps": 1}})
        assert machine.exit_of("roomy")["outcome"] == "succeeded"
        assert {report["state"] for report in machine.reports("crowded")} == {"exited"}


def test_a_disk_that_takes_the_claim_and_not_the_supervisor_s_own_file_is_told_in_its_words(
    redis_service: RedisServer, full: Path, tmp_path: Path
) -> None:
    """It was lost after a while, and nobody knew why."""
    folder = full / "runs"
    (full / "filling").unlink()
    with host(redis_service, tmp_path / "host", MESHBOARD_RUN_DIR=str(folder)) as machine, machine.worker():
        fill(full)
        with (full / "filling").open("r+b") as filling:  # a page for the spec, and one for the order
            filling.truncate(filling.seek(0, os.SEEK_END) - 2 * PAGE)
        machine.order("crowded", spec=ONE_RANK)
        report = machine.exit_of("crowded", 10)
        claimed = attempt_dir(folder, "crowded", 1)
        assert claimed.order.exists()
        assert report["outcome"] == "failed"
        told = re.escape(f"No disk space on {NAME}: No space left on device: {claimed.supervisor} needs ")
        assert re.fullmatch(rf"{told}\d+ bytes, 0 bytes are free", report["reason"])
        assert [path.name for path in claimed.own.glob(".*")] == [], "no draft of it is left"


def test_nothing_is_left_of_what_could_not_be_claimed(full: Path, started: list[AttemptDir]) -> None:
    ends = Ends()
    Starter(settings("redis://nobody", full), ends).start(order())
    assert [told["exit"]["outcome"] for told in ends.told().values()] == ["failed"]
    left = [path for path in full.rglob("*") if path.is_file() and path.name not in ("filling", "lock")]
    assert (left, started) == ([], [])


def test_any_error_of_the_disk_is_told(tmp_path: Path, started: list[AttemptDir]) -> None:
    (tmp_path / "job").write_text("a file where the job's folder would be")
    ends = Ends()
    Starter(settings("redis://nobody", tmp_path), ends).start(order())
    (told,) = ends.told().values()
    assert told["exit"]["reason"] == f"Not started on testhost: [Errno 17] File exists: '{tmp_path}/job'"
    assert started == []


def test_a_disk_that_is_read_only_now_refuses_what_is_new_and_knows_what_was_started(
    full: Path, started: list[AttemptDir]
) -> None:
    (full / "filling").unlink()
    ends = Ends()
    starter = Starter(settings("redis://nobody", full), ends)
    starter.start(order("before"))
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    starter.start(order("before"))
    starter.start(order("after", slots=[1]))
    assert [attempt.job for attempt in started] == ["before"]
    (told,) = ends.told().values()
    assert told["job"] == "after"
    assert told["exit"]["reason"].startswith("Not started on testhost: [Errno 30] Read-only file system")


def test_a_start_that_was_told_as_failed_is_none_when_there_is_room_again(
    tmp_path: Path, started: list[AttemptDir]
) -> None:
    in_the_way = tmp_path / "job"
    in_the_way.touch()
    ends = Ends()
    starter = Starter(settings("redis://nobody", tmp_path), ends)
    starter.start(order())
    in_the_way.unlink()
    starter.start(order())
    ends.acknowledge(attempt_dir(tmp_path, "job", 1))
    starter.start(order())
    assert started == []
    starter.start(order(attempt=2))
    assert [attempt.attempt for attempt in started] == [2]


def test_one_that_was_started_is_not_told_as_failed_by_another_delivery(
    tmp_path: Path, started: list[AttemptDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten deliveries on a disk that goes bad after the first."""
    claims = iter([claim])

    def goes_bad(*arguments: Any) -> Any:
        return next(claims, _refuses)(*arguments)

    monkeypatch.setattr("workers.host.start.starting.claim", goes_bad)
    ends = Ends()
    starter = Starter(settings("redis://nobody", tmp_path), ends)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: starter.start(order()), range(10)))
    assert len(started) == 1
    assert ends.told() == {}


def _refuses(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_supervisor_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "setsid")

    monkeypatch.setattr("workers.host.start.starting.subprocess.run", refuse)
    ends = Ends()
    Starter(settings("redis://nobody", tmp_path), ends).start(order())
    report = attempt_dir(tmp_path, "job", 1).read_exit()
    assert report is not None
    assert report["outcome"] == "failed"
    assert report["reason"].startswith("Not started on testhost: [Errno 11] Resource temporarily unavailable")
    assert ends.told() == {}, "it is told from disk"


def test_an_end_that_cannot_be_written_is_told_and_written_when_there_is_room(
    redis_service: RedisServer, full: Path
) -> None:
    """Once it was tried each second for ever, and its slots were held as long."""
    (full / "filling").unlink()
    claimed = claim(full, order())
    assert claimed is not None
    claimed.supervisor.write_text('{"pid": 1, "started": 1}')
    fill(full)
    reporter = Reporter(settings(redis_service.url, full))
    assert reporter._watch.look() is True
    assert reporter._watch.look() is False
    reporter._send()
    (told,) = heartbeats(redis_service)[-1]["attempts"]
    assert (told["state"], told["exit"]["outcome"]) == ("exited", "lost")
    reporter.ends.acknowledge(claimed)
    reporter._send()
    (told,) = heartbeats(redis_service)[-1]["attempts"]
    assert (told["state"], "exit" in told) == ("exited", False)
    (full / "filling").unlink()
    assert reporter._watch.look() is True
    assert reporter.ends.told() == {}
    report = claimed.read_exit()
    assert report is not None
    assert report["outcome"] == "lost"


def test_a_supervisor_that_began_while_it_was_given_up_is_left_to_it(
    redis_service: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So slow a start that its attempt is being called lost: it was, and trained on beside the next."""
    claimed = claim(tmp_path, order())
    assert claimed is not None
    late = process_id(os.getpid())
    assert late is not None

    def begins(*_asked: object) -> list[int]:
        claimed.supervisor.write_text(json.dumps({**late._asdict(), "folder": str(tmp_path / "socket")}))
        return []

    monkeypatch.setattr(watch, "START_GRACE_S", -1.0)
    monkeypatch.setattr(watch, "sweep", begins)
    reporter = Reporter(settings(redis_service.url, tmp_path))
    reporter._watch.look()
    assert claimed.read_exit() is None
