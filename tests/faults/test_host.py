"""Faults of one run_host: killed processes, a restart of Redis, and invalid messages."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from celery import Celery

from contracts.names import TASK_LAUNCH, cancel_key, host_queue
from contracts.telemetry.items import VERSION
from contracts.traces import build_traceparent
from tests.support.host import HOST_NAME, TRACE_ID, Host, run_host
from tests.support.processes import ROOT, RedisServer, is_gone, wait_until
from workers.disk import read_json
from workers.host.attempts import get_attempt_dir


@pytest.fixture
def machine(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with run_host(redis_service, tmp_path) as made:
        yield made


def supervisor_pid(machine: Host, job: str) -> int:
    path = get_attempt_dir(machine.run_dir, job, 1).pid_file
    pid: int = wait_until(lambda: read_json(path), "the supervisor writes its pid")["pid"]
    return pid


def rank_pid(machine: Host, job: str, rank: int) -> int:
    for pid in machine.list_processes(job):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def module_pid(machine: Host, job: str, module: str) -> int:
    return next(pid for pid in machine.list_processes(job) if arguments(pid)[1:3] == ["-m", module])


@pytest.mark.slow
def test_order_delivered_ten_times_starts_once(machine: Host) -> None:
    spec = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 3, "warmup_steps": 1}}
    with machine.run_worker():
        machine.send_launch_order("repeated", spec=spec, times=10)
        report = machine.wait_for_exit("repeated")
        assert (report["outcome"], report["reason"]) == ("succeeded", "finished after step 3")
        assert [i["step"] for i in machine.read_items("repeated", "step") if i["rank"] == 0] == [1, 2, 3]
        assert report["summary"] is not None
        rows = [row for rows in report["summary"]["verdict"].values() for row in rows]
        assert len(report["summary"]["verdict"]) == 2
        assert sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows) == 0
        assert sum(row["measured_bytes"] for row in rows) > 0
        lines = [line for item in machine.read_items("repeated", "log") if item["rank"] == 0 for line in item["lines"]]
        assert any(line.startswith("step 3/3 loss") for line in lines)
        assert machine.list_processes("repeated") == []


@pytest.mark.slow
def test_killed_host_worker_leaves_training_to_the_next_worker(machine: Host) -> None:
    with machine.run_worker() as worker:
        machine.send_launch_order("adopted")
        machine.wait_for_steps("adopted")
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        seen = max(i["step"] for i in machine.read_items("adopted", "step"))
        machine.wait_for_steps("adopted", seen + 20)
    received = len(machine.read_events("host"))
    with machine.run_worker():
        after = machine.read_events("host")[received]
        assert [(r["job"], r["state"]) for r in after["attempts"]] == [("adopted", "running")]
        seen = max(i["step"] for i in machine.read_items("adopted", "step"))
        machine.wait_for_steps("adopted", seen + 5)


def test_killed_supervisor_leaves_no_process_and_a_lost_attempt(machine: Host) -> None:
    with machine.run_worker():
        machine.send_launch_order("headless")
        machine.wait_for_steps("headless")
        pids = machine.list_processes("headless")
        assert len(pids) >= 3
        os.kill(supervisor_pid(machine, "headless"), signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), "every process is gone", 5)
        assert machine.wait_for_exit("headless", 10)["outcome"] == "lost"


@pytest.mark.extended
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a PID namespace")
def test_restarted_container_makes_its_job_fail_because_of_the_host(machine: Host) -> None:
    """A PID namespace stands for the container: its kernel ends all processes with the first one."""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with machine.run_worker(*container) as first:
        machine.send_launch_order("moved")
        machine.wait_for_steps("moved", 2)
        first.kill()
        first.wait()
        wait_until(lambda: machine.list_processes("moved") == [], "the container and its job end")
    with machine.run_worker(*container):
        report = machine.wait_for_exit("moved")
    assert (report["outcome"], report["host_fault"]) == ("failed", "restart")


def test_killed_rank_is_reported_with_signal_and_last_lines(machine: Host) -> None:
    with machine.run_worker():
        machine.send_launch_order("wounded")
        machine.wait_for_steps("wounded", 3)
        os.kill(rank_pid(machine, "wounded", 0), signal.SIGKILL)
        report = machine.wait_for_exit("wounded")
        assert (report["outcome"], report["rank"], report["signal"]) == ("failed", 0, "SIGKILL")
        assert report["reason"].startswith("rank 0 was killed by SIGKILL after step")
        assert any(line.startswith("step ") for line in report["log_tail"])
        assert machine.list_processes("wounded") == []


@pytest.mark.parametrize(
    "module",
    [pytest.param("workers.host.launch", marks=pytest.mark.slow), "workers.host.guardian"],
)
def test_killed_torchrun_or_guardian_ends_every_rank(machine: Host, module: str) -> None:
    with machine.run_worker():
        machine.send_launch_order("beheaded")
        machine.wait_for_steps("beheaded", 3)
        pids = machine.list_processes("beheaded")
        os.kill(module_pid(machine, "beheaded", module), signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), "every process is gone", 5)
        report = machine.wait_for_exit("beheaded", 10)
        assert (report["outcome"], report["rank"], report["signal"]) == ("failed", None, "SIGKILL")
        assert report["reason"].startswith("torchrun was killed by SIGKILL after step ")


@pytest.mark.slow
def test_stop_command_ends_all_attempts_with_a_report(machine: Host) -> None:
    with machine.run_worker():
        machine.send_launch_order("stopped")
        machine.wait_for_steps("stopped")
        pids = machine.list_processes("stopped")
        stop = [sys.executable, "-m", "workers.host.stop", str(machine.run_dir)]
        subprocess.run(stop, cwd=ROOT, timeout=30, check=True)
        assert [pid for pid in pids if not is_gone(pid)] == []
        report = machine.wait_for_exit("stopped", 10)
        assert (report["outcome"], report["reason"]) == ("failed", "the host was stopped")


@pytest.mark.slow
def test_restart_of_redis_loses_no_telemetry(machine: Host) -> None:
    with machine.run_worker():
        machine.send_launch_order("patient")
        machine.wait_for_steps("patient", 3)
        machine.server.stop()
        time.sleep(2)  # the outage itself, which must not affect training
        machine.server.start()
        seen = max(i["step"] for i in machine.read_items("patient", "step"))
        machine.wait_for_steps("patient", seen + 20)
        steps = [i["step"] for i in machine.read_items("patient", "step") if i["rank"] == 1]
        assert steps == list(range(1, len(steps) + 1))
        assert machine.read_items("patient", "gap") == []


@pytest.mark.slow
def test_invalid_data_file_is_reported_in_one_line(machine: Host) -> None:
    spec = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"data": "nowhere.txt"}}
    with machine.run_worker():
        machine.send_launch_order("dataless", spec=spec)
        report = machine.wait_for_exit("dataless")
        assert report["exit_code"] == 2
        assert report["reason"].endswith("`train.data` is 'nowhere.txt', which does not exist below the data root.")
        log = get_attempt_dir(machine.run_dir, "dataless", 1).supervisor_log.read_text()
        assert f"dataless/1: supervised (trace {TRACE_ID})" in log


@pytest.mark.slow
def test_script_that_ignores_term_ends_within_15_s(redis_service: RedisServer, tmp_path: Path) -> None:
    with run_host(redis_service, tmp_path, "tests.workers.term_ignoring_script") as machine, machine.run_worker():
        attempt = machine.send_launch_order("stubborn")
        wait_until(lambda: len(list(attempt.work.glob("environment-*"))) == 2, "both ranks run")
        pids = machine.list_processes("stubborn")
        assert len(pids) >= 5, "torchrun, two ranks and their two hidden children"
        redis_service.client().set(cancel_key("stubborn", 1), "1")
        request = time.monotonic()
        report = machine.wait_for_exit("stubborn", 20)
        assert time.monotonic() - request < 15
        assert report["outcome"] == "cancelled"
        assert [pid for pid in pids if not is_gone(pid)] == []
        environment = (attempt.work / "environment-0").read_text()
        assert "MESHBOARD_REDIS_URL" not in environment
        assert "test-password" not in environment
        assert f"TRACEPARENT={build_traceparent(TRACE_ID, 'stubborn', 1)}" in environment.splitlines()


@pytest.mark.extended
def test_job_above_its_disk_limit_fails(redis_service: RedisServer, tmp_path: Path) -> None:
    module, limit = "tests.workers.term_ignoring_script", {"MESHBOARD_JOB_DISK_BYTES": "1"}
    with run_host(redis_service, tmp_path, module, **limit) as machine, machine.run_worker():
        machine.send_launch_order("greedy")
        report = machine.wait_for_exit("greedy", 60)
        assert report["outcome"] == "failed"
        assert "The limit is 1 bytes (`resources.disk_limit_bytes`" in report["reason"]
        assert "host_fault" not in report


GREEDY = {
    "processes": "The job reached its limit of 200 processes and threads on testhost (MESHBOARD_JOB_PROCESSES of",
    "files": "A process of the job reached its limit of 1,000 open files on testhost (MESHBOARD_JOB_OPEN_FILES of",
    "memory": "The job reached its limit of 1,073,741,824 bytes of memory on testhost (MESHBOARD_JOB_MEMORY_BYTES of",
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("groups", "greedy"), [("auto", ["processes"]), ("off", [*GREEDY])], ids=["control groups", "measured"]
)
def test_job_above_a_limit_fails_and_the_next_job_runs(
    redis_service: RedisServer, tmp_path: Path, groups: str, greedy: list[str]
) -> None:
    limits = {"MESHBOARD_JOB_PROCESSES": "200", "MESHBOARD_JOB_OPEN_FILES": "1000", "MESHBOARD_CONTROL_GROUPS": groups}
    if "memory" in greedy:
        limits["MESHBOARD_JOB_MEMORY_BYTES"] = str(2**30)
    with run_host(redis_service, tmp_path, "tests.workers.greedy_script", **limits) as machine, machine.run_worker():
        for resource in greedy:
            (machine.data_root / "resource").write_text(resource)
            machine.send_launch_order(resource)
            report = machine.wait_for_exit(resource, 60)
            assert report["outcome"] == "failed"
            assert report["reason"].startswith(GREEDY[resource]), report["reason"]
            assert "host_fault" not in report
            assert machine.list_processes(resource) == []
        (machine.data_root / "resource").write_text("none")
        machine.send_launch_order("modest")
        assert machine.wait_for_exit("modest")["outcome"] == "succeeded"
        assert "problem" not in machine.read_events("host")[-1]
        facts = next(event["facts"] for event in machine.read_events("host") if "facts" in event)
        assert "200 processes and threads (" in facts["limits"]


def frame(job: str, attempt: int, rank: int, item_rank: int, phase: str) -> bytes:
    item = {"kind": "phase", "rank": item_rank, "time": 1.0, "phase": phase}
    body: bytes = msgpack.packb({"v": VERSION, "job": job, "attempt": attempt, "rank": rank, "items": [item]})
    return struct.pack(">I", len(body)) + body


def test_rejects_frames_of_another_job_attempt_or_rank(redis_service: RedisServer, tmp_path: Path) -> None:
    foreign = {
        "another job": frame("others", 1, 0, 0, "eval"),
        "another attempt": frame("guarded", 2, 0, 0, "eval"),
        "no such rank": frame("guarded", 1, 2, 2, "eval"),
        "an item of another rank": frame("guarded", 1, 0, 1, "eval"),
        "no frame at all": struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
        "larger than any frame": struct.pack(">I", 2**31),
    }
    with run_host(redis_service, tmp_path, "tests.workers.term_ignoring_script") as machine, machine.run_worker():
        attempt = machine.send_launch_order("guarded")
        wait_until(lambda: (attempt.work / "environment-0").exists(), "rank 0 runs")
        words = arguments(rank_pid(machine, "guarded", 0))
        address = next(word for word in words if word.startswith("--telemetry=")).partition("=")[2]
        answers = {}
        for what, sent in foreign.items():
            with socket.socket(socket.AF_UNIX) as rank:
                rank.settimeout(10)
                rank.connect(address)
                rank.sendall(sent)
                answers[what] = rank.recv(1)
        assert answers == dict.fromkeys(foreign, b""), "each is cut off"
        with socket.socket(socket.AF_UNIX) as rank:
            rank.connect(address)
            rank.sendall(frame("guarded", 1, 0, 0, "teardown"))
            wait_until(lambda: machine.read_items("guarded", "phase"), "a valid frame arrives")
        assert [item["phase"] for item in machine.read_items("guarded", "phase")] == ["teardown"]


class Bomb:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = str(target)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._target,)


@pytest.mark.slow
def test_rejects_a_pickled_message_and_continues(machine: Host) -> None:
    crater = machine.folder / "crater"
    sender = Celery(broker=machine.server.url)
    with machine.run_worker():
        sender.send_task(TASK_LAUNCH, args=[Bomb(crater)], queue=host_queue(HOST_NAME), serializer="pickle")
        machine.send_launch_order(
            "afterwards", spec={"model": {"preset": "gpt-tiny"}, "train": {"steps": 1, "warmup_steps": 0}}
        )
        assert machine.wait_for_exit("afterwards")["outcome"] == "succeeded"
        assert not crater.exists()
        assert "ContentDisallowed" in (machine.folder / "worker.log").read_text()
