"""Planner processes: long plans run there for a limited time, so that pages stay responsive."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError
from planner.hardware.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MAX_PROCESSES = max(2, (os.cpu_count() or 1) // 2)
MAX_QUEUE_S = 5.0  # until a process is free
MAX_CPU_S = 30.0  # CPU time per task. A search has a limit of layouts, so it ends earlier on most machines
MIN_POLL_S = 0.05
MAX_ELAPSED_S = 60.0  # per task, for a busy machine


class BusyError(Exception):
    """Too many plans are being computed, or a plan takes too long."""


class PlannerProcessError(RuntimeError):
    """A planner process failed. Contains its traceback."""


class Planner:
    """Planner process that runs one task at a time."""

    def __init__(self) -> None:
        # The process needs no secrets and no database.
        environment = {name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV", "LANG") if name in os.environ}
        argv = [sys.executable, "-m", "jobs.planning.planner_tasks"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises:
            TimeoutError: The task exceeds a limit. The message names the limit.
            EOFError: The process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        parts: list[bytes] = []
        max_cpu_s, deadline = self._used_s + MAX_CPU_S, time.monotonic() + MAX_ELAPSED_S
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                left_cpu_s, left_s = max_cpu_s - self._used_s, deadline - time.monotonic()
                if left_cpu_s <= 0:
                    raise TimeoutError(f"the planner used more than {MAX_CPU_S:.0f} s of CPU time")
                if left_s <= 0:
                    raise TimeoutError(f"the planner took more than {MAX_ELAPSED_S:.0f} s")
                if not ready.select(max(MIN_POLL_S, min(left_cpu_s, left_s))):
                    continue
                part = os.read(self._process.stdout.fileno(), 2**20)
                if not part:
                    raise EOFError
                parts.append(part)
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer

    @property
    def _used_s(self) -> float:
        user, system, *_ = psutil.Process(self._process.pid).cpu_times()
        return float(user + system)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()


# Each slot has a running planner, or None, from which the next task starts one.
_slots: queue.LifoQueue[Planner | None] = queue.LifoQueue()
for _ in range(MAX_PROCESSES):
    _slots.put(None)


def run_task(task: str, spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> Any:
    """Run a task of `jobs.planning.planner_tasks` in a planner process.

    Raises:
        SpecError: The planner rejected the spec.
        BusyError: No process was free within MAX_QUEUE_S, or the task exceeded MAX_CPU_S or MAX_ELAPSED_S.
    """
    question = {"task": task, "spec": spec.model_dump_json(), "cluster": cluster.model_dump_json(), "options": options}
    try:
        planner = _slots.get(timeout=MAX_QUEUE_S)
    except queue.Empty:
        raise BusyError(f"All {MAX_PROCESSES} planner processes are busy. Try again in a few seconds.") from None
    reusable: Planner | None = None
    try:
        if planner is None or planner.has_ended:
            planner = Planner()
        answer = planner.run(question)
        reusable = planner
    except TimeoutError as error:
        words = "Use a smaller layout or fewer micro-batches."
        raise BusyError(f"The plan was not computed because {error}. {words}") from None
    finally:
        if reusable is None and planner is not None:
            planner.end()
        _slots.put(reusable)
    if "failed" in answer:
        raise PlannerProcessError(answer["failed"])
    if "problems" in answer:
        raise SpecError([Problem(*problem) for problem in answer["problems"]])
    return answer["answer"]
