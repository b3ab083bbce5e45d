"""A real host worker on a private Redis, driven by orders as the controller sends them."""

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
from tests.support.processes import ROOT, RedisServer, base_environment, running, wait_until
from tests.support.told import ended
from workers.host.attempt_watcher import kill_supervisor
from workers.host.attempts import AttemptDir, get_attempt_dir
from workers.host.join import build_worker_command
from workers.host.processes import find_processes, kill_processes

NAME = "testhost"

SPEC: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 2000, "global_batch": 4, "seq_len": 32, "eval_every": 0, "verify": "off"},
}


class Host:
    """What a test asks of a host, and reads from it."""

    def __init__(self, server: RedisServer, folder: Path, trainer_module: str, settings: dict[str, str]) -> None:
        self.server, self.folder = server, folder
        self.run_dir, self.data_root = folder / "runs", folder / "data"
        self.data_root.mkdir(parents=True)
        self.environment = {
            **base_environment(),
            "MESHBOARD_REDIS_URL": server.url,
            "MESHBOARD_HOST_KEY": "00" * 32,
            "MESHBOARD_HOST_NAME": NAME,
            "MESHBOARD_SLOTS": "4",
            "MESHBOARD_RUN_DIR": str(self.run_dir),
            "MESHBOARD_SCRIPT_ROOT": str(folder / "scripts"),
            "MESHBOARD_CHECKPOINT_ROOT": str(folder / "checkpoints"),
            "MESHBOARD_DATA_ROOT": str(self.data_root),
            "MESHBOARD_TRAINER_MODULE": trainer_module,
            **settings,
        }
        self.python = sys.executable  # a job's user must be able to reach it
        self._sender = Celery(broker=server.url)
        self._ordered: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """The Celery worker, up and announced."""
        argv = build_worker_command(NAME)
        argv[0] = self.python
        before = len(self.events("host"))
        with running(argv, self.environment, self.folder / "worker.log", ROOT) as process:
            wait_until(lambda: len(self.events("host")) > before, "the host announces itself")
            yield process

    def order(
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
        order = LaunchOrder(
            v=VERSION,
            job=job,
            attempt=attempt,
            spec=parsed.model_dump(),
            slots=list(range(first_slot, first_slot + parsed.layout.world_size)),
            expires=time.time() + expires_in_s,
            owner=owner,
        )
        for _ in range(times):
            self.send(order)
        self._ordered.append((job, attempt))
        return get_attempt_dir(self.run_dir, job, attempt)

    def send(self, order: object) -> None:
        self._sender.send_task(TASK_LAUNCH, args=[order], queue=host_queue(NAME))

    def events(self, kind: str) -> list[dict[str, Any]]:
        entries: Any = self.server.client().xrange(events_stream(NAME))
        unpacked = [msgpack.unpackb(fields[b"b"]) for _, fields in entries]
        return [event for event in unpacked if event["kind"] == kind]

    def reports(self, job: str) -> list[AttemptReport]:
        """What the controller would have read of a job, in order."""
        found = [event["report"] for event in self.events("attempt")]
        found += [report for event in self.events("host") for report in event["attempts"]]
        return [report for report in found if report["job"] == job]

    def items(self, job: str, kind: str, attempt: int = 1) -> list[Any]:
        entries: Any = self.server.client().xrange(telemetry_stream(job, attempt))
        batches = [msgpack.unpackb(fields[b"b"]) for _, fields in entries]
        items: list[Item] = [item for batch in batches for item in batch["items"]]
        return [item for item in items if item["kind"] == kind]

    def wait_for_steps(self, job: str, steps: int = 1, attempt: int = 1) -> None:
        wait_until(
            lambda: [item for item in self.items(job, "step", attempt) if item["step"] >= steps],
            f"{job} makes {steps} steps",
        )

    def exit_of(self, job: str, timeout_s: float = 60.0) -> ExitReport:
        def exited() -> ExitReport | None:
            return next((r["exit"] for r in self.reports(job) if r["state"] == "exited"), None)

        found = wait_until(exited, f"{job} has ended", timeout_s)
        assert found is not None
        ended(found["outcome"], found["reason"], len(self.processes(job, found["attempt"])))
        return found

    def processes(self, job: str, attempt: int = 1) -> list[int]:
        return find_processes(job, attempt)

    def reap(self) -> None:
        for job, attempt in self._ordered:
            kill_supervisor(get_attempt_dir(self.run_dir, job, attempt))
            kill_processes(job, attempt)


@contextlib.contextmanager
def host(server: RedisServer, folder: Path, trainer_module: str = "workers.trainer", **settings: str) -> Iterator[Host]:
    """`settings` are environment variables of the worker."""
    made = Host(server, folder, trainer_module, settings)
    try:
        yield made
    finally:
        made.reap()
