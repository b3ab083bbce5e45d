"""Plans in processes of their own: a heavy one takes its process' time, not the pages', and no longer than allowed."""

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
PLANNERS = max(2, (os.cpu_count() or 1) // 2)
PATIENCE_S = 5.0  # for a planner to be free
LONGEST_S = 15.0  # of a processor, for an answer; a search ends by itself sooner
SHORTEST_LOOK_S = 0.05
HELD_S = 60.0  # by the clock: where others have the processors, those seconds take longer


class BusyError(Exception):
    """Too much is planned at once, or this takes too long."""


class WorkError(RuntimeError):
    """A planner process failed; holds its traceback."""


class Planner:
    """One process that answers one question at a time."""

    def __init__(self) -> None:
        # It needs nothing of ours: no secret, no database.
        environment = {name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV", "LANG") if name in os.environ}
        argv = [sys.executable, "-m", "jobs.planning.work"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises TimeoutError, in words, or EOFError when the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        parts: list[bytes] = []
        most_s, deadline = self._used_s + LONGEST_S, time.monotonic() + HELD_S
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                of_processor, of_clock = most_s - self._used_s, deadline - time.monotonic()
                if of_processor <= 0:
                    raise TimeoutError(f"the planner used more than {LONGEST_S:.0f} s of CPU time")
                if of_clock <= 0:
                    raise TimeoutError(f"the planner took more than {HELD_S:.0f} s")
                if not ready.select(max(SHORTEST_LOOK_S, min(of_processor, of_clock))):
                    continue
                part = os.read(self._process.stdout.fileno(), 2**20)
                if not part:
                    raise EOFError
                parts.append(part)
        told: dict[str, Any] = json.loads(b"".join(parts))
        return told

    @property
    def _used_s(self) -> float:
        user, system, *_ = psutil.Process(self._process.pid).cpu_times()
        return float(user + system)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()


# A place is either a running planner or None, from which one is started when it is needed.
_places: queue.LifoQueue[Planner | None] = queue.LifoQueue()
for _ in range(PLANNERS):
    _places.put(None)


def ask(work: str, spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> Any:
    """What `jobs.planning.work` has to say.

    Raises:
        SpecError: what it refused.
        BusyError: no planner was free within PATIENCE_S, or it took longer than LONGEST_S or HELD_S.
    """
    question = {"work": work, "spec": spec.model_dump_json(), "cluster": cluster.model_dump_json(), "asked": asked}
    try:
        planner = _places.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise BusyError(f"All {PLANNERS} planner processes are busy. Try again in a few seconds.") from None
    kept: Planner | None = None
    try:
        if planner is None or planner.ended:
            planner = Planner()
        told = planner.ask(question)
        kept = planner
    except TimeoutError as error:
        raise BusyError(
            f"The plan was not computed because {error}. Use a smaller layout or fewer micro-batches."
        ) from None
    finally:
        if kept is None and planner is not None:
            planner.end()
        _places.put(kept)
    if "failed" in told:
        raise WorkError(told["failed"])
    if "problems" in told:
        raise SpecError([Problem(*problem) for problem in told["problems"]])
    return told["answer"]
