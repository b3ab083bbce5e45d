"""Heartbeats of a host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts.codec import decode_event
from contracts.names import events_stream
from tests.support.host import build_launch_order
from tests.support.processes import ROOT, RedisServer, base_environment, scale_timeout, wait_until
from workers.disk import write_json
from workers.host import reporter
from workers.host.attempts import build_host_exit_report, claim_attempt, iterate_unacknowledged
from workers.host.reporter import Reporter
from workers.host.settings import HostSettings

BROKEN_HEART = """
import sys, time
from pathlib import Path
from workers.host.reporter import Reporter
from workers.host.settings import HostSettings
from workers.host.attempt_watcher import AttemptWatcher

raised = [RuntimeError, KeyError, RecursionError, SystemExit]

def check(self):
    if len(raised) == 1 and reporter._sequence == 0:
        return True
    raise raised.pop(0)("on purpose")

AttemptWatcher.check = check
here = Path(sys.argv[2])
reporter = Reporter(HostSettings(sys.argv[1], "testhost", 4, "cpu", here, here, here, here, "workers.trainer"))
reporter.start()
time.sleep(60)
"""


def settings(redis_url: str, run_dir: Path) -> HostSettings:
    folders = (run_dir, run_dir, run_dir, run_dir)
    return HostSettings(redis_url, "testhost", 4, "cpu", *folders, "workers.trainer", min_free_bytes=0)


def heartbeats(server: RedisServer) -> list[Any]:
    entries: Any = server.client().xrange(events_stream("testhost"))
    return [decode_event(fields[b"b"]) for _, fields in entries]


def test_heartbeats_survive_errors_and_their_end_ends_the_worker(redis_service: RedisServer, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", BROKEN_HEART, redis_service.url, tmp_path]
    ran = subprocess.run(
        argv, cwd=ROOT, env=base_environment(), capture_output=True, text=True, timeout=scale_timeout(40), check=False
    )
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr.count("on purpose") >= 3
    assert "the reporter ended, so this worker stops" in ran.stderr
    assert len(heartbeats(redis_service)) >= 1


def test_exit_reports_that_do_not_fit_are_sent_in_turn(
    redis_service: RedisServer, tmp_path: Path, monkeypatch: Any
) -> None:
    for number in range(3):
        made = claim_attempt(tmp_path, build_launch_order(f"job-{number}", slots=[number]))
        assert made is not None
        report = build_host_exit_report(made, "failed", "x" * 900)
        write_json(made.exit_file, report)
    monkeypatch.setattr(reporter, "MAX_EXIT_BYTES", 2500)
    made_reporter = Reporter(settings(redis_service.url, tmp_path))
    for _ in range(3):
        made_reporter._send()
    events = heartbeats(redis_service)
    result = [[report["job"] for report in event["attempts"] if "exit" in report] for event in events]
    assert [len(event["attempts"]) for event in heartbeats(redis_service)] == [3, 3, 3], (
        "every heartbeat has all attempts"
    )
    assert [len(jobs) for jobs in result] == [2, 2, 2]
    assert set(result[0]) | set(result[1]) == {"job-0", "job-1", "job-2"}
    monkeypatch.setattr(reporter, "MAX_EVENTS_BYTES", 0)
    made_reporter._send()
    assert [report for report in heartbeats(redis_service)[-1]["attempts"] if "exit" in report] == []


def test_removed_host_logs_one_warning(
    redis_service: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Reporter(settings(redis_service.url.replace("//", "//gone:secret@"), tmp_path))
    with caplog.at_level("WARNING"):
        for _ in range(3):
            assert made._scan(0.0) == 0.0, "it goes on asking"
    [lines] = caplog.messages
    assert lines.startswith("cannot report to the controller: The board does not know this host. The host was removed")


def test_heartbeats_resume_after_an_outage_of_redis(redis_service: RedisServer, tmp_path: Path) -> None:
    made = Reporter(settings(redis_service.url, tmp_path))
    made.start()
    try:
        wait_until(lambda: heartbeats(redis_service), "it is heard", 10)
        redis_service.stop()
        made.wake()
        redis_service.start()
        redis_service.client().flushall()
        made.wake()
        wait_until(lambda: heartbeats(redis_service), "it is heard again", 10)
        assert list(iterate_unacknowledged(tmp_path)) == []
    finally:
        made.stop()
