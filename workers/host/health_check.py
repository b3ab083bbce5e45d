"""Find why this host cannot start jobs, before each launch and with each heartbeat."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from contracts.control import LaunchOrder
from workers.disk import DISK_FULL_ERRNOS
from workers.host.attempts import HOST_TREE, get_socket_root
from workers.host.hardware import Gpus
from workers.host.job_disk import find_reservation_problem
from workers.host.settings import HostSettings

WRITTEN_BYTES = 4096
SLOW_CHECK_INTERVAL_S = 60.0
INTERPRETER_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S, IDLE_INTERVAL_S = 5.0, 0.5


class HealthCheck:
    """Check disks, interpreter, and GPUs of this host. Slow checks run once per minute. Thread-safe."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._slow_problem, self._slow_due = "", 0.0  # monotonic

    def find_problem(self) -> str:
        """Return why this host cannot start jobs, or an empty text."""
        problem = _find_write_problem("run directory", self._settings.run_dir / HOST_TREE)
        return problem or self.find_launch_problem()

    def find_launch_problem(self) -> str:
        """Return why a launch would fail, without writing to the run directory, which the launch itself does."""
        run_dir, min_bytes = self._settings.run_dir, self._settings.min_free_bytes
        try:
            free_bytes = shutil.disk_usage(next(path for path in (run_dir, *run_dir.parents) if path.exists())).free
        except OSError as error:
            return f"The disk of the run directory {run_dir} cannot be read ({error.strerror})."
        if free_bytes < min_bytes:
            needs = f"Jobs need at least {min_bytes:,} (MESHBOARD_MIN_FREE_BYTES)."
            return f"The disk of the run directory {run_dir} has {free_bytes:,} free bytes. {needs}"
        return _find_write_problem("temporary folder", get_socket_root()) or self._find_slow_problem()

    def find_order_problem(self, order: LaunchOrder) -> str:
        """Return why this job cannot start now on its slots, or an empty text."""
        problem = find_reservation_problem(order, self._settings)
        return problem or (
            _find_slot_problem(order["slots"], self._settings.shared_gpu_bytes)
            if self._settings.device == "cuda"
            else ""
        )

    def _find_slow_problem(self) -> str:
        with self._lock:
            if time.monotonic() >= self._slow_due:
                self._slow_problem = _find_interpreter_problem() or _find_gpu_problem(self._settings)
                self._slow_due = time.monotonic() + SLOW_CHECK_INTERVAL_S
            return self._slow_problem


def _find_write_problem(name: str, folder: Path) -> str:
    """Return why files cannot be written to a folder, or an empty text. Write a small file to be certain."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
    except OSError as error:
        what = "has no free space" if error.errno in DISK_FULL_ERRNOS else f"is not writable ({error.strerror})"
        return f"The {name} {folder} {what}."
    return ""


def _find_interpreter_problem() -> str:
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", ""],
            check=True,
            capture_output=True,
            timeout=INTERPRETER_TIMEOUT_S,
            cwd=os.sep,
        )
    except subprocess.TimeoutExpired:
        return ""  # a busy host is slow, not broken
    except (OSError, subprocess.SubprocessError) as error:
        return f"The Python interpreter {sys.executable} does not start: {error}"[:1000]
    return ""


def _find_slot_problem(slots: Sequence[int], shared_bytes: int) -> str:
    """Return why a GPU of the slots is not idle. The driver frees the memory of an ended process with a delay."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while problem := next(filter(None, (Gpus().find_slot_problem(slot, shared_bytes) for slot in slots)), ""):
        if time.monotonic() > deadline:
            return problem
        time.sleep(IDLE_INTERVAL_S)
    return ""


def _find_gpu_problem(settings: HostSettings) -> str:
    if settings.device != "cuda":
        return ""
    visible = len(Gpus())
    return "" if visible >= settings.slots else f"The driver shows {visible} GPUs, but the host has {settings.slots}."
