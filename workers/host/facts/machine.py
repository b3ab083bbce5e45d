"""What a machine is: cores, memory, GPUs and how they are wired, interfaces, versions."""

from __future__ import annotations

import os
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import psutil

from contracts.hosts import CoreBf16, GpuLink, HostFacts, NetworkInterface, SoftwareVersions
from workers.host.facts.gpus import Gpus

MOST_NICS, MOST_ADDRESSES, MOST_GPUS = 32, 8, 64
CPUINFO = Path("/proc/cpuinfo")
NUMA_NODES = Path("/sys/devices/system/node")
PACKAGES = {"torch": ("torch",), "meshboard": ("meshboard",), "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}


# Of oneDNN: what it has bf16 kernels for, and what it needs to widen their operands.
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
WIDENS_BF16 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def facts(gpus: Gpus, links: list[GpuLink]) -> HostFacts:
    found = HostFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        numa_nodes=max(1, len(list(NUMA_NODES.glob("node[0-9]*")))),
        gpus=gpus.facts()[:MOST_GPUS],
        links=[link for link in links if max(link["a"], link["b"]) < MOST_GPUS],
        nics=nics(),
        versions=versions(gpus),
    )
    if (how := core_bf16(CPUINFO)) is not None:
        found["bf16"] = how
    return found


def core_bf16(cpuinfo: Path) -> CoreBf16 | None:
    """By the features that the first core tells; None where it tells none."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    told = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if told is None:
        return None
    features = set(told[1].split())
    if features & NATIVE_BF16:
        return "native"
    return "widened" if features >= WIDENS_BF16 else "scalar"


def nics() -> list[NetworkInterface]:
    """Those that are up and have an address others could use."""
    states, found = psutil.net_if_stats(), []
    for name, told in sorted(psutil.net_if_addrs().items()):
        addresses = [
            address.address.partition("%")[0] for address in told if address.family in (socket.AF_INET, socket.AF_INET6)
        ]
        state = states.get(name)
        if state is None or not state.isup or not addresses or name == "lo":
            continue
        nic = NetworkInterface(name=name[:200], addresses=addresses[:MOST_ADDRESSES])
        if state.speed > 0:
            nic["megabits_per_s"] = state.speed
        found.append(nic)
    return found[:MOST_NICS]


def versions(gpus: Gpus) -> SoftwareVersions:
    """Of packages as they are installed: nothing is imported for it."""
    told = {"python": platform.python_version()}
    for name, packages in PACKAGES.items():
        if (known := _installed(packages)) is not None:
            told[name] = known[:200]
    return cast(SoftwareVersions, told | gpus.versions())


def _installed(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
