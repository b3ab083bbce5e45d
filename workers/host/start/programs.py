"""What each kind of job starts on its ranks, and what is said when it ended well.

What a user wrote reaches a rank in the spec's file alone. No word of it is in an argv, and every value there follows
a "=": nothing can be taken for an option of torchrun, of the program, or of Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contracts.control import LaunchOrder, get_node_index
from contracts.names import LOAN_FILE
from planner.facts.kinds import DEFAULT_KIND
from planner.facts.spec import JobKind
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings


class Folders(NamedTuple):
    """What a job needs beside its attempt's folders: in bubblewrap it has no more.

    `own`: made for it, and its user's. `lent`: somebody's, in which it may make files.
    """

    read: tuple[Path, ...] = ()
    own: tuple[Path, ...] = ()
    lent: tuple[Path, ...] = ()


class Program(NamedTuple):
    """`module` runs on every rank with `options`. `good_end` knows {steps} done and, in words, ranks {tried}.

    `network`: whether it may speak to whom it likes; else its ranks speak to each other alone. `own_heap`: whether its
    tensors are ours, and may lie where we like.
    """

    module: Callable[[HostSettings], str]
    options: Callable[[HostSettings, Path], dict[str, str]]
    good_end: str
    folders: Callable[[HostSettings, LaunchOrder], Folders] = lambda _settings, _order: Folders()
    network: bool = False
    own_heap: bool = False


def _named(module: str) -> Callable[[HostSettings], str]:
    return lambda _settings: module


def _roots(settings: HostSettings, spec: Path) -> dict[str, str]:
    return {
        "spec": str(spec),
        "data-root": str(settings.data_root),
        "checkpoint-root": str(settings.checkpoint_root),
        "host": settings.name,
    }


def _of_training(settings: HostSettings, order: LaunchOrder) -> Folders:
    """Its data with its user's cache of tokens, its own checkpoints, and the job's that it resumes."""
    train = order["spec"].get("train", {})
    uid = os.geteuid() if settings.job_user is None else settings.job_user.uid
    read, own = [settings.data_root], [settings.data_root / ".cache" / str(uid)]
    if resumed := train.get("resume"):
        read.append(settings.checkpoint_root / resumed.split("/")[0])
    if train.get("checkpoint_every"):
        own.append(settings.checkpoint_root / order["job"])
    return Folders(tuple(read), tuple(own))


def _of_script(settings: HostSettings, order: LaunchOrder) -> Folders:
    """Scripts and data to read; of its own folder, where it works, to write. What is not there, its ranks tell.

    The root itself holds everybody's scripts and is nobody's own: what lies in it works there and only reads.
    """
    script, root = order["spec"]["script"], settings.script_root
    module, cwd = script.get("module"), script.get("cwd")
    try:
        own = root / module.split(".")[0] if module else (root / (script.get("path") or "")).resolve().parent
        own = own.resolve()
        place = (root / cwd).resolve() if cwd else root if module else own
        lends = own != root and own.is_relative_to(root) and place.is_relative_to(own) and place.is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long, half a character, a circle of links
        lends = False
    return Folders((root, settings.data_root), lent=(place,) if lends else ())


PROGRAMS: dict[JobKind, Program] = {
    "train": Program(
        lambda settings: settings.trainer_module, _roots, "finished after step {steps}", _of_training, own_heap=True
    ),
    "script": Program(
        _named("workers.meter"),
        lambda settings, spec: {"spec": str(spec), "root": str(settings.script_root)},
        "the script finished",
        _of_script,
        network=True,
    ),
    "dry_run": Program(
        _named("workers.dry_run"), lambda _settings, spec: {"spec": str(spec)}, "ran one step of {tried}"
    ),
    "lab": Program(
        _named("workers.lab"),
        lambda _settings, spec: {"spec": str(spec)},
        "ran the benchmark: all elements are correct",
    ),
    "calibrate": Program(
        _named("workers.calibrate"),
        lambda settings, _spec: {"device": settings.device},
        "calibrated the host",
        own_heap=True,
    ),
}


def program_of(order: LaunchOrder) -> Program:
    """The program of an order's kind of job."""
    return PROGRAMS[order["spec"].get("kind", DEFAULT_KIND)]


def stays_here(order: LaunchOrder) -> bool:
    """Whether nothing that the ranks must reach lies elsewhere: no other host's ranks, nor a checkpoint there."""
    lent = "checkpoint" in order and "lent" in order["checkpoint"]
    return not (program_of(order).network or lent or "gang" in order)


def rank_command(order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str) -> list[str]:
    """What every rank runs: the module and its options."""
    program = program_of(order)
    options = program.options(settings, attempt.spec) | {
        "telemetry": telemetry_socket,
        "job": attempt.job,
        "attempt": str(attempt.attempt),
    }
    if "checkpoint" in order:
        options |= {"expect-checkpoint": order["checkpoint"]["name"], "checkpoint-host": order["checkpoint"]["host"]}
        if "lent" in order["checkpoint"]:
            options |= {"loan": str(Path(telemetry_socket).with_name(LOAN_FILE))}
    return [program.module(settings), *_options(options)]


def launch_command(
    order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str, failure: Path
) -> list[str]:
    """What starts every rank, and writes to `failure` which of them failed first."""
    options = {
        "failure": str(failure),
        "logs": str(attempt.logs),
        "ranks": str(len(order["slots"])),
        "name": attempt.job,
    }
    if "gang" in order:
        nodes = len(order["gang"]["nodes"])
        options |= {"node": str(get_node_index(order)), "nodes": str(nodes), "address": settings.address}
    ranks = rank_command(order, attempt, settings, telemetry_socket)
    return [sys.executable, "-m", "workers.host.start.launch", *_options(options), *ranks]


def _options(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]
