"""The program that each kind of job starts on its ranks, its folders, and its heap.

Text from a user reaches a rank only in the spec file. No such text is in an argv, and every value follows a "=", so
torchrun, the program, and Python cannot take it for an option.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from ctypes.util import find_library
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from contracts.control import LaunchOrder, get_node_index
from contracts.names import LOAN_FILE
from planner.facts.kinds import DEFAULT_KIND
from planner.facts.spec import JobKind
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings

# One arena also for gloo's threads. Freed pages stay mapped until the kernel needs them, because the next step
# allocates the same tensors, and each returned page would cost a page fault. Allocations of 16 MiB and more are
# returned: smaller tensors would occupy their place, and the next allocation of that size would need a new one.
JEMALLOC_OPTIONS = "narenas:1,oversize_threshold:16777216,muzzy_decay_ms:-1"


class JobFolders(NamedTuple):
    """Folders that a job needs in addition to those of its attempt. In bubblewrap it sees no others.

    Args:
        read: folders to read.
        owned: folders that are created for the job and belong to its user.
        shared: existing folders in which the job can create files.
    """

    read: tuple[Path, ...] = ()
    owned: tuple[Path, ...] = ()
    shared: tuple[Path, ...] = ()


class Program(NamedTuple):
    """A program of a kind of job.

    Args:
        module: the module that runs on every rank.
        options: the options of the module, from the settings and the path of the spec.
        success_reason: the reason of a successful exit, with {steps} and {ranks} of a dry run.
        folders: the folders of the job.
        network: whether the ranks can contact anything else than each other.
        own_heap: whether Meshboard's program allocates the tensors, so that their heap can be chosen.
    """

    module: Callable[[HostSettings], str]
    options: Callable[[HostSettings, Path], dict[str, str]]
    success_reason: str
    folders: Callable[[HostSettings, LaunchOrder], JobFolders] = lambda _settings, _order: JobFolders()
    network: bool = False
    own_heap: bool = False


def _get_train_options(settings: HostSettings, spec: Path) -> dict[str, str]:
    return {
        "spec": str(spec),
        "data-root": str(settings.data_root),
        "checkpoint-root": str(settings.checkpoint_root),
        "host": settings.name,
    }


def _get_train_folders(settings: HostSettings, order: LaunchOrder) -> JobFolders:
    """Return the data with the user's token cache, the job's checkpoints, and those of the job that it resumes."""
    train = order["spec"].get("train", {})
    uid = os.geteuid() if settings.job_user is None else settings.job_user.uid
    read, owned = [settings.data_root], [settings.data_root / ".cache" / str(uid)]
    if resumed := train.get("resume"):
        read.append(settings.checkpoint_root / resumed.split("/")[0])
    if train.get("checkpoint_every"):
        owned.append(settings.checkpoint_root / order["job"])
    return JobFolders(tuple(read), tuple(owned))


def _get_script_folders(settings: HostSettings, order: LaunchOrder) -> JobFolders:
    """Return scripts and data to read, and the script's own folder to write. The ranks report a missing script.

    A script directly in the script root cannot write there, because the root contains the scripts of all users.
    """
    script, root = order["spec"]["script"], settings.script_root
    if script.get("upload") is not None:
        return JobFolders((settings.data_root,))
    module, cwd = script.get("module"), script.get("cwd")
    top = module.split(".")[0] if module else None
    if script.get("command") is not None and cwd:
        top = next(iter(PurePosixPath(cwd).parts), None)
    try:
        own = root / top if top else (root / (script.get("path") or "")).resolve().parent
        own = own.resolve()
        place = (root / cwd).resolve() if cwd else root if module else own
        is_shared = own != root and own.is_relative_to(root) and place.is_relative_to(own) and place.is_dir()
    except (OSError, ValueError, RuntimeError):  # a name that is too long or not Unicode, or a circle of links
        is_shared = False
    return JobFolders((root, settings.data_root), shared=(place,) if is_shared else ())


PROGRAMS: dict[JobKind, Program] = {
    "train": Program(
        lambda settings: settings.trainer_module,
        _get_train_options,
        "finished after step {steps}",
        _get_train_folders,
        own_heap=True,
    ),
    "script": Program(
        lambda _settings: "workers.meter",
        lambda settings, spec: {"spec": str(spec), "root": str(settings.script_root)},
        "the script finished",
        _get_script_folders,
        network=True,
    ),
    "dry_run": Program(
        lambda _settings: "workers.dry_run",
        lambda _settings, spec: {"spec": str(spec)},
        "ran one step of {ranks}",
    ),
    "lab": Program(
        lambda _settings: "workers.lab",
        lambda _settings, spec: {"spec": str(spec)},
        "ran the benchmark: all elements are correct",
    ),
    "calibrate": Program(
        lambda _settings: "workers.calibrate",
        lambda settings, _spec: {"device": settings.device},
        "calibrated the host",
        own_heap=True,
    ),
}


def get_program(order: LaunchOrder) -> Program:
    return PROGRAMS[order["spec"].get("kind", DEFAULT_KIND)]


def needs_only_this_host(order: LaunchOrder) -> bool:
    """Return whether the ranks contact only each other: no network, other host, or checkpoint of another host."""
    is_lent = "checkpoint" in order and "lent" in order["checkpoint"]
    return not (get_program(order).network or is_lent or "gang" in order)


def build_rank_command(
    order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str
) -> list[str]:
    """Return the module that every rank runs, and its options."""
    program = get_program(order)
    options = program.options(settings, attempt.spec) | {
        "telemetry": telemetry_socket,
        "job": attempt.job,
        "attempt": str(attempt.attempt),
    }
    if "upload" in order:
        options["root"] = str(attempt.upload)
    if "checkpoint" in order:
        options |= {"expect-checkpoint": order["checkpoint"]["name"], "checkpoint-host": order["checkpoint"]["host"]}
        if "lent" in order["checkpoint"]:
            options |= {"loan": str(Path(telemetry_socket).with_name(LOAN_FILE))}
    return [program.module(settings), *_format_options(options)]


def build_launch_command(
    order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str
) -> list[str]:
    """Return the command that starts every rank and writes the report of the first failed rank.

    For an upload, the command first installs the packages that the upload lists.
    """
    command = _build_launch_command(order, attempt, settings, telemetry_socket)
    if "upload" not in order:
        return command
    options = {
        "upload": str(attempt.upload),
        "folder": str(attempt.environment),
        "allowed": str(int(settings.builds_upload_environments)),
    }
    return [sys.executable, "-m", "workers.host.upload_environment", *_format_options(options), "--", *command[1:]]


def _build_launch_command(
    order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str
) -> list[str]:
    if (order["spec"].get("script") or {}).get("command") is not None:
        return _build_user_launch_command(order, attempt, settings, telemetry_socket)
    options = {
        "failure": str(attempt.failure_file),
        "logs": str(attempt.logs),
        "ranks": str(len(order["slots"])),
        "name": attempt.job,
    }
    if "gang" in order:
        num_nodes = len(order["gang"]["nodes"])
        options |= {"node": str(get_node_index(order)), "nodes": str(num_nodes), "address": settings.address}
    ranks = build_rank_command(order, attempt, settings, telemetry_socket)
    return [sys.executable, "-m", "workers.host.launch", *_format_options(options), *ranks]


def _build_user_launch_command(
    order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str
) -> list[str]:
    """Return the command that starts the launcher of a user, with its ranks in the meter."""
    options = {
        "spec": str(attempt.spec),
        "root": str(attempt.upload if "upload" in order else settings.script_root),
        "telemetry": telemetry_socket,
        "run": f"{attempt.job}/{attempt.attempt}",
        "ranks": str(len(order["slots"])),
        "logs": str(attempt.logs),
        "failure": str(attempt.failure_file),
    }
    return [sys.executable, "-m", "workers.external_runs.job_command", *_format_options(options)]


def _format_options(options: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


@cache
def find_jemalloc() -> str | None:
    """Return the name by which the loader finds jemalloc, or None if the host does not have it."""
    return find_library("jemalloc")


def get_heap_variables() -> dict[str, str]:
    """Return variables that put the heap of a process into jemalloc, if the host has it.

    jemalloc must be loaded when the process starts. glibc's heap leaves holes between tensors that no tensor fits into
    (measured in docs/notebook/2026-11.md).
    """
    library = find_jemalloc()
    return {} if library is None else {"LD_PRELOAD": library, "MALLOC_CONF": JEMALLOC_OPTIONS}
