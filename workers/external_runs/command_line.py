"""Parse the command line of a launcher, to learn the number of ranks and to separate their logs.

The command runs unchanged, and the hook in its environment meters the ranks (`workers.meter.hook`). The options of
torchrun are parsed, also behind a wrapper such as `env X=1` or `uv run`. The ranks of any other command report their
number.

The options are those of torch 2.13. tests/workers/external_runs/test_command_line.py fails when they change.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Commands that run the rest of their command line.
WRAPPERS = ("conda", "env", "nice", "numactl", "pixi", "poetry", "stdbuf", "taskset", "time", "timeout", "uv")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
LAUNCH_OPTIONS = ("--use-env", "--use_env")  # only of torch.distributed.launch
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
        ranks: number of ranks on this node, or None if only the ranks will know it.
        node: number of this node, or None if only the ranks will know it.
        log_variables: variables with which torchrun writes the output of each rank to its own files.
    """

    argv: list[str]
    nodes: int
    ranks: int | None
    node: int | None
    log_variables: dict[str, str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def parse_command(
    argv: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]
) -> LaunchPlan:
    """Parse a command line.

    Args:
        logs: the folder for torchrun's log files.
        count_devices: returns the number of ranks for "gpu" and "auto".

    Raises:
        CommandError: the command line is invalid.
    """
    words = _find_torchrun_arguments(argv)
    if words is not None:
        return _parse_torchrun(argv, words, environment, logs, count_devices)
    if environment.get("RANK", "").isdigit() and environment.get("WORLD_SIZE", "").isdigit():
        # A launcher that starts each rank separately wraps each rank in this command.
        return LaunchPlan(argv, max(1, int(environment["WORLD_SIZE"])), 1, int(environment["RANK"]), {})
    return LaunchPlan(argv, 1, None, None, {})


def _find_torchrun_arguments(argv: list[str]) -> list[str] | None:
    """Return the words after torchrun's name, or None for another command."""
    is_wrapped = PurePath(argv[0]).name in WRAPPERS
    for index, word in enumerate(argv if is_wrapped else argv[:1]):
        name = PurePath(word).name
        if name == "torchrun":
            return argv[index + 1 :]
        if PYTHON.fullmatch(name):
            return _find_module_arguments(argv[index + 1 :])
    return None


def _find_module_arguments(words: list[str]) -> list[str] | None:
    for index, word in enumerate(words[:-1]):
        if word == "-m":
            return words[index + 2 :] if words[index + 1] in TORCHRUN_MODULES else None
        if not word.startswith("-"):
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
    argv: list[str], words: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]
) -> LaunchPlan:
    options = _make_torchrun_parser().parse_args([word for word in words if word not in LAUNCH_OPTIONS])

    def get(name: str) -> str:
        option: str | None = getattr(options, name)
        return option or environment.get(f"PET_{name.upper()}") or ""  # in torchrun's own order

    nodes = _parse_nodes(get("nnodes") or "1:1")
    ranks = _parse_ranks(get("nproc_per_node") or "1", count_devices)
    node_rank = get("node_rank") or environment.get("SLURM_NODEID")
    node = 0 if nodes == 1 else int(node_rank) if node_rank and node_rank.isdigit() else None
    has_own_logs = any(get(name) for name in ("log_dir", "redirects", "tee"))
    return LaunchPlan(argv, nodes, ranks, node, {} if has_own_logs else {"PET_LOG_DIR": logs, "PET_TEE": "3"})


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
