"""Which node of the allocation this is, and what its supervisor does with it."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from contracts.codec import BadMessageError, validate_allocation_order
from contracts.control import VERSION, AllocationOrder, Gang, LaunchOrder
from contracts.control import Node as GangNode
from contracts.fields import HOST_NAME_PATTERN
from planner.facts.kinds import saves_checkpoints
from planner.facts.parse_spec import parse_spec
from workers.host.address import address_towards
from workers.host.settings import HostSettings

ORDER_BYTES = 16 * 2**20
NAMES_S = 20.0  # for scontrol, which asks nobody
ASK_S = 10.0  # for one that asks slurmctld
ANYWHERE = "0.0.0.0"  # noqa: S104  # of the other nodes: each says its own address when it is ready


class NoNodeError(RuntimeError):
    """What Slurm says of this node makes no sense."""


class Node(NamedTuple):
    """`place` among `names`, the allocation's nodes in order; `gpus` as Slurm numbers those it gave."""

    place: int
    names: tuple[str, ...]
    slurm_job: str
    address: str
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[self.place]


def read_order(file: BinaryIO) -> AllocationOrder:
    """Raises BadMessageError."""
    try:
        told = json.loads(base64.b64decode(file.read(ORDER_BYTES), validate=False))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise BadMessageError(f"cannot read the launch order on standard input: {error}") from None
    return validate_allocation_order(told)


def this_node(order: AllocationOrder) -> Node:
    """
    Raises:
        NoNodeError: Slurm's variables are not there, or say something else than was ordered.
    """
    env = os.environ
    try:
        place, job, listed = int(env["SLURM_NODEID"]), env["SLURM_JOB_ID"], env["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError) as error:
        raise NoNodeError(f"not started by srun: {error}") from None
    names = _names(listed)
    if len(names) != order["nodes"] or not 0 <= place < len(names):
        raise NoNodeError(f"the launch order is for {order['nodes']} nodes, but this is node {place} of {len(names)}")
    # The node that srun was started on, as the others reach it: our end of the way to it is in the same network.
    address = address_towards(f"//{env.get('SLURM_LAUNCH_NODE_IPADDR', '127.0.0.1')}:1")
    return Node(place, names, job, address, _gpus(order))


def launch_order(order: AllocationOrder, node: Node) -> LaunchOrder:
    """The order as a host of ours would get it."""
    slots = list(node.gpus) or list(range(order["slots"]))
    told = LaunchOrder(
        v=VERSION, job=order["job"], attempt=order["attempt"], spec=order["spec"], slots=slots, expires=0.0
    )
    if "checkpoint" in order:
        told["checkpoint"] = order["checkpoint"]
    if len(node.names) > 1:
        nodes = [
            GangNode(host=name, address=node.address if name == node.name else ANYWHERE, ranks=len(slots))
            for name in node.names
        ]
        told["gang"] = Gang(node=node.place, nodes=nodes, lease_s=order["lease_s"])
    return told


def settings_of(order: AllocationOrder, node: Node) -> HostSettings:
    """All that a job keeps lies in the cluster's shared folder; each try of Slurm's has its own for what it writes."""
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


def why_ended(slurm_job: str) -> Literal["preempted", "time limit", ""]:
    """What Slurm ends this job for; empty where it does not say."""
    argv = ["scontrol", "show", "job", slurm_job]
    try:
        said = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    preempted = re.search(r"\bPreemptTime=(\S+)", said)
    if preempted is not None and preempted[1] != "None":
        return "preempted"
    return "time limit" if re.search(r"\bReason=TimeLimit\b", said) else ""


def _names(listed: str) -> tuple[str, ...]:
    """ "node[0-1]" as names."""
    argv = ["scontrol", "show", "hostnames", listed]
    try:
        said = subprocess.run(argv, capture_output=True, text=True, timeout=NAMES_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNodeError(f"scontrol cannot list the nodes of {listed[:200]}: {error}") from None
    names = tuple(said.split())
    if wrong := [name for name in names if not re.fullmatch(HOST_NAME_PATTERN, name)]:
        raise NoNodeError(f"{wrong[0][:100]!r} is not a node name")
    return names


def _gpus(order: AllocationOrder) -> tuple[int, ...]:
    if order["spec"]["resources"]["device"] != "cuda":
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(given) != order["slots"] or not all(gpu.isascii() and gpu.isdigit() for gpu in given):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "none")[:200]
        raise NoNodeError(f"the launch order is for {order['slots']} GPUs, but CUDA_VISIBLE_DEVICES is {shown}")
    return tuple(int(gpu) for gpu in given)
