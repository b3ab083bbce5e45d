"""`python -m workers.slurm`: one node of an attempt in a Slurm allocation. srun starts it with the order on stdin.

No rank starts before the board accepts this node's claim. If an attempt was submitted twice, the board rejects one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from contracts.codec import BadMessageError, validate_allocation_order
from contracts.control import END_WARNING_SUFFIX, VERSION, AllocationOrder, Gang, LaunchOrder, get_node_index
from contracts.control import Node as GangNode
from contracts.fields import HOST_NAME_PATTERN
from planner.facts.kinds import saves_checkpoints
from planner.facts.parse_spec import parse_spec
from workers.disk import TreeWalk, discard_path
from workers.external_runs.registration import BoardRun, RegistrationRequest, RunRefusedError, RunRegistration
from workers.host.attempts import SOCKET_FOLDER_PREFIX, AttemptDir, claim_attempt, get_socket_root
from workers.host.hardware import get_address_towards
from workers.host.settings import HostSettings
from workers.host.supervisor.exit_report import describe_save
from workers.host.supervisor.http_transport import BadUrlError, BoardClient, HttpTransport
from workers.host.supervisor.publisher import BoardTransport
from workers.host.supervisor.supervisor import Supervisor

MAX_ORDER_BYTES = 16 * 2**20
HOSTNAMES_TIMEOUT_S = 20.0  # of scontrol without a request to slurmctld
JOB_TIMEOUT_S = 10.0  # of scontrol with a request to slurmctld
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # of other nodes, which announce their own address when they are ready
KEEP_RUNS_S = 7 * 86400.0


class SlurmNodeError(RuntimeError):
    """Slurm's variables for this node are missing or do not match the order."""


class SlurmNode(NamedTuple):
    """Node `number` of `names`, the nodes of the allocation in order. `gpus` has Slurm's numbers of the GPUs."""

    number: int
    names: tuple[str, ...]
    slurm_job: str
    address: str
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[self.number]


class SlurmSupervisor(Supervisor):
    """A supervisor that Slurm can end without a reason. The run first saves a checkpoint."""

    def __init__(
        self, attempt: AttemptDir, settings: HostSettings, folder: Path, transport: BoardTransport, node: SlurmNode
    ) -> None:
        super().__init__(attempt, settings, folder, transport)
        self._slurm_job = node.slurm_job
        self._warning_file = settings.run_dir.parents[1] / f"{node.slurm_job}.{END_WARNING_SUFFIX}"

    def _open_board_client(self) -> BoardClient:
        assert isinstance(self.transport, HttpTransport), "Slurm nodes have no other link to the board"
        return self.transport.client

    def _handle_term(self) -> None:
        """Handle Slurm's SIGTERM: the job is cancelled or preempted, or its time limit is reached.

        SIGKILL follows after Slurm's KillWait or GraceTime. A save that takes longer is lost.
        """
        if self._finished.is_set():
            return
        if not (self.settings.saves_on_term and self.summary.training):
            self._end("lost", "Slurm ended it")
        elif not self._save_requested:
            self._request_save()

    async def _poll_flags(self) -> None:
        # A run saves before its time limit also while the board is unreachable.
        if not self._save_requested and self._warning_file.exists():
            self._request_save()
        await super()._poll_flags()

    async def _report(self) -> None:
        with contextlib.suppress(OSError):  # `prune_shared_folder` removes folders without recent changes
            os.utime(self.attempt.host_dir)
        await super()._report()

    async def _set_save_outcome(self) -> None:
        if get_node_index(self.order) != 0:
            return
        end_reason = await asyncio.to_thread(get_end_reason, self._slurm_job)
        self.preempted = end_reason == "preempted"
        if self.preempted:
            why = "because Slurm preempted the job"
        elif end_reason == "time limit" or self._warning_file.exists():
            why = "because the Slurm time limit is near"
        else:
            why = "because Slurm requested it"
        self.ended_by = "cancelled" if self.preempted else "failed"
        self.reason = f"{describe_save(self.summary, why)}; a retry resumes from it"


def main() -> int:
    try:
        order = read_order(sys.stdin.buffer)
        node = read_node(order)
        client = _make_client(order)
    except (BadMessageError, SlurmNodeError, BadUrlError, OSError) as error:
        print_message(str(error))
        return 1
    code = asyncio.run(supervise(order, node, build_settings(order, node), client))
    if node.number == 0:
        prune_shared_folder(Path(order["folder"]))
    return code


async def supervise(order: AllocationOrder, node: SlurmNode, settings: HostSettings, client: BoardClient) -> int:
    """Register this node, run the attempt, and return 0 if it succeeded."""
    run = BoardRun(order["job"], order["attempt"], order["token"], "")
    registration = RunRegistration(client, RegistrationRequest(run, "", {}), print_message)
    try:
        member = await registration.join(run, node.number, node.name)
    except RunRefusedError as error:
        print_message(f"The board refused this attempt: {error}")
        return 1
    attempt = claim_attempt(settings.run_dir, build_launch_order(order, node))
    if attempt is None:
        print_message("This attempt was already started on this node.")
        return 1
    folder = get_socket_root() / f"{SOCKET_FOLDER_PREFIX}{secrets.token_hex(6)}"
    transport = HttpTransport(client, member, print_message)
    outcome = await SlurmSupervisor(attempt, settings, folder, transport, node).run()
    return 0 if outcome == "succeeded" else 1


def read_order(file: BinaryIO) -> AllocationOrder:
    """Read the order from stdin. Raises BadMessageError."""
    try:
        content = json.loads(base64.b64decode(file.read(MAX_ORDER_BYTES), validate=False))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise BadMessageError(f"cannot read the launch order on standard input: {error}") from None
    return validate_allocation_order(content)


def read_node(order: AllocationOrder) -> SlurmNode:
    """Read this node from Slurm's variables. Raises SlurmNodeError."""
    env = os.environ
    try:
        index, job, node_list = int(env["SLURM_NODEID"]), env["SLURM_JOB_ID"], env["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError) as error:
        raise SlurmNodeError(f"not started by srun: {error}") from None
    names = _expand_node_list(node_list)
    if len(names) != order["nodes"] or not 0 <= index < len(names):
        raise SlurmNodeError(
            f"the launch order is for {order['nodes']} nodes, but this is node {index} of {len(names)}"
        )
    # The address that this node uses to reach the node of srun is in the network of the other nodes.
    address = get_address_towards(f"//{env.get('SLURM_LAUNCH_NODE_IPADDR', '127.0.0.1')}:1")
    return SlurmNode(index, names, job, address, _read_gpus(order))


def build_launch_order(order: AllocationOrder, node: SlurmNode) -> LaunchOrder:
    """Build the order that a host would get."""
    slots = list(node.gpus) or list(range(order["slots"]))
    launch_order = LaunchOrder(
        v=VERSION, job=order["job"], attempt=order["attempt"], spec=order["spec"], slots=slots, expires=0.0
    )
    if "checkpoint" in order:
        launch_order["checkpoint"] = order["checkpoint"]
    if "trace" in order:
        launch_order["trace"] = order["trace"]
    if "upload" in order:
        launch_order["upload"] = order["upload"]
    if len(node.names) > 1:
        nodes = [
            GangNode(host=name, address=node.address if name == node.name else ANY_ADDRESS, ranks=len(slots))
            for name in node.names
        ]
        launch_order["gang"] = Gang(node=node.number, nodes=nodes, lease_s=order["lease_s"])
    return launch_order


def build_settings(order: AllocationOrder, node: SlurmNode) -> HostSettings:
    """Build the settings of the supervisor. Everything is in the cluster's shared folder."""
    folder = Path(order["folder"])
    return HostSettings(
        redis_url="",
        name=node.name,
        slots=order["slots"],
        device=order["spec"]["resources"]["device"],
        run_dir=folder / "runs" / node.slurm_job / node.name,
        data_root=folder / "data",
        checkpoint_root=folder / "checkpoints",
        script_root=folder / "scripts",
        trainer_module="workers.trainer",
        address=node.address,
        saves_on_term=saves_checkpoints(parse_spec(order["spec"])),
    )


def get_end_reason(slurm_job: str) -> Literal["preempted", "time limit", ""]:
    """Return why Slurm ends this job. Empty if Slurm does not report it."""
    command = ["scontrol", "show", "job", slurm_job]
    try:
        job = subprocess.run(command, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    preempted = re.search(r"\bPreemptTime=(\S+)", job)
    if preempted is not None and preempted[1] != "None":
        return "preempted"
    return "time limit" if re.search(r"\bReason=TimeLimit\b", job) else ""


def prune_shared_folder(folder: Path) -> None:
    """Remove attempts and batch output without changes for KEEP_RUNS_S. Checkpoints stay.

    The first node of an attempt does this, because no host worker runs permanently on the cluster.
    """
    oldest = time.time() - KEEP_RUNS_S
    for path in [*(folder / "runs").glob("*"), *(folder / "slurm").glob("meshboard-*.out")]:
        try:
            changed = [path.lstat().st_mtime, *(status.st_mtime for _, _, status in TreeWalk(path))]
        except OSError:
            continue  # Another node has removed the folder.
        if max(changed) <= oldest:
            discard_path(path)


def print_message(text: str) -> None:
    """Print to the batch job's output, which the board shows if an attempt could not report more."""
    print(f"meshboard: {text}", file=sys.stderr, flush=True)


def _make_client(order: AllocationOrder) -> BoardClient:
    """Make the client of the board, with the CA certificates in the order. Raises BadUrlError, OSError."""
    if not order["certificates"]:
        return BoardClient(order["board"])
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(order["certificates"])
        file.flush()
        return BoardClient(order["board"], Path(file.name))


def _expand_node_list(node_list: str) -> tuple[str, ...]:
    """Return the names in a Slurm node list such as "node[0-1]"."""
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=HOSTNAMES_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SlurmNodeError(f"scontrol cannot list the nodes of {node_list[:200]}: {error}") from None
    names = tuple(output.split())
    if invalid := [name for name in names if not re.fullmatch(HOST_NAME_PATTERN, name)]:
        raise SlurmNodeError(f"{invalid[0][:100]!r} is not a node name")
    return names


def _read_gpus(order: AllocationOrder) -> tuple[int, ...]:
    if order["spec"]["resources"]["device"] != "cuda":
        return ()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = (variable or "").split(",")
    if len(numbers) != order["slots"] or not all(number.isascii() and number.isdigit() for number in numbers):
        shown = "none" if variable is None else variable[:200]
        raise SlurmNodeError(f"the launch order is for {order['slots']} GPUs, but CUDA_VISIBLE_DEVICES is {shown}")
    return tuple(int(number) for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
