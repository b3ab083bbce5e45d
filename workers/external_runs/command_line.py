"""Parse the command line of a launcher, and insert the meter between launcher and script.

Two launchers are supported: torchrun (also as `python -m torch.distributed.run`) and plain `python SCRIPT` for one
rank. A command that already contains the meter is not changed. Any other command runs unchanged: to meter its ranks,
write `-m workers.meter` before the script. The meter finds its socket from the environment.

The options are those of torch 2.13. tests/workers/external_runs/test_command_line.py fails when they change.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

METER_ARGUMENTS = ["-m", "workers.meter"]
UNSUPPORTED_LAUNCHERS = ("torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner")
PYTHON = re.compile(r"python(3(\.\d+)?)?")
PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
TORCHRUN_OPTIONS_WITH_VALUE = (
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
)


class CommandError(Exception):
    """A command line that its launcher would reject, or whose number of ranks is not known before it runs."""


class LaunchPlan(NamedTuple):
    """A command to start.

    Args:
        ranks: number of ranks on this node.
        node: number of this node, or None if only the ranks will know it.
        metered: whether the meter is before the script.
        separate_logs: whether torchrun writes the output of each rank to its own files.
    """

    argv: list[str]
    nodes: int
    ranks: int
    node: int | None
    metered: bool
    separate_logs: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def parse_command(
    argv: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]
) -> LaunchPlan:
    """Parse a command line, and add the meter.

    Args:
        logs: the folder for torchrun's log files.
        count_devices: returns the number of ranks for "gpu" and "auto".

    Raises:
        CommandError: the command line is invalid.
    """
    words = _find_torchrun_arguments(argv)
    if words is not None:
        return _parse_torchrun(argv[: len(argv) - len(words)], words, environment, logs, count_devices)
    script = _find_python_script(argv) if PYTHON.fullmatch(PurePath(argv[0]).name) else None
    if script is None or argv[script : script + 2] in (["-m", name] for name in UNSUPPORTED_LAUNCHERS):
        return LaunchPlan(list(argv), 1, 1, 0, metered=False, separate_logs=False)
    # A launcher that starts each rank separately wraps each rank in this command.
    nodes, node = int(environment.get("WORLD_SIZE") or 1), int(environment.get("RANK") or 0)
    meter = [] if argv[script : script + 2] == METER_ARGUMENTS else METER_ARGUMENTS
    command = [*argv[:script], *meter, *argv[script:]]
    return LaunchPlan(command, nodes, 1, node, metered=True, separate_logs=False)


def _find_torchrun_arguments(argv: list[str]) -> list[str] | None:
    """Return the words after torchrun's name, or None for another command."""
    if PurePath(argv[0]).name == "torchrun":
        return argv[1:]
    if PYTHON.fullmatch(PurePath(argv[0]).name):
        for index in range(1, len(argv) - 1):
            if argv[index] == "-m":
                return argv[index + 2 :] if argv[index + 1] == "torch.distributed.run" else None
            if not argv[index].startswith("-"):
                return None
    return None


def _make_torchrun_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchrun", add_help=False)

    def add(name: str, *short: str, **settings: Any) -> None:
        parser.add_argument(*short, f"--{name}", *({f"--{name.replace('-', '_')}"} - {f"--{name}"}), **settings)

    for name in ("nnodes", "nproc-per-node", "node-rank", "log-dir", *TORCHRUN_OPTIONS_WITH_VALUE):
        add(name)
    add("redirects", "-r")
    add("tee", "-t")
    for name in ("standalone", "no-python", "run-path", "virtual-local-rank"):
        add(name, action="store_true")
    add("module", "-m", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _parse_torchrun(
    launcher: list[str], words: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]
) -> LaunchPlan:
    options = _make_torchrun_parser().parse_args(words)

    def get(name: str) -> str:
        option: str | None = getattr(options, name)
        return option or environment.get(f"PET_{name.upper()}") or ""  # in torchrun's own order

    nodes = _parse_nodes(get("nnodes") or "1:1")
    ranks = _parse_ranks(get("nproc_per_node") or "1", count_devices)
    node_rank = get("node_rank") or environment.get("SLURM_NODEID")
    node = 0 if nodes == 1 else int(node_rank) if node_rank and node_rank.isdigit() else None
    index = len(words) - len(options.arguments) - 1
    if words[index] != options.script:  # torchrun drops a "--" after the script
        index -= 1
    own_options, script = words[:index], words[index:]
    separate_logs = not any(get(name) for name in ("log_dir", "redirects", "tee"))
    metered = not (options.no_python or options.run_path)
    if metered and not (options.module and options.script == METER_ARGUMENTS[1]):
        # torchrun's own -m now names the meter, which gets another -m for the script.
        script = [*([] if options.module else ["-m"]), "workers.meter", *(["-m"] if options.module else []), *script]
    log_options = ["--log-dir", logs, "--tee", "3"] if separate_logs else []
    return LaunchPlan([*launcher, *log_options, *own_options, *script], nodes, ranks, node, metered, separate_logs)


def _parse_nodes(text: str) -> int:
    minimum, _, maximum = text.partition(":")
    if not minimum.isdigit() or (maximum and not maximum.isdigit()) or int(minimum) < 1:
        raise CommandError(f"`--nnodes` is {text}. Use a number of nodes.")
    if maximum and maximum != minimum:
        raise CommandError(f"`--nnodes` is {text}, but Meshboard needs a fixed number of nodes. Use one number.")
    return int(minimum)


def _parse_ranks(text: str, count_devices: Callable[[], int]) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text in ("gpu", "auto", "cpu", "xpu"):
        return count_devices()
    raise CommandError(f"`--nproc-per-node` is {text}. Use a number, gpu, cpu, or auto.")


def _find_python_script(argv: list[str]) -> int | None:
    """Return the index of `-m MODULE` or of the script, or None if Python runs neither."""
    index = 1
    while index < len(argv):
        word = argv[index]
        if word == "-c" or word == "-":
            return None
        if word == "-m" or not word.startswith("-"):
            return index
        index += 2 if word in PYTHON_OPTIONS_WITH_VALUE else 1
    return None
