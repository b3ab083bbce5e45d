"""Limit the memory, CPUs, processes, and open files of a job on this host.

Control groups (version 2 or 1) enforce the limits if the host worker can create groups. Without control groups, the
supervisor measures memory and processes, the kernel counts the processes of a job owner's user, and CPUs are not
limited. `workers.host.job_disk` limits the disk. RLIMIT_AS is not used, because torch maps more memory than it uses.
RLIMIT_FSIZE is not used, because it also applies to shared memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import psutil

from workers.host.attempts import AttemptDir
from workers.host.settings import USER_PER_OWNER, HostSettingError, HostSettings

log = logging.getLogger(__name__)

GIB: Final = 2**30
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")
# In version 2, a group with processes cannot limit its child groups, so systemd starts the worker in a group below the
# group of its unit (DelegateSubgroup=). Only the root group can have both.
WORKER_GROUP: Final = "meshboard-worker"
GROUP_PREFIX: Final = "meshboard-job"
CHECK_INTERVAL_S: Final = 0.5
MAX_MEASURED_SHARE: Final = 0.05  # of the time; a machine with many processes must not slow down its jobs
REMOVAL_TIMEOUT_S: Final = 5.0
MIN_FOREIGN_AGE_S: Final = 3600.0  # a job of another host worker enters its group within seconds
CPU_PERIOD_US: Final = 100_000
SWAP_FILE: Final = "memory.swap.max"  # missing in a kernel without swap
OOM_SCORE: Final = 500  # of 1,000; the kernel ends a rank before it ends a process of the host or the board

Controller = Literal["memory", "cpu", "pids"]
Limited = Literal["memory", "processes", "files"]
# Variable of the host, the limit in words, and the remedy for the owner of the job.
LIMITS: Final[dict[Limited, tuple[str, str, str]]] = {
    "memory": (
        "MESHBOARD_JOB_MEMORY_BYTES",
        "The job reached its limit of {:,} bytes of memory",
        "Use less memory per rank",
    ),
    "processes": (
        "MESHBOARD_JOB_PROCESSES",
        "The job reached its limit of {:,} processes and threads",
        "Start fewer processes",
    ),
    "files": (
        "MESHBOARD_JOB_OPEN_FILES",
        "A process of the job reached its limit of {:,} open files",
        "Close files that are no longer used",
    ),
}


class GroupParent(NamedTuple):
    """A group of the host worker, in which groups of jobs are created for one controller."""

    version: Literal[1, 2]
    folder: Path


class UnavailableError(Exception):
    """Control groups that the host worker cannot create."""


class ControlGroups:
    """The control groups that limit one job, one folder per hierarchy of the kernel."""

    def __init__(self, name: str, settings: HostSettings, proc: Path = PROC, root: Path = CGROUP_ROOT) -> None:
        self._name, self._settings, self._proc, self._root = name, settings, proc, root
        self.folders: dict[Controller, Path] = {}
        self.version: Literal[1, 2] = 2

    def create(self) -> None:
        """Create the groups and set their limits. Raises UnavailableError, and then leaves no group."""
        if self._settings.control_groups == "off":
            raise UnavailableError("MESHBOARD_CONTROL_GROUPS is off")
        try:
            for controller, files in self._list_limits().items():
                parent = find_parent(controller, self._proc, self._root)
                if parent.version == 2:
                    _enable(parent.folder, controller)
                folder = parent.folder / self._name
                folder.mkdir(exist_ok=True)
                self.folders[controller], self.version = folder, parent.version
                for file, text in files[parent.version].items():
                    if file != SWAP_FILE or (folder / file).exists():
                        (folder / file).write_text(text)
        except OSError as error:
            self.remove()
            raise UnavailableError(f"{error.filename}: {error.strerror}") from None
        except UnavailableError:
            self.remove()
            raise

    def enter(self) -> None:
        """Move the calling process into the groups. Raises OSError."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text("0")

    def has_reached(self, limited: Limited) -> bool:
        """Return whether the kernel stopped an allocation or a fork at the limit."""
        if limited == "processes" and "pids" in self.folders:
            return _read_field(self.folders["pids"] / "pids.events", "max") > 0
        if limited == "memory" and "memory" in self.folders:
            folder = self.folders["memory"]
            # A kill without an allocation at the limit means that the machine is out of memory.
            if self.version == 2:
                return min(_read_field(folder / "memory.events", name) for name in ("oom", "oom_kill")) > 0
            failures = _read_text(folder / "memory.failcnt").strip()
            return _read_field(folder / "memory.oom_control", "oom_kill") > 0 and failures not in ("", "0")
        return False

    def kill(self) -> None:
        """Forbid new processes, because a fork could escape, and send KILL to all processes."""
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                (folder / "pids.max").write_text("0")
            for pid in _read_lines(folder / "cgroup.procs"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Remove the groups. The kernel removes killed processes from a group with a delay."""
        deadline = time.monotonic() + REMOVAL_TIMEOUT_S
        for folder in set(self.folders.values()):
            while not _remove_group(folder) and time.monotonic() < deadline:
                time.sleep(0.05)
        self.folders = {}

    def _list_limits(self) -> dict[Controller, dict[int, dict[str, str]]]:
        """Return the files of each controller with a limit, per version of control groups."""
        settings = self._settings
        limits: dict[Controller, dict[int, dict[str, str]]] = {}
        if settings.job_memory_bytes:
            memory = str(settings.job_memory_bytes)
            limits["memory"] = {2: {"memory.max": memory, SWAP_FILE: "0"}, 1: {"memory.limit_in_bytes": memory}}
        if settings.job_cpus:
            quota, period = str(settings.job_cpus * CPU_PERIOD_US), str(CPU_PERIOD_US)
            limits["cpu"] = {
                2: {"cpu.max": f"{quota} {period}"},
                1: {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota},
            }
        if settings.job_processes:
            pids = {"pids.max": str(settings.job_processes)}
            limits["pids"] = {2: pids, 1: pids}
        return limits


class JobLimits:
    """The limits of one attempt on this host, except its disk limit."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings, *, has_own_user: bool) -> None:
        self._settings, self._has_own_user = settings, has_own_user
        name = f"{_build_group_prefix(attempt.run_dir)}-{attempt.job}-{attempt.attempt}"
        self._groups = ControlGroups(name, settings)
        self._has_groups = False
        self._due = 0.0  # monotonic

    def prepare(self) -> None:
        """Create the control groups of the job. If they are optional, the supervisor can also measure.

        Raises:
            OSError: required control groups are not available.
        """
        try:
            self._groups.create()
            self._has_groups = True
        except UnavailableError as error:
            if self._settings.control_groups == "required":
                raise OSError(errno.EAGAIN, f"no control groups: {error}") from None
            log.info("no control groups: %s", error)

    def enter(self) -> None:
        """Limit the calling process, a child of the supervisor before it runs the job. Raises OSError."""
        if self._has_groups:
            self._groups.enter()
        elif self._settings.job_processes and self._has_own_user:
            # The kernel counts the processes of a user. Root, which runs the guardian, is exempt.
            resource.setrlimit(resource.RLIMIT_NPROC, (self._settings.job_processes,) * 2)
        if self._settings.job_open_files:
            limit = get_open_files_limit(self._settings)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.suppress(OSError, ValueError):
            score = PROC / "self" / "oom_score_adj"
            score.write_text(str(max(OOM_SCORE, int(score.read_text()))))

    def find_excess(self, pid: int | None) -> str:
        """Return the sentence about a limit that the job reached, or an empty text.

        Args:
            pid: The process above all processes of the job, None if it has ended.
        """
        reached: Iterable[Limited] = ()
        if self._has_groups:
            reached = filter(self._groups.has_reached, LIMITS)
        elif pid is not None and (began := time.monotonic()) >= self._due:
            reached = list(self._measure(pid))
            self._due = time.monotonic() + (time.monotonic() - began) / MAX_MEASURED_SHARE
        return next(map(self.describe, reached), "")

    def explain_error(self, error: str) -> str:
        """Return the sentence about the limit that an error of a rank shows, or an empty text."""
        if self._settings.job_open_files and os.strerror(errno.EMFILE) in error:
            return self.describe("files")
        is_fork_error = os.strerror(errno.EAGAIN) in error or "can't start new thread" in error
        is_limited = self._settings.job_processes and self._has_own_user and not self._has_groups
        return self.describe("processes") if is_limited and is_fork_error else ""

    def describe(self, limited: Limited) -> str:
        """Return a sentence with the limit, its value, and the remedy for the owner of the job."""
        variable, reached, fix = LIMITS[limited]
        values: dict[Limited, int] = {
            "memory": self._settings.job_memory_bytes,
            "processes": self._settings.job_processes,
            "files": get_open_files_limit(self._settings),
        }
        where = f"on {self._settings.name} ({variable} of the host)"
        return f"{reached.format(values[limited])} {where}. {fix}, or ask the admin of the host to raise the limit."

    def kill(self) -> None:
        """Send KILL to the processes in the control groups, at once and without a chance to fork."""
        if self._has_groups:
            self._groups.kill()

    def remove(self) -> None:
        """Remove the control groups when all processes have ended."""
        self._groups.remove()

    def _measure(self, pid: int) -> Iterator[Limited]:
        """Yield the limits that the processes below `pid` exceed."""
        settings = self._settings
        if not (settings.job_memory_bytes or settings.job_processes):
            return
        num_threads = used_bytes = 0
        processes = []
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(pid)
            processes = [top, *top.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                num_threads += process.num_threads()
                used_bytes += process.memory_info().rss
        if settings.job_processes and num_threads > settings.job_processes:
            yield "processes"
        # Shared pages count once per process in the resident size, and once in the proportional size, which costs more.
        limit_bytes = settings.job_memory_bytes
        if 0 < limit_bytes < used_bytes and sum(map(_read_proportional_bytes, processes)) > limit_bytes:
            yield "memory"


def get_open_files_limit(settings: HostSettings) -> int:
    """Return the limit of open files per process, which is at most the hard limit of this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return settings.job_open_files if hard == resource.RLIM_INFINITY else min(settings.job_open_files, hard)


def set_up_limits(settings: HostSettings, proc: Path = PROC, root: Path = CGROUP_ROOT) -> str:
    """Remove control groups of earlier jobs, and return the limits of jobs with the mechanism of each limit.

    The host worker calls this function once at its start.

    Raises:
        HostSettingError: required control groups are not available.
    """
    groups = ControlGroups(f"{_build_group_prefix(settings.run_dir)}-trial", settings, proc, root)
    why = ""
    try:
        groups.create()
        how = f"control groups, version {groups.version}"
        _remove_old_groups(groups.folders, settings.run_dir)
    except UnavailableError as error:
        how, why = f"measured every {CHECK_INTERVAL_S} s", str(error)
        if settings.control_groups == "required":
            raise HostSettingError(
                f"MESHBOARD_CONTROL_GROUPS is required, but control groups are not available: {why}. Give the host "
                "worker a writable group (docs/explanation/isolation.md), or set MESHBOARD_CONTROL_GROUPS=auto."
            ) from None
    groups.remove()
    has_own_user = settings.job_user == USER_PER_OWNER
    processes = f"{how}, and per job owner by the kernel" if why and has_own_user else how
    parts = [
        f"{settings.job_memory_bytes / GIB:.4g} GiB of memory ({how})" if settings.job_memory_bytes else "",
        f"{settings.job_cpus} CPUs ({'not enforced' if why else how})" if settings.job_cpus else "",
        f"{settings.job_processes:,} processes and threads ({processes})" if settings.job_processes else "",
        f"{get_open_files_limit(settings):,} open files per process (rlimit)" if settings.job_open_files else "",
        f"{settings.job_disk_bytes / GIB:.4g} GiB of disk space (measured every 5 s)"
        if settings.job_disk_bytes
        else "",
    ]
    text = "; ".join(filter(None, parts)) or "none"
    if why and settings.job_cpus:
        log.warning("MESHBOARD_JOB_CPUS has no effect, because control groups are not available: %s", why)
    return f"{text}. No control groups: {why}"[:1000] if why and text != "none" else text


def find_parent(controller: Controller, proc: Path, root: Path) -> GroupParent:
    """Return the group in which the host worker can create groups for a controller. Raises UnavailableError."""
    for line in _read_lines(proc / "self" / "cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers:
            if controller in controllers.split(","):
                top = root / controller
                own = top / path.lstrip("/")
                return GroupParent(1, own if own.is_dir() else top)  # a container sees its own group as the root
            continue
        for top in (root, root / "unified"):
            own = top / path.lstrip("/")
            parent = own.parent if own.name == WORKER_GROUP else own
            if controller not in _read_text(parent / "cgroup.controllers").split():
                continue
            if own.name != WORKER_GROUP and path != "/":
                raise UnavailableError(f"the group {path} of the host worker is not named {WORKER_GROUP}")
            return GroupParent(2, parent)
    raise UnavailableError(f"the kernel has no controller {controller} here")


def _enable(parent: Path, controller: Controller) -> None:
    """Let child groups use a controller of version 2. Raises OSError, for example because the parent has processes."""
    control = parent / "cgroup.subtree_control"
    if controller not in _read_text(control).split():
        control.write_text(f"+{controller}")


def _remove_old_groups(folders: dict[Controller, Path], run_dir: Path) -> None:
    """Remove empty groups of jobs whose supervisor was killed, also of host workers that do not start again."""
    own_prefix, newest_s = f"{_build_group_prefix(run_dir)}-", time.time() - MIN_FOREIGN_AGE_S
    for folder in set(folders.values()):
        for old in folder.parent.glob(f"{GROUP_PREFIX}-*"):
            with contextlib.suppress(OSError):  # the kernel keeps groups that have processes
                if old != folder and (old.name.startswith(own_prefix) or old.stat().st_mtime < newest_s):
                    old.rmdir()


def _remove_group(folder: Path) -> bool:
    """Return whether the group no longer exists. The kernel keeps groups that have processes."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _build_group_prefix(run_dir: Path) -> str:
    """Return the start of the group names of one host worker, because several can share a machine."""
    return f"{GROUP_PREFIX}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"


def _read_proportional_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, OSError):
        return int(process.memory_full_info().pss)
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_lines(path: Path) -> list[str]:
    return _read_text(path).splitlines()


def _read_field(path: Path, name: str) -> int:
    fields = dict(line.split(None, 1) for line in _read_lines(path) if " " in line)
    value = fields.get(name, "")
    return int(value) if value.isdecimal() else 0
