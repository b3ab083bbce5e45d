"""Limit the disk use of a job on this host, and reserve the unused part of its limit."""

from __future__ import annotations

import shutil
import subprocess
import time

from contracts.control import LaunchOrder
from workers.disk import BadFileError, read_json, write_json
from workers.host.attempts import AttemptDir, iterate_unacknowledged
from workers.host.settings import HostSettings

MEASUREMENT_TIMEOUT_S = 120.0
MAX_MEASURED_SHARE = 0.1  # of the time; a job with many files must not slow down its host
USE_FILE = "disk-use.json"


def get_disk_limit(order: LaunchOrder, settings: HostSettings) -> int:
    """Return the limit of a job in bytes: the smaller one of host and spec, 0 without a limit."""
    limits = (settings.job_disk_bytes, order["spec"].get("resources", {}).get("disk_limit_bytes"))
    return min((limit for limit in limits if limit), default=0)


class DiskWatch:
    """Measure the disk use of a job repeatedly, and find when it is above the limit."""

    def __init__(self, attempt: AttemptDir, order: LaunchOrder, settings: HostSettings) -> None:
        self._attempt, self._settings = attempt, settings
        self.limit_bytes = get_disk_limit(order, settings)
        self._due = 0.0  # monotonic

    def find_excess(self) -> str:
        """Return why the job ends, or an empty text. Skip the measurement if the last one took long."""
        began = time.monotonic()
        if began < self._due:
            return ""
        used_bytes = self._measure()
        self._due = time.monotonic() + (time.monotonic() - began) / MAX_MEASURED_SHARE
        write_json(self._attempt.host_dir / USE_FILE, used_bytes)
        if used_bytes <= self.limit_bytes:
            return ""
        use = f"The job used {used_bytes:,} bytes of disk on {self._settings.name}"
        how = "`resources.disk_limit_bytes`, or MESHBOARD_JOB_DISK_BYTES of the host"
        return f"{use}. The limit is {self.limit_bytes:,} bytes ({how})."

    def _measure(self) -> int:
        """Return the bytes of the job's files. `du` also measures trees that are deeper than a path can name."""
        folders = [self._attempt.job_dir, self._settings.checkpoint_root / self._attempt.job]
        command = ["du", "-s", "-x", "-B1", "--", *(str(folder) for folder in folders if folder.exists())]
        # Files can disappear during the measurement, which fails only for these files.
        result = subprocess.run(command, capture_output=True, text=True, timeout=MEASUREMENT_TIMEOUT_S, check=False)
        sizes = [line.partition("\t")[0] for line in result.stdout.splitlines()]
        return sum(int(size) for size in sizes if size.isdigit())


def find_reservation_problem(order: LaunchOrder, settings: HostSettings) -> str:
    """Return why the disk has no space for the job, in addition to the unused space of running jobs."""
    limit_bytes = get_disk_limit(order, settings)
    if not limit_bytes:
        return ""
    reserved_bytes = sum(
        _get_unused_bytes(attempt, settings)
        for attempt in iterate_unacknowledged(settings.run_dir)
        if attempt.get_supervisor() is not None
    )
    existing = next(path for path in (settings.run_dir, *settings.run_dir.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free - settings.min_free_bytes
    if free_bytes - reserved_bytes >= limit_bytes:
        return ""
    needs = f"The job reserves {limit_bytes:,} (`resources.disk_limit_bytes` or MESHBOARD_JOB_DISK_BYTES)."
    return (
        f"The disk of the run directory has {max(0, free_bytes):,} bytes for jobs, "
        f"of which running jobs reserve {reserved_bytes:,}. {needs}"
    )


def _get_unused_bytes(attempt: AttemptDir, settings: HostSettings) -> int:
    """Return the bytes below its limit that a running attempt can still write."""
    try:
        limit_bytes = get_disk_limit(attempt.read_order(), settings)
        used_bytes = read_json(attempt.host_dir / USE_FILE) or 0
    except (BadFileError, OSError):
        return 0
    return max(0, limit_bytes - used_bytes)
