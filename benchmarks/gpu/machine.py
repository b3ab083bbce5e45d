"""Detect the devices of this machine, and find its cluster in the planner."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist

from planner.hardware.catalog import CLUSTERS, is_other_variant, use_card_links
from planner.hardware.cluster import Cluster
from workers.host.hardware import Gpus

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("benchmarks/gpu", "contracts", "planner", "workers", "tests/parity")  # sources of the measured code
CPU_RANKS = 2
IDLE_BYTES = 2 * 2**30  # of a GPU: a driver's own, and a context
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
    """Machine and code for which a result is valid."""

    torch: str
    device: str
    count: int
    commit: str
    small: bool


class Machine(NamedTuple):
    """A machine with one rank per device. `cluster` is None for an accelerator that the planner does not know."""

    device: str
    name: str
    ranks: int
    memory_bytes: int
    cluster: Cluster | None

    def fingerprint(self, *, small: bool) -> Fingerprint:
        return Fingerprint(
            torch=torch.__version__, device=self.name, count=self.ranks, commit=describe_commit(), small=small
        )


def detect_machine() -> Machine:
    """Return the GPUs, which are assumed to be equal, or CPU ranks if there are none."""
    if not torch.cuda.is_available():
        return Machine("cpu", "CPU", CPU_RANKS, 0, CLUSTERS["cpu"])
    found = torch.cuda.get_device_properties(0)
    key = find_cluster(found.name, found.total_memory)
    cluster = use_card_links(CLUSTERS[key], found.name) if key is not None else None
    return Machine("cuda", found.name, torch.cuda.device_count(), found.total_memory, cluster)


def find_gpu_problem() -> str:
    """Return the reason why torch has no GPU or no NCCL, or an empty text."""
    built, here = torch.version.cuda or torch.version.hip, f"torch {torch.__version__}"
    if built is None:
        return f"{here} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"{here}, built for {built}, sees no GPU: no driver, one too old for it, or all are hidden (nvidia-smi)"
    return "" if dist.is_nccl_available() else f"{here} is a build without NCCL"


def list_busy_gpus(gpus: Gpus) -> Iterator[str]:
    """Yield a note for each GPU whose memory other programs use before a part starts."""
    for number, use in enumerate(gpus.get_usage()):
        if (held := use.get("memory_bytes", 0)) > IDLE_BYTES:
            yield f"GPU {number} already held {held / 2**30:.1f} GiB, so another program possibly ran at the same time"


def find_cluster(name: str, memory_bytes: int) -> str | None:
    """Return the cluster whose accelerator has this name and memory."""
    upper, gib = name.upper(), memory_bytes / 2**30
    if is_other_variant(name):
        return None
    if "H100" in upper:
        return "h100" if gib < FULL_GIB["h100"] else "h100-500w"
    for word, key, larger in NAMES:
        if word in upper:
            return larger if gib > FULL_GIB.get(word.lower(), 0) else key
    return None


def describe_commit() -> str:
    """Return the commit with a hash of uncommitted changes, or a hash of the sources without git."""
    try:
        found = _describe_git_commit("rev-parse", "--short=12", "HEAD")
        changed = _describe_git_commit("diff", "HEAD", "--", ".", ":!docs")
        added = _describe_git_commit(
            "ls-files", "--others", "--exclude-standard", "--", *(f"{room}/*.py" for room in SOURCES)
        )
    except (OSError, subprocess.CalledProcessError):
        return f"unknown+{_hash_sources(ROOT)}"
    changed += "".join(f"{path} {(ROOT / path).read_text()}" for path in added.splitlines())
    return f"{found}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else found


def _hash_sources(root: Path) -> str:
    files = sorted(path for room in SOURCES for path in (root / room).rglob("*.py"))
    result = "".join(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files)
    return hashlib.sha256(result.encode()).hexdigest()[:8]


def _describe_git_commit(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
