"""Find out whether the kernel's out-of-memory killer ended processes during an attempt."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from contracts.control import KillEvidence
from planner.facts.validation import format_count

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")
KERNEL_LOG: Final = Path("/dev/kmsg")
MAX_KERNEL_RECORDS: Final = 20_000
MAX_RECORD_BYTES: Final = 8192
UNLIMITED_BYTES: Final = 2**60  # cgroup v1 shows no limit as almost 2**63
_KILL = re.compile(
    r"[Oo]ut of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)(?:.*?anon-rss:(?P<resident_kb>\d+)kB)?"
)


class KernelKill(NamedTuple):
    """A process that the out-of-memory killer ended, as the kernel logs it. `resident_bytes` is 0 if it is unknown."""

    pid: int
    name: str
    resident_bytes: int


class MemoryKillWatch:
    """Count the out-of-memory kills of the kernel from now on."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUP_ROOT, kernel_log: Path = KERNEL_LOG) -> None:
        self._proc, self._cgroups, self._kernel_log = proc, cgroups, kernel_log
        self._began_us = time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6
        self._own_before, self._host_before = self._count_own(), self._count_host()

    def describe(self, pid: int | None) -> KillEvidence:
        """Return what the kernel counted since the start of this watch.

        Args:
            pid: The process that SIGKILL ended, None if unknown.
        """
        if kill := next((kill for kill in self._read_kernel_log() if kill.pid == pid), None):
            used = f", which used {_format_gib(kill.resident_bytes)} of memory" if kill.resident_bytes else ""
            text = f"The kernel's out-of-memory killer ended process {kill.pid} ({kill.name}){used}."
            return KillEvidence(oom_kills=1, text=text)
        own, host = self._count_own(), self._count_host()
        if own is not None and self._own_before is not None:
            number = max(0, own - self._own_before)
            return KillEvidence(oom_kills=number, text=self._describe_cgroup(number))
        if host is not None and self._host_before is not None:
            number = max(0, host - self._host_before)
            counted = format_count(number, "out-of-memory kill") if number else "no out-of-memory kill"
            return KillEvidence(oom_kills=number, text=f"The kernel counted {counted} on the host during this attempt.")
        text = "The host cannot read how many processes the kernel's out-of-memory killer ended."
        return KillEvidence(oom_kills=None, text=text)

    def _describe_cgroup(self, number: int) -> str:
        counted = format_count(number, "out-of-memory kill") if number else "no out-of-memory kill"
        limit = self._read_number("memory.max", "memory.limit_in_bytes")
        peak = self._read_number("memory.peak", "memory.max_usage_in_bytes")
        bounds = "" if limit is None or limit >= UNLIMITED_BYTES else f", whose memory limit is {_format_gib(limit)}"
        used = "" if peak is None or not bounds else f" and whose peak is {_format_gib(peak)}"
        return f"The kernel counted {counted} in the cgroup of the job{bounds}{used}."

    def _count_own(self) -> int | None:
        """Return the out-of-memory kills in the cgroup of this process, None if they are unreadable."""
        for folder in self._list_own_folders():
            for name in ("memory.events", "memory.oom_control"):
                if (number := _read_field(folder / name, "oom_kill")) is not None:
                    return number
        return None

    def _count_host(self) -> int | None:
        return _read_field(self._proc / "vmstat", "oom_kill")

    def _list_own_folders(self) -> Iterator[Path]:
        try:
            lines = (self._proc / "self" / "cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                yield self._cgroups / path.lstrip("/")
            elif "memory" in controllers.split(","):
                yield self._cgroups / "memory" / path.lstrip("/")
                yield self._cgroups / "memory"  # a container sees its own cgroup as the root

    def _read_number(self, *names: str) -> int | None:
        for folder in self._list_own_folders():
            for name in names:
                try:
                    return int((folder / name).read_text())
                except (OSError, ValueError):  # "max"
                    continue
        return None

    def _read_kernel_log(self) -> Iterator[KernelKill]:
        """Yield the kills in the kernel log since the start of this watch. None if the log is unreadable."""
        try:
            descriptor = os.open(self._kernel_log, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return
        try:
            for _ in range(MAX_KERNEL_RECORDS):
                try:
                    record = os.read(descriptor, MAX_RECORD_BYTES)
                except BrokenPipeError:  # the kernel has overwritten the record
                    continue
                head, _, message = record.decode(errors="replace").partition(";")
                found, time_us = _KILL.search(message), head.split(",")[2:3]
                if found and time_us and time_us[0].isdecimal() and int(time_us[0]) >= self._began_us:
                    yield KernelKill(int(found["pid"]), found["name"], int(found["resident_kb"] or 0) * 1024)
                if not record:
                    return
        except OSError:  # no further record
            return
        finally:
            os.close(descriptor)


def _read_field(path: Path, name: str) -> int | None:
    try:
        fields = dict(line.split(None, 1) for line in path.read_text().splitlines() if " " in line)
        return int(fields[name])
    except (OSError, ValueError, KeyError):
        return None


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
