"""The supervisor: saves on request, full disks, the last messages, and the telemetry of a whole run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgpack
import pytest

from contracts.codec import decode_batch
from contracts.names import cancel_key, events_stream, save_key, telemetry_stream
from contracts.telemetry.items import LogItem, PhaseItem
from tests.support.host import Host, build_launch_order, run_host
from tests.support.processes import RedisServer, scale_timeout, wait_until
from tests.workers.host.supervisor.test_script_upload import serve
from workers.disk import write_json
from workers.host.attempts import AttemptDir, get_socket_root
from workers.host.settings import HostSettings
from workers.host.supervisor import publisher
from workers.host.supervisor import supervisor as supervising
from workers.host.supervisor.redis_transport import RedisTransport
from workers.host.supervisor.supervisor import Supervisor
from workers.host.supervisor.telemetry_buffer import MAX_LATE_LOG_BYTES
from workers.host.supervisor.telemetry_session import cancel_tasks

TRAIN = {"steps": 100_000, "warmup_steps": 2, "global_batch": 4, "seq_len": 32, "eval_every": 0, "verify": "off"}
LINES = 4000
JOB = "telling"


def spec(**train: Any) -> dict[str, Any]:
    return {
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2},
        "train": {**TRAIN, "checkpoint_every": 50_000, **train},
    }


@pytest.mark.slow
def test_saves_on_request_and_the_next_attempt_resumes(redis_service: RedisServer, tmp_path: Path) -> None:
    with run_host(redis_service, tmp_path) as machine, machine.run_worker():
        machine.send_launch_order("gives-way", spec=spec())
        machine.wait_for_steps("gives-way", 3)
        redis_service.client().set(save_key("gives-way", 1), "1")
        report = machine.wait_for_exit("gives-way")
        assert report["outcome"] == "cancelled"
        assert report["summary"] is not None
        stopped = report["summary"]["steps"]
        assert 3 <= stopped < 50_000
        name = f"gives-way/1/step-{stopped:08d}"
        assert report["reason"] == (
            f"stopped after step {stopped} to make room for a job with higher priority; newest checkpoint {name}"
        )
        assert [one["name"] for one in report["summary"]["checkpoints"]] == [name]
        last = dict.fromkeys(range(4), 0)
        for item in machine.read_items("gives-way", "step"):
            last[item["rank"]] = item["step"]
        assert set(last.values()) == {stopped}, "all ranks ended with the same step"
        machine.send_launch_order("gives-way", attempt=2, spec=spec(steps=stopped + 2))
        machine.wait_for_steps("gives-way", stopped + 2, attempt=2)
        assert min(item["step"] for item in machine.read_items("gives-way", "step", 2)) == stopped + 1


def test_cancels_a_task_that_misses_the_first_cancellation() -> None:
    """Check a task that loses a cancellation, as a Redis call does that times out in the same moment."""
    missed = []

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        missed.append(True)
        await asyncio.Event().wait()

    async def main() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(3600))]
        await asyncio.sleep(0)
        await cancel_tasks(tasks)
        return tasks

    assert all(task.cancelled() for task in asyncio.run(asyncio.wait_for(main(), scale_timeout(20))))
    assert missed == [True]


def supervised(server: RedisServer, attempt: AttemptDir, **more: Any) -> Supervisor:
    root = attempt.run_dir
    settings = HostSettings(server.url, "testhost", 4, "cpu", root, root, root, root, "workers.trainer", **more)
    return Supervisor(attempt, settings, root / "socket", RedisTransport(attempt, settings))


def reports(server: RedisServer) -> list[Any]:
    entries: Any = server.client().xrange(events_stream("testhost"))
    return [msgpack.unpackb(fields[b"b"])["report"] for _, fields in entries]


def test_reports_training_although_the_attempt_folder_is_gone(redis_service: RedisServer, attempt: AttemptDir) -> None:
    """Check that frames are accepted without the attempt's folder."""

    async def main() -> None:
        supervisor = supervised(redis_service, attempt)
        shutil.rmtree(attempt.host_dir)
        for _ in range(2):
            await supervisor._receive([PhaseItem(kind="phase", rank=0, time=0.0, phase="step")])
        await supervisor.transport.close()

    asyncio.run(main())
    assert [report["state"] for report in reports(redis_service)] == ["running"]


def test_reports_why_the_socket_cannot_be_created(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> str:
        monkeypatch.setattr(asyncio, "start_unix_server", full)
        return await supervised(redis_service, attempt).run()

    assert asyncio.run(main()) == "failed"
    exit = reports(redis_service)[-1]["exit"]
    assert "No disk space on testhost: No space left on device" in exit["reason"]
    assert exit["host_fault"] == "launch"
    assert not (attempt.run_dir / "socket").exists()


def test_cancel_stops_the_download_of_an_upload_at_once(redis_service: RedisServer, attempt: AttemptDir) -> None:
    asked, ended = threading.Event(), threading.Event()

    def stall(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        asked.set()
        ended.wait(scale_timeout(60))

    order = build_launch_order()
    order["spec"] = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "a.py", "upload": "a" * 64}}
    order["upload"] = {"sha256": "a" * 64, "size": 1000, "secret": "a" * 64}
    write_json(attempt.order_file, order)

    async def main(url: str) -> tuple[str, float]:
        supervisor = supervised(redis_service, attempt, board_url=url)
        running = asyncio.create_task(supervisor.run())
        await asyncio.to_thread(asked.wait, scale_timeout(60))
        redis_service.client().set(cancel_key("job", 1), "1")
        began = time.monotonic()
        return await running, time.monotonic() - began

    with serve(stall) as url:
        outcome, seconds = asyncio.run(main(url))
        ended.set()
    assert outcome == "cancelled"
    assert seconds < scale_timeout(5), "the read of a stalled download lasts 10 s"
    assert not attempt.upload.exists()
    assert reports(redis_service)[-1]["exit"]["reason"] == "cancelled on request"


def test_socket_root_is_tmp_when_tmpdir_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for folder, root in ((deep, Path("/tmp")), (Path("/var/tmp"), Path("/var/tmp"))):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert get_socket_root() == root


def farewell(server: RedisServer, attempt: AttemptDir) -> list[Any]:
    """Return the log items on the board of a job that printed LINES lines at its end."""
    root = attempt.run_dir
    settings = HostSettings(server.url, "testhost", 4, "cpu", root, root, root, root, "workers.trainer")

    async def main() -> None:
        line = RedisTransport(attempt, settings)
        supervisor = supervising.Supervisor(attempt, settings, root / "socket", line)
        supervisor.buffer.add(LogItem(kind="log", rank=0, time=0.0, first=0, lines=["x" * 200] * LINES))
        await supervisor._send_rest()

    asyncio.run(main())
    entries: Any = server.client().xrange(telemetry_stream("job", 1))
    found = [item for _, fields in entries for item in decode_batch(fields[b"b"])["items"]]
    return [item for item in found if item["kind"] == "log"]


def test_waits_for_the_last_lines_of_a_job(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the last lines, which contain the traceback."""
    monkeypatch.setattr(supervising, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(publisher, "LOG_BURST", 300_000)
    monkeypatch.setattr(publisher, "LOG_BYTES_PER_S", 2**20)
    found = farewell(redis_service, attempt)
    assert found[-1]["first"] + len(found[-1]["lines"]) == LINES
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in found) == LINES
    late = sum(len(item["lines"]) for item in found) * 200 - 300_000
    assert late > MAX_LATE_LOG_BYTES // 2


def test_counts_lines_that_are_not_sent_in_time(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(supervising, "FAREWELL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(publisher, "LOG_BURST", 300_000)
    monkeypatch.setattr(publisher, "LOG_BYTES_PER_S", 1000)
    found = farewell(redis_service, attempt)
    assert found[-1]["lines"] == []
    assert found[-1]["first"] == LINES
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in found) == LINES


@pytest.fixture
def machine(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with run_host(redis_service, tmp_path) as made:
        yield made


def rank_pid(machine: Host, rank: int) -> int:
    for pid in machine.list_processes(JOB):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process of rank {rank}")


def test_run_sends_start_steps_and_the_stack_of_a_stopped_rank(machine: Host) -> None:
    def last(kind: str, rank: int) -> Any:
        return next((item for item in reversed(machine.read_items(JOB, kind)) if item["rank"] == rank), None)

    with machine.run_worker():
        machine.send_launch_order(JOB)
        machine.wait_for_steps(JOB, 5)
        wait_until(lambda: last("timeline", 1), "a timeline is sent")
        stopped = rank_pid(machine, 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            seen = wait_until(
                lambda: (
                    (process := last("process", 1))
                    and process["state"] == "stopped"
                    and process["stack"]
                    and last("standing", 0)
                ),
                "the stopped rank and the waiting rank are reported",
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: last("standing", 0)["still"] == 0, "the end of the stall is sent")
        machine.server.client().set(f"meshboard:cancel:{JOB}:1", 1)
        machine.wait_for_exit(JOB)
        stood = [
            item for item in machine.read_items(JOB, "process") if item["rank"] == 1 and item["state"] == "stopped"
        ]
        assert any(line.endswith("in Trainer.train") for item in stood for line in item["stack"]), (
            "read from outside, in its sandbox"
        )
        (waits,) = [one for one in seen["groups"] if one.get("blocking")]
        assert waits["issued"] == waits["ended"] + 1
        assert waits["group"]["ranks"] == [0, 1]
        assert any(line.endswith("in Trainer.train") for line in seen["stack"])

        stages = [
            (item["rank"], item["stage"]) for item in sorted(machine.read_items(JOB, "start"), key=lambda i: i["time"])
        ]
        assert stages[:2] == [(-1, "claimed"), (-1, "spawned")]
        for rank in (0, 1):
            assert [stage for result, stage in stages if result == rank] == ["imported", "met", "built", "first step"]
        whole: dict[int, set[int]] = {}
        for item in machine.read_items(JOB, "timeline"):
            whole.setdefault(item["step"], set()).add(item["rank"])
        half = sorted(step for step, ranks in whole.items() if ranks != {0, 1})
        assert half == sorted(whole)[len(whole) - len(half) :], "only of the last did the end cut one rank off"
        assert len(half) < len(whole) / 2
        assert set(last("timeline", 0)["spans"]["work"]) >= {"data", "forward", "backward", "optimizer"}
        steps = [item for item in machine.read_items(JOB, "step") if item["rank"] == 0]
        assert all(sum(item["parts"]["exposed"].values()) + item["parts"]["data"] <= item["step_s"] for item in steps)
        hidden = [item for item in steps if "dp" not in item["parts"]["exposed"]]  # over before it was waited for
        assert all(item["parts"]["hidden"]["dp"] > 0 for item in hidden)
        assert len(hidden) < len(steps) / 2
        assert last("gauge", -1)["cpu"] >= 0
        assert last("gauge", 0)["resident_bytes"] > 0
