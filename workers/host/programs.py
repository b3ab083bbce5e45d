"""What each kind of job starts on its ranks, and what is said when it ended well.

What a user wrote reaches a rank in the spec's file alone. No word of it is in an argv, and every value there follows
a "=": nothing can be taken for an option of torchrun, of the program, or of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contracts.control import LaunchOrder
from planner.facts.kinds import DEFAULT
from planner.facts.spec import JobKind
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings


class Program(NamedTuple):
    """`module` runs on every rank with `options`. `good_end` knows {steps} done and {tried} ranks of a dry run."""

    module: Callable[[HostSettings], str]
    options: Callable[[HostSettings, Path], dict[str, str]]
    good_end: str


def _named(module: str) -> Callable[[HostSettings], str]:
    return lambda _settings: module


def _roots(settings: HostSettings, spec: Path) -> dict[str, str]:
    return {
        "spec": str(spec),
        "data-root": str(settings.data_root),
        "checkpoint-root": str(settings.checkpoint_root),
    }


PROGRAMS: dict[JobKind, Program] = {
    "train": Program(lambda settings: settings.trainer_module, _roots, "finished after step {steps}"),
    "script": Program(
        _named("workers.meter"),
        lambda settings, spec: {"spec": str(spec), "root": str(settings.script_root)},
        "the script ended well",
    ),
    "dry_run": Program(
        _named("workers.dry_run"), lambda _settings, spec: {"spec": str(spec)}, "tried a step of {tried} ranks"
    ),
    "lab": Program(
        _named("workers.lab"),
        lambda _settings, spec: {"spec": str(spec)},
        "ran the lab: every element is as it should be",
    ),
    "calibrate": Program(
        _named("workers.calibrate"), lambda settings, _spec: {"device": settings.device}, "measured the host"
    ),
}


def program_of(order: LaunchOrder) -> Program:
    """The program of an order's kind of job."""
    return PROGRAMS[order["spec"].get("kind", DEFAULT)]


def rank_command(order: LaunchOrder, attempt: AttemptDir, settings: HostSettings, telemetry_socket: str) -> list[str]:
    """What every rank runs: the module and its options."""
    program = program_of(order)
    options = program.options(settings, attempt.spec) | {
        "telemetry": telemetry_socket,
        "job": attempt.job,
        "attempt": str(attempt.attempt),
    }
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
    ranks = rank_command(order, attempt, settings, telemetry_socket)
    return [sys.executable, "-m", "workers.host.launch", *_options(options), *ranks]


def _options(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]
