"""Run a host worker on a private Redis, and send it the launch orders of a controller."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from celery import Celery

from contracts.control import VERSION, AttemptReport, ExitReport, LaunchOrder
from contracts.names import TASK_LAUNCH, events_stream, host_queue, telemetry_stream
from contracts.telemetry.batches import Item
from planner.facts.parse_spec import parse_spec
from tests.support.job_waits import check_not_exited, record_ending
from tests.support.processes import ROOT, RedisServer, base_environment, run_process, wait_until
from workers.host.attempt_watcher import kill_supervisor
from workers.host.attempts import AttemptDir, get_attempt_dir
from workers.host.join import build_worker_command
from workers.host.processes import find_processes, kill_processes

HOST_NAME = "testhost"

SPEC: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 2000, "global_batch": 4, "seq_len": 32, "eval_every": 0, "verify": "off"},
}


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def build_launch_order(
    job: str = "job", attempt: int = 1, slots: list[int] | None = None, expires_in_s: float = 60
) -> LaunchOrder:
    return LaunchOrder(
        v=VERSION,
        job=job,
        attempt=attempt,
        spec={"name": job},
        slots=slots if slots is not None else [0],
        expires=time.time() + expires_in_s,
        trace=TRACE_ID,
    )


class Host:
    """A host with its folders and settings, its orders, and the messages that it sent."""

    def __init__(self, server: RedisServer, folder: Path, trainer_module: str, settings: dict[str, str]) -> None:
        self.server, self.folder = server, folder
        self.run_dir, self.data_root = folder / "runs", folder / "data"
        self.data_root.mkdir(parents=True)
        self.environment = {
            **base_environment(),
            "MESHBOARD_REDIS_URL": server.url,
            "MESHBOARD_HOST_KEY": "00" * 32,
            "MESHBOARD_HOST_NAME": HOST_NAME,
            "MESHBOARD_SLOTS": "4",
            "MESHBOARD_RUN_DIR": str(self.run_dir),
            "MESHBOARD_SCRIPT_ROOT": str(folder / "scripts"),
            "MESHBOARD_CHECKPOINT_ROOT": str(folder / "checkpoints"),
            "MESHBOARD_DATA_ROOT": str(self.data_root),
            "MESHBOARD_TRAINER_MODULE": trainer_module,
            **settings,
        }
        self.python = sys.executable  # tests of job users set an executable that other users can run
        self._sender = Celery(broker=server.url)
        self._ordered: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def run_worker(self, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the Celery worker, and wait for its first heartbeat. `prefix` is a command that starts the worker."""
        argv = build_worker_command(HOST_NAME)
        argv[0] = self.python
        before = len(self.read_events("host"))
        with run_process([*prefix, *argv], self.environment, self.folder / "worker.log", ROOT) as process:
            wait_until(lambda: len(self.read_events("host")) > before, "the host announces itself")
            yield process

    def send_launch_order(
        self,
        job: str,
        attempt: int = 1,
        spec: dict[str, Any] | None = None,
        times: int = 1,
        first_slot: int = 0,
        expires_in_s: float = 60,
        owner: int = 1,
    ) -> AttemptDir:
        parsed = parse_spec(spec or SPEC)
        slots = list(range(first_slot, first_slot + parsed.layout.world_size))
        order = build_launch_order(job, attempt, slots, expires_in_s)
        order |= {"spec": parsed.model_dump(), "owner": owner}
        for _ in range(times):
            self.send_order(order)
        self._ordered.append((job, attempt))
        return get_attempt_dir(self.run_dir, job, attempt)

    def send_order(self, order: object) -> None:
        self._sender.send_task(TASK_LAUNCH, args=[order], queue=host_queue(HOST_NAME))

    def read_events(self, kind: str) -> list[dict[str, Any]]:
        entries: Any = self.server.client().xrange(events_stream(HOST_NAME))
        unpacked = [msgpack.unpackb(fields[b"b"]) for _, fields in entries]
        return [event for event in unpacked if event["kind"] == kind]

    def read_reports(self, job: str) -> list[AttemptReport]:
        """Return the attempt reports of a job that the controller would read."""
        reports = [event["report"] for event in self.read_events("attempt")]
        reports += [report for event in self.read_events("host") for report in event["attempts"]]
        return [report for report in reports if report["job"] == job]

    def read_items(self, job: str, kind: str, attempt: int = 1) -> list[Any]:
        entries: Any = self.server.client().xrange(telemetry_stream(job, attempt))
        batches = [msgpack.unpackb(fields[b"b"]) for _, fields in entries]
        items: list[Item] = [item for batch in batches for item in batch["items"]]
        return [item for item in items if item["kind"] == kind]

    def wait_for_steps(self, job: str, steps: int = 1, attempt: int = 1) -> None:
        """Wait for a step, and fail at once if the attempt exits before it."""
        expected = f"{job} makes {steps} steps"

        def has_steps() -> bool:
            exit_report = self._find_exit_report(job, attempt)  # before the items, which precede it
            if any(item["step"] >= steps for item in self.read_items(job, "step", attempt)):
                return True
            check_not_exited(exit_report, expected)
            return False

        wait_until(has_steps, expected)

    def wait_for_exit(self, job: str, timeout_s: float = 60.0) -> ExitReport:
        report = wait_until(lambda: self._find_exit_report(job), f"{job} has ended", timeout_s)
        assert report is not None
        record_ending(report["outcome"], report["reason"], len(self.list_processes(job, report["attempt"])))
        return report

    def _find_exit_report(self, job: str, attempt: int | None = None) -> ExitReport | None:
        exited = (report for report in self.read_reports(job) if report["state"] == "exited" and "exit" in report)
        return next((report["exit"] for report in exited if attempt in (None, report["attempt"])), None)

    def list_processes(self, job: str, attempt: int = 1) -> list[int]:
        return find_processes(job, attempt)

    def kill_jobs(self) -> None:
        for job, attempt in self._ordered:
            kill_supervisor(get_attempt_dir(self.run_dir, job, attempt))
            kill_processes(job, attempt)


@contextlib.contextmanager
def run_host(
    server: RedisServer, folder: Path, trainer_module: str = "workers.trainer", **settings: str
) -> Iterator[Host]:
    """Provide a host, and kill its jobs on exit. `settings` are environment variables of the worker."""
    host = Host(server, folder, trainer_module, settings)
    try:
        yield host
    finally:
        host.kill_jobs()
