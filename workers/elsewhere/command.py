"""What a launcher's command line starts, and the same with the meter between launcher and script.

Two launchers are understood: torchrun (also as `python -m torch.distributed.run`) and plain `python SCRIPT`, one rank.
A command that has the meter already keeps it; any other command runs as it is. Whoever wants its ranks metered writes
`-m workers.meter` before the script: the meter finds its way by the environment.

The options are torch 2.13's; tests/workers/elsewhere/test_command.py fails when they change.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

METER = ["-m", "workers.meter"]
LAUNCHERS = ("torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner")  # not understood
PYTHON = re.compile(r"python(3(\.\d+)?)?")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that take the next word
VALUES = (
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
    """A command line that its launcher would not take either, or whose ranks cannot be known before it runs."""


class Launch(NamedTuple):
    """What is started. `ranks`: here. `node`: None where only the ranks will know.

    `metered`: the meter stands before the script. `apart`: each rank's words go to files of its own below the logs.
    """

    argv: list[str]
    nodes: int
    ranks: int
    node: int | None
    metered: bool
    apart: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def understand(argv: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]) -> Launch:
    """`logs`: where torchrun is to put each rank's words. `count_devices`: what "gpu" and "auto" mean here.

    Raises:
        CommandError: saying why.
    """
    words = _of_torchrun(argv)
    if words is not None:
        return _torchrun(argv[: len(argv) - len(words)], words, environment, logs, count_devices)
    script = _script_of_python(argv) if PYTHON.fullmatch(PurePath(argv[0]).name) else None
    if script is not None and argv[script : script + 2] not in (["-m", name] for name in LAUNCHERS):
        ranks = int(environment.get("WORLD_SIZE") or 1)  # whoever starts each rank by itself wraps each of them
        node = int(environment.get("RANK") or 0)
        meter = [] if argv[script : script + 2] == METER else METER
        return Launch([*argv[:script], *meter, *argv[script:]], ranks, 1, node, metered=True, apart=False)
    return Launch(list(argv), 1, 1, 0, metered=False, apart=False)


def _of_torchrun(argv: list[str]) -> list[str] | None:
    """The words after torchrun's name; None where something else is started."""
    if PurePath(argv[0]).name == "torchrun":
        return argv[1:]
    if PYTHON.fullmatch(PurePath(argv[0]).name):
        for place in range(1, len(argv) - 1):
            if argv[place] == "-m":
                return argv[place + 2 :] if argv[place + 1] == "torch.distributed.run" else None
            if not argv[place].startswith("-"):
                return None
    return None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchrun", add_help=False)

    def option(name: str, *short: str, **settings: Any) -> None:
        parser.add_argument(*short, f"--{name}", *({f"--{name.replace('-', '_')}"} - {f"--{name}"}), **settings)

    for name in ("nnodes", "nproc-per-node", "node-rank", "log-dir", *VALUES):
        option(name)
    option("redirects", "-r")
    option("tee", "-t")
    for name in ("standalone", "no-python", "run-path", "virtual-local-rank"):
        option(name, action="store_true")
    option("module", "-m", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _torchrun(
    launcher: list[str], words: list[str], environment: Mapping[str, str], logs: str, count_devices: Callable[[], int]
) -> Launch:
    told = _parser().parse_args(words)

    def given(name: str, default: str) -> str:
        found: str | None = getattr(told, name)
        return found or environment.get(f"PET_{name.upper()}") or default  # torchrun's own order

    nodes = _nodes(given("nnodes", "1:1"))
    ranks = _ranks(given("nproc_per_node", "1"), count_devices)
    named = told.node_rank or environment.get("PET_NODE_RANK") or environment.get("SLURM_NODEID")
    node = 0 if nodes == 1 else int(named) if named and named.isdigit() else None
    place = len(words) - len(told.arguments) - 1
    if words[place] != told.script:  # a "--" behind the script is no argument of it, for torchrun either
        place -= 1
    options, script = words[:place], words[place:]
    apart = not any(
        getattr(told, name) or environment.get(f"PET_{name.upper()}") for name in ("log_dir", "redirects", "tee")
    )
    has_it = told.module and told.script == METER[1]
    metered = not (told.no_python or told.run_path)
    ours = ["--log-dir", logs, "--tee", "3"] if apart else []
    if metered and not has_it:
        # torchrun's own -m, wherever it stands, now names the meter, which takes one for the script.
        script = [*([] if told.module else ["-m"]), "workers.meter", *(["-m"] if told.module else []), *script]
    return Launch([*launcher, *ours, *options, *script], nodes, ranks, node, metered, apart)


def _nodes(told: str) -> int:
    least, _, most = told.partition(":")
    if not least.isdigit() or (most and not most.isdigit()) or int(least) < 1:
        raise CommandError(f"`--nnodes` is {told}. Use a number of nodes.")
    if most and most != least:
        raise CommandError(f"`--nnodes` is {told}, but Meshboard needs a fixed number of nodes. Use one number.")
    return int(least)


def _ranks(told: str, count_devices: Callable[[], int]) -> int:
    if told.isdigit() and int(told) > 0:
        return int(told)
    if told in ("gpu", "auto", "cpu", "xpu"):
        return count_devices()
    raise CommandError(f"`--nproc-per-node` is {told}. Use a number, gpu, cpu, or auto.")


def _script_of_python(argv: list[str]) -> int | None:
    """Where `-m MODULE` or the script stands; None where Python is given neither."""
    place = 1
    while place < len(argv):
        word = argv[place]
        if word == "-c" or word == "-":
            return None
        if word == "-m" or not word.startswith("-"):
            return place
        place += 2 if word in PYTHON_VALUES else 1
    return None
