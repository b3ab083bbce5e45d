"""Output of `submit --follow` and `submit --wait` while jobs run."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshboard import live_display
from meshboard.client import Job
from meshboard.follow import JobProgress
from tests.client.conftest import Answer, FakeServer, answer
from tests.client.test_api import ENDED, JOB
from tests.client.test_commands import Meshboard, event, log
from tests.support.processes import scale_timeout

RUNNING = {**JOB, "spec": {"train": {"steps": 12}}}


@pytest.fixture
def spec(tmp_path: Path) -> str:
    file = tmp_path / "spec.yaml"
    file.write_text("name: n")
    return str(file)


def test_progress_bar_follows_events(
    meshboard: Meshboard, server: FakeServer, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder, some seconds behind, knows of no step yet."""
    moved, next_answer, at = threading.Event(), server.next, live_display.WaitDisplay.update_step

    def received(self: live_display.WaitDisplay, seen: JobProgress) -> None:
        at(self, seen)
        if seen.step == 12:
            moved.set()

    def held_back(path: str) -> Answer:
        if path.startswith("/api/v1/jobs/j/wait"):
            assert moved.wait(scale_timeout(5)), "the events are followed while the job is waited for"
        return next_answer(path)

    monkeypatch.setattr(live_display.WaitDisplay, "update_step", received)
    monkeypatch.setattr(server, "next", held_back)
    monkeypatch.setattr(live_display, "is_interactive", lambda _stream: True)
    step = {"attempt": 1, "step": 12, "loss": 3.0, "step_s": 0.25}
    server.at["jobs/j/events"] = answer(200, event("step", step) + event("end", {"status": "succeeded", "attempt": 1}))
    server.at["jobs/j/logs/0"] = answer(200, log(0, "step 12/12 loss 3") + event("end", {}))
    server.respond_at("jobs", RUNNING, 201)
    server.respond_at("jobs/j", RUNNING)
    server.respond_at("jobs/j/wait", {"reached": True, "job": {**RUNNING, **ENDED}})
    ran = meshboard("submit", spec, "--follow", at=server)
    assert (ran.code, "12/12" in ran.err.replace("step 12/12", "")) == (0, True), ran.err


@pytest.mark.parametrize("also", [{"FORCE_COLOR": "1"}, {"CI": "true"}])
def test_ci_log_has_plain_lines(server: FakeServer, spec: str, also: dict[str, str]) -> None:
    """Also one that wants colours, and one that is a terminal."""
    server.respond_at("jobs", RUNNING, 201)
    server.respond_at("jobs/j", {**RUNNING, **ENDED})
    server.respond_at("jobs/j/wait", {"reached": True, "job": {**RUNNING, **ENDED}})
    environment = {"PATH": os.environ["PATH"], "MESHBOARD_URL": server.url, "MESHBOARD_TOKEN": "t", "TERM": "xterm"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **also}
    reads, writes = pty.openpty() if "CI" in also else os.pipe()
    for words in (["submit", spec, "--wait"], ["watch", "j"]):
        argv = [sys.executable, "-m", "meshboard", *words]
        ran = subprocess.run(argv, env=environment, stdout=writes, stderr=writes, timeout=60, check=False)
        assert ran.returncode == 0
    os.close(writes)
    content = b""
    with suppress(OSError):  # how a terminal says that it is over
        while part := os.read(reads, 2**16):
            content += part
    os.close(reads)
    assert content.count(b"succeeded") == 2
    assert b"\x1b" not in content


def test_progress_bar_moves_back_only_for_another_attempt() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, markup=False)

    def look(step: int, attempt: int) -> JobProgress:
        return JobProgress(Job({**RUNNING, "attempt": attempt}), step, None, None, {}, {})

    with live_display.WaitDisplay(console=screen) as waiting:
        waiting(Job(RUNNING))
        for step, attempt in ((7, 1), (5, 1), (2, 2), (8, 1)):
            waiting.update_step(look(step, attempt))
    content = screen.file.getvalue()  # type: ignore[attr-defined]
    assert [f"{step}/12" in content for step in (7, 5, 2, 8)] == [True, False, True, False]


@pytest.mark.parametrize("runs", [1, 2])
def test_labels_lines_of_several_jobs(meshboard: Meshboard, server: FakeServer, spec: str, runs: int) -> None:
    made: list[Any] = [answer(201, {**RUNNING, "id": name}) for name in ("j", "k")]
    server.answers = made
    for name in ("j", "k"):
        server.respond_at(f"jobs/{name}", {**RUNNING, "id": name})
        server.at[f"jobs/{name}/logs/0"] = answer(200, log(0, f"step 1 of {name}") + event("end", {}))
        server.respond_at(f"jobs/{name}/wait", {"reached": True, "job": {**ENDED, "id": name}})
    ran = meshboard("submit", spec, "--follow", "--runs", str(runs), at=server)
    lines = sorted(line for line in ran.err.splitlines() if "step 1 of" in line)
    assert (ran.code, lines) == (0, ["j: step 1 of j", "k: step 1 of k"] if runs > 1 else ["step 1 of j"])
    assert "j  succeeded" in ran.err, "and a change of state names its job by itself"


def test_follows_several_jobs_at_once(
    meshboard: Meshboard, server: FakeServer, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has not ended before the second's log is asked for."""
    server.answers = [answer(201, {**RUNNING, "id": name}) for name in ("j", "k")]
    for name in ("j", "k"):
        server.respond_at(f"jobs/{name}", {**RUNNING, "id": name})
        server.at[f"jobs/{name}/logs/0"] = answer(200, log(0, f"step 1 of {name}") + event("end", {}))
        server.respond_at(f"jobs/{name}/wait", {"reached": True, "job": {**ENDED, "id": name}})
    answered, requested, at_once = server.next, threading.Event(), []

    def answers(path: str) -> Any:
        if "jobs/k/logs" in path:
            requested.set()
        if "jobs/j/wait?for=finished" in path:
            at_once.append(requested.wait(scale_timeout(5)))
        return answered(path)

    monkeypatch.setattr(server, "next", answers)
    ran = meshboard("submit", spec, "--follow", "--runs", "2", at=server)
    assert (ran.code, "k: step 1 of k" in ran.err, at_once[0]) == (0, True, True)


def test_follows_the_named_attempt(meshboard: Meshboard, server: FakeServer) -> None:
    server.respond_at("jobs/j", {**RUNNING, "attempt": 2})
    server.at["jobs/j/logs/0"] = answer(200, log(0, "step 1") + event("end", {}))
    assert meshboard("logs", "j", "-f", "--attempt", "1", at=server).out == "step 1\n"
    assert server.requests == ["GET /api/v1/jobs/j/logs/0?follow=1&attempt=1"]


@pytest.mark.parametrize(("status", "content"), [(201, False), (200, True)])
def test_reports_an_existing_job_for_a_key(
    meshboard: Meshboard, server: FakeServer, spec: str, status: int, content: bool
) -> None:
    server.respond_at("jobs", RUNNING, status)
    ran = meshboard("submit", spec, "--key", "build-1", at=server)
    assert (ran.code, ran.out, "already exists" in ran.err) == (0, "j\n", content)


def test_timeout_counts_from_the_start_of_all_waits(meshboard: Meshboard, server: FakeServer, spec: str) -> None:
    """The first had taken all the time."""
    server.answers = [answer(201, {**RUNNING, "id": name}) for name in ("j", "k")]
    server.respond_at("jobs/j", {**ENDED, "id": "j"})
    server.respond_at("jobs/k", {**RUNNING, "id": "k"})
    server.respond_at("jobs/k/wait", {"reached": False, "job": {**RUNNING, "id": "k"}})
    ran = meshboard("submit", spec, "--wait", "--runs", "2", "--timeout", "0.25", at=server)
    assert "job k is still running after 0.25 s" in ran.err


@pytest.mark.parametrize("attempt", [1, 3])
def test_prints_logs_of_attempts_during_an_outage(meshboard: Meshboard, server: FakeServer, attempt: int) -> None:
    """The board was away for as long; of attempts that had no host there is none."""
    server.answers = [answer(200, {**JOB, "status": "queued"})]
    not_started = answer(409, {"errors": [{"field": "log", "message": "it has not started"}]})
    server.answers += [not_started, answer(200, {"reached": True, "job": {**ENDED, "attempt": attempt}})]
    server.answers += [answer(200, b"one\ntwo", **{"Content-Type": "text/plain"})]
    server.answers += [not_started, answer(200, b"three\n", **{"Content-Type": "text/plain"})][: attempt - 1]
    ran = meshboard("logs", "j", "-f", at=server)
    assert (ran.code, ran.out.splitlines()) == (0, ["one", "two", "three"][: 2 + attempt // 3])
    assert [path for path in server.requests if "logs/0?attempt" in path] == [
        f"GET /api/v1/jobs/j/logs/0?attempt={number}&text=terminal" for number in range(1, attempt + 1)
    ]


def test_cancelled_queued_job_has_no_log(meshboard: Meshboard, server: FakeServer) -> None:
    server.answers = [answer(200, {**JOB, "status": "queued"})]
    not_started = answer(409, {"errors": [{"field": "log", "message": "it has not started"}]})
    server.answers += [not_started, answer(200, {"reached": False, "job": ENDED}), not_started]
    assert meshboard("logs", "j", "-f", at=server) == (0, "", "")
