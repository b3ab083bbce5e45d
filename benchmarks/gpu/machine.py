"""What this machine is: its devices, and which of the planner's clusters they are."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from planner.hardware.cluster import Cluster
from planner.hardware.clusters import CLUSTERS, is_another

ROOT = Path(__file__).resolve().parents[2]
CPU_RANKS = 2
FULL_GIB = {"a100": 60, "v100": 24, "h100": 90}  # of two memory sizes of one name, the larger begins here
# Words of `torch.cuda.get_device_name`, the most telling first: the cluster, and that of its larger memory.
NAMES = (
    ("GB300", "gb300", "gb300"),
    ("GB200", "gb200", "gb200"),
    ("GH200", "gh200", "gh200"),
    ("B300", "b300", "b300"),
    ("B200", "b200", "b200"),
    ("H200", "h200", "h200"),
    ("A100", "a100-40gb", "a100-80gb"),
    ("V100", "v100-16gb", "v100-32gb"),
    ("MI300X", "mi300x", "mi300x"),
)


class Fingerprint(TypedDict):
    """What a result holds for: a result of another is not kept."""

    torch: str
    device: str
    count: int
    commit: str
    small: bool


class Machine(NamedTuple):
    """`ranks` processes, one a device. `cluster` is None for an accelerator that the planner does not know."""

    device: str
    name: str
    ranks: int
    memory_bytes: int
    cluster: Cluster | None

    def fingerprint(self, *, small: bool) -> Fingerprint:
        return Fingerprint(torch=torch.__version__, device=self.name, count=self.ranks, commit=commit(), small=small)


def this_machine() -> Machine:
    """Its GPUs, which are taken to be alike; CPU ranks where there are none."""
    if not torch.cuda.is_available():
        return Machine("cpu", "CPU", CPU_RANKS, 0, CLUSTERS["cpu"])
    found = torch.cuda.get_device_properties(0)
    key = cluster_of(found.name, found.total_memory)
    return Machine(
        "cuda", found.name, torch.cuda.device_count(), found.total_memory, CLUSTERS[key] if key is not None else None
    )


def cluster_of(name: str, memory_bytes: int) -> str | None:
    """The cluster whose accelerator has this name and so much memory."""
    upper, gib = name.upper(), memory_bytes / 2**30
    if is_another(name):
        return None
    if "H100" in upper:
        return "h100" if gib < FULL_GIB["h100"] else "h100-500w"
    for word, key, larger in NAMES:
        if word in upper:
            return larger if gib > FULL_GIB.get(word.lower(), 0) else key
    return None


def commit() -> str:
    """The commit that runs, with a sum of what was changed since; "unknown" without git."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("diff", "HEAD", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
