"""`meshboard-meter [OPTIONS] -- torchrun --nproc-per-node 4 train.py`: run a command, and report it to a board.

Set MESHBOARD_URL and MESHBOARD_TOKEN to the board and your token. See docs/howto/elsewhere.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from contracts.fields import HOST_NAME_PATTERN
from workers.external_runs.child_process import get_shell_code, print_message
from workers.external_runs.command_line import CommandError, LaunchPlan, parse_command
from workers.external_runs.external_run import MAX_RANKS, ExternalRun, NotMeteredError, get_command_environment
from workers.external_runs.registration import BoardRun, RegistrationRequest, RunRefusedError
from workers.host.attempts import get_socket_root
from workers.host.supervisor.http_transport import BadUrlError, BoardClient

EXIT_USAGE = 2
EXIT_NOT_STARTED = 127
RANK_TIMEOUT_S = 180.0
AXES = ("dp", "pp", "cp", "tp")
RUN = re.compile(r"([a-z2-7]{1,16}):([A-Za-z0-9_-]{20,200})")
COUNT_SCRIPT = (
    "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else __import__('os').cpu_count())"
)


class UsageError(Exception):
    """Invalid options. The command was not started."""


def main() -> int:
    options = _make_parser().parse_args()
    try:
        folder = Path(tempfile.mkdtemp(prefix="meshboard-meter-", dir=get_socket_root()))
    except OSError as error:
        return _run_unmetered(options.command, error)
    try:
        return get_shell_code(asyncio.run(_run(options, os.environ, folder)))
    except UsageError as error:
        print_message(str(error))
        return EXIT_USAGE
    except NotMeteredError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return _run_unmetered(options.command, error)
    except OSError as error:
        print_message(f"{options.command[0]}: {error.strerror or error}")
        return EXIT_NOT_STARTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_unmetered(command: list[str], reason: Exception) -> int:
    """Replace this process by the command, because a problem of the meter must not stop a training run."""
    print_message(f"Meshboard does not meter or report this run: {reason}")
    try:
        os.execvpe(command[0], command, get_command_environment())  # noqa: S606  # the user's own command
    except OSError as error:
        print_message(f"{command[0]}: {error.strerror or error}")
        return EXIT_NOT_STARTED


def _make_parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--ranks", type=_parse_ranks, help="number of ranks on this node (default: detected)")
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=RANK_TIMEOUT_S,
        help="seconds for the first rank to report, after which the board shows the run without ranks "
        f"(default: {RANK_TIMEOUT_S:.0f})",
    )
    parser.add_argument("--node-name", help="name of this machine on the job page (default: its host name)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device of the ranks (default: detected)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="command to run, with its arguments")
    return parser


def _parse_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}. Use a number from 1 to {MAX_RANKS}.")
    return int(text)


async def _run(options: argparse.Namespace, environment: Mapping[str, str], folder: Path) -> int:
    """Check the options, and run the command. Raises UsageError."""
    try:
        launch = parse_command(options.command, environment, str(folder / "logs"), _count_devices)
        client = BoardClient(options.url or _get_required(environment, "MESHBOARD_URL", "--url"), options.ca_file)
    except (CommandError, BadUrlError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--ca-file {options.ca_file}: {error.strerror or error}") from None
    if options.ranks is not None and launch.ranks is None:
        launch = launch._replace(ranks=options.ranks, node=0)
    node = options.node if options.node is not None else launch.node
    if node is not None and launch.ranks is not None and not 0 <= node < launch.nodes:
        raise UsageError(f"`--node` is {node}. Use 0 to {launch.nodes - 1}.")
    name = options.node_name or _get_node_name(environment, launch, node)
    body = _build_body(options)
    request = _make_request(options, environment, body)
    if launch.ranks is not None:
        try:
            request = request.add_size(launch.nodes, launch.ranks)
        except RunRefusedError as error:
            raise UsageError(str(error)) from None
    kind = "train" if "spec" in body else "script"
    group = _get_compared_group(body)
    run = ExternalRun(launch, node, name, client, request, folder, kind, group, max(0.0, options.rank_timeout))
    return await run.run()


def _build_body(options: argparse.Namespace) -> dict[str, Any]:
    """Build the REST request that opens the run, without the number of ranks. Raises UsageError."""
    script = next((word for word in options.command if word.endswith(".py")), options.command[0])
    body: dict[str, Any] = {
        "name": (options.name or PurePath(script).name or options.command[0])[:100],
        "device": options.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu"),
        "command": [word[:4096] for word in options.command[:202]],
        "tags": options.tag,
    }
    if options.spec is not None:
        try:
            body["spec"] = json.loads(options.spec.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--spec {options.spec}: {error}") from None
    return body


def _make_request(
    options: argparse.Namespace, environment: Mapping[str, str], body: dict[str, Any]
) -> RegistrationRequest:
    if run := options.run or environment.get("MESHBOARD_RUN"):
        match = RUN.fullmatch(run)
        if match is None:
            raise UsageError("`--run` is invalid. Use ID:TOKEN from the board.")
        return RegistrationRequest(BoardRun(match[1], 1, match[2], ""), "", body)
    key = options.key or _get_slurm_key(environment)
    if options.token_file is None:
        return RegistrationRequest(None, _get_required(environment, "MESHBOARD_TOKEN", "--token-file"), body, key)
    try:
        token = options.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {options.token_file}: {error}") from None
    return RegistrationRequest(None, token, body, key)


def _get_required(environment: Mapping[str, str], variable: str, option: str) -> str:
    value = environment.get(variable, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise UsageError(f"Set {option} or {variable}.")
    return value


def _get_compared_group(body: dict[str, Any]) -> str:
    """Return the axis that all ranks are on in the prediction, "world" for several axes. Empty without a spec."""
    if "spec" not in body:
        return ""
    layout = body["spec"].get("layout") if isinstance(body["spec"], dict) else None
    degrees = layout if isinstance(layout, dict) else {}
    used = [axis for axis in AXES if degrees.get(axis, 1) != 1]
    return used[0] if len(used) == 1 else "world"


def _get_slurm_key(environment: Mapping[str, str]) -> str | None:
    """Return a key that is unique for each start of a Slurm step."""
    if not environment.get("SLURM_JOB_ID"):
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(environment.get(name, "") for name in names)[:190]


def _get_node_name(environment: Mapping[str, str], launch: LaunchPlan, node: int | None) -> str:
    """Return the name of this machine, with the rank if each rank is a separate node."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURMD_NODENAME") or socket.gethostname())[:80]
    if launch.ranks == 1 and launch.nodes > 1 and node is not None:
        name = f"{name}-{node}"
    return name if re.fullmatch(HOST_NAME_PATTERN, name) else f"node-{name}".strip("-")


def _count_devices() -> int:
    """Count the devices in a separate process that loads torch. Raises CommandError."""
    result = subprocess.run([sys.executable, "-c", COUNT_SCRIPT], capture_output=True, text=True, check=False)
    if result.returncode != 0 or not result.stdout.strip().isdigit() or int(result.stdout) < 1:
        raise CommandError("`--nproc-per-node` needs a number, because torch could not count the devices.")
    return int(result.stdout)
