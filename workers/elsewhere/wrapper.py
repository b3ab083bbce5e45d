"""`meshboard-meter [OPTIONS] -- torchrun --nproc-per-node 4 train.py`: the command as it is, and a board that shows it.

MESHBOARD_URL and MESHBOARD_TOKEN say where and by whose leave; docs/howto/elsewhere.md tells more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from contracts.fields import HOST_NAME_PATTERN
from workers.elsewhere.command import CommandError, Launch, understand
from workers.elsewhere.joining import Asked, Joining, Run
from workers.elsewhere.terminal import say, shell_code
from workers.elsewhere.watch import NotMeteredError, Place, Told, Watch, without_secrets
from workers.host.attempts import socket_root
from workers.host.supervisor.line.https import BadUrlError, Board

USAGE = 2
AXES = ("dp", "pp", "cp", "tp")
NOT_STARTED = 127
RUN = re.compile(r"([a-z2-7]{1,16}):([A-Za-z0-9_-]{20,200})")
COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else __import__('os').cpu_count())"


class WrongUseError(Exception):
    """What was asked for makes no sense; says why. Nothing is started."""


class Plan(NamedTuple):
    """All that is known before the command starts."""

    launch: Launch
    place: Place
    board: Board
    asked: Asked
    told: Told


def main() -> int:
    options = _parser().parse_args()
    try:
        folder = Path(tempfile.mkdtemp(prefix="meshboard-meter-", dir=socket_root()))
    except OSError as error:
        return _unmetered(options.command, error)
    try:
        plan = _plan(options, os.environ, folder)
        return shell_code(asyncio.run(_watch(plan, folder)))
    except WrongUseError as error:
        say(str(error))
        return USAGE
    except NotMeteredError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return _unmetered(options.command, error)
    except OSError as error:
        say(f"{options.command[0]}: {error.strerror or error}")
        return NOT_STARTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unmetered(command: list[str], why: Exception) -> int:
    """The command in our place: whatever keeps us from watching a training must not keep it from running."""
    say(f"Meshboard does not meter or report this run: {why}")
    try:
        os.execvpe(command[0], command, without_secrets())  # noqa: S606  # as its user would have started it
    except OSError as error:
        say(f"{command[0]}: {error.strerror or error}")
        return NOT_STARTED


async def _watch(plan: Plan, folder: Path) -> int:
    joining = Joining(plan.board, plan.asked, say)
    return await Watch(plan.launch, plan.place, plan.board, joining, folder, plan.told).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshboard-meter", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", help="address of the board (default: MESHBOARD_URL)")
    parser.add_argument(
        "--token-file", type=Path, help="file that contains your REST token (default: the token in MESHBOARD_TOKEN)"
    )
    parser.add_argument("--ca-file", type=Path, help="file with the CA certificates of the board, if its CA is private")
    parser.add_argument("--name", help="name of the run (default: name of the script)")
    parser.add_argument("--tag", action="append", default=[], help="tag of the run; can be repeated")
    parser.add_argument(
        "--spec", type=Path, help="JSON file with the spec of a train job, from which the run is predicted"
    )
    parser.add_argument("--key", help="key of this run; use the same key on all nodes (default: the Slurm job)")
    parser.add_argument("--run", help="ID:TOKEN of an open run (default: MESHBOARD_RUN)")
    parser.add_argument(
        "--node", type=int, help="number of this node, from 0 (default: detected from the launcher or the ranks)"
    )
    parser.add_argument("--node-name", help="name of this machine on the job page (default: its host name)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device of the ranks (default: detected)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="command to run, with its arguments")
    return parser


def _plan(options: argparse.Namespace, environment: Mapping[str, str], folder: Path) -> Plan:
    """Raises WrongUseError."""
    try:
        launch = understand(options.command, environment, str(folder / "logs"), _count_devices)
        board = Board(options.url or _needed(environment, "MESHBOARD_URL", "--url"), options.ca_file)
    except (CommandError, BadUrlError) as error:
        raise WrongUseError(str(error)) from None
    except OSError as error:
        raise WrongUseError(f"--ca-file {options.ca_file}: {error.strerror or error}") from None
    if not launch.metered:
        say("These ranks are not metered. To count their traffic, put `-m workers.meter` before the script.")
    node = options.node if options.node is not None else launch.node
    if node is not None and not 0 <= node < launch.nodes:
        raise WrongUseError(f"`--node` is {node}. Use 0 to {launch.nodes - 1}.")
    name = options.node_name or _node_name(environment, launch, node)
    request = _request(options, environment, launch)
    return Plan(launch, Place(node, name), board, _asked(options, environment, request), _told(request))


def _request(options: argparse.Namespace, environment: Mapping[str, str], launch: Launch) -> dict[str, Any]:
    key = options.key or _key_of_slurm(environment)
    if launch.nodes > 1 and key is None and not (options.run or environment.get("MESHBOARD_RUN")):
        raise WrongUseError(
            f"The run has {launch.nodes} nodes. Use the same --key on each node, and a new key for each run."
        )
    request: dict[str, Any] = {
        "name": (options.name or _script_name(options.command))[:100],
        "world_size": launch.nodes * launch.ranks,
        "nodes": launch.nodes,
        "device": options.device or _device(),
        "command": [word[:4096] for word in options.command[:202]],
        "tags": options.tag,
    }
    if options.spec is not None:
        try:
            request["spec"] = json.loads(options.spec.read_text())
        except (OSError, ValueError) as error:
            raise WrongUseError(f"--spec {options.spec}: {error}") from None
    if launch.nodes == 1:
        request["key"] = secrets.token_urlsafe(24)  # its own: asked again after a lost answer, the board finds its run
    elif key is not None:
        request["key"] = key
    if options.key and launch.nodes == 1:
        say("--key is ignored, because this run has one node.")
    return request


def _asked(options: argparse.Namespace, environment: Mapping[str, str], request: dict[str, Any]) -> Asked:
    if named := options.run or environment.get("MESHBOARD_RUN"):
        found = RUN.fullmatch(named)
        if found is None:
            raise WrongUseError("`--run` is invalid. Use ID:TOKEN from the board.")
        return Asked(Run(found[1], 1, found[2], ""), "", request)
    if options.token_file is None:
        return Asked(None, _needed(environment, "MESHBOARD_TOKEN", "--token-file"), request)
    try:
        token = options.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"--token-file {options.token_file}: {error}") from None
    return Asked(None, token, request)


def _needed(environment: Mapping[str, str], variable: str, option: str) -> str:
    found = environment.get(variable, "").strip()
    if not found or not found.isascii() or not found.isprintable():
        raise WrongUseError(f"Set {option} or {variable}.")
    return found


def _told(request: dict[str, Any]) -> Told:
    if "spec" not in request:
        return Told("script", "")
    layout = request["spec"].get("layout") if isinstance(request["spec"], dict) else None
    degrees = layout if isinstance(layout, dict) else {}
    used = [axis for axis in AXES if degrees.get(axis, 1) != 1]
    return Told("train", used[0] if len(used) == 1 else "world")


def _key_of_slurm(environment: Mapping[str, str]) -> str | None:
    """One of each start of each step."""
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(environment.get(name, "") for name in names)[:190]


def _node_name(environment: Mapping[str, str], launch: Launch, node: int | None) -> str:
    """This machine's, and the rank's where each is a node of its own."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURMD_NODENAME") or socket.gethostname())[:80]
    if launch.ranks == 1 and launch.nodes > 1 and node is not None:
        name = f"{name}-{node}"
    return name if re.fullmatch(HOST_NAME_PATTERN, name) else f"node-{name}".strip("-")


def _script_name(command: list[str]) -> str:
    """The script's, as far as one is seen."""
    found = next((word for word in command if word.endswith(".py")), command[0])
    return PurePath(found).name or command[0]


def _device() -> str:
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def _count_devices() -> int:
    """Raises CommandError."""
    told = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    if told.returncode != 0 or not told.stdout.strip().isdigit() or int(told.stdout) < 1:
        raise CommandError("`--nproc-per-node` needs a number, because torch could not count the devices.")
    return int(told.stdout)
