"""Facts and usage of this machine (`contracts.hosts`). A value that the machine does not report is left out."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, cast

import psutil
from redis.exceptions import RedisError

from contracts.hosts import CoreBf16, DiskUsage, GpuLink, HostFacts, HostUsage, NetworkInterface, SoftwareVersions
from workers.host.hardware import Gpus, get_gpu_links
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

MAX_NICS, MAX_ADDRESSES, MAX_GPUS = 32, 8, 64
CPUINFO = Path("/proc/cpuinfo")
NUMA_NODES = Path("/sys/devices/system/node")
PACKAGES = {"torch": ("torch",), "meshboard": ("meshboard",), "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}
# oneDNN has bf16 kernels for the first set, and needs all of the second set to widen bf16 operands.
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
WIDENS_BF16 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
SAMPLE_INTERVAL_S = 5.0
FACTS_INTERVAL_S = 60.0
MAX_USAGE_AGE_S = 15.0


def get_host_facts(gpus: Gpus, links: list[GpuLink]) -> HostFacts:
    facts = HostFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        numa_nodes=max(1, len(list(NUMA_NODES.glob("node[0-9]*")))),
        gpus=gpus.get_facts()[:MAX_GPUS],
        links=[link for link in links if max(link["a"], link["b"]) < MAX_GPUS],
        nics=get_network_interfaces(),
        versions=get_package_versions(gpus),
    )
    if (support := detect_bf16_support(CPUINFO)) is not None:
        facts["bf16"] = support
    return facts


def get_boot_id() -> str:
    """Return the kernel's ID of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe_device(settings: HostSettings) -> tuple[str, int]:
    """Return the name of the device, and its memory in bytes per slot."""
    if settings.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name, _, mebibytes = lines[0].rpartition(",")
        return name.strip()[:200], int(mebibytes) * 2**20
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{platform.machine()} CPU, {os.cpu_count()} cores", total // settings.slots


def detect_bf16_support(cpuinfo: Path) -> CoreBf16 | None:
    """Return how the CPU computes in bf16, from the features of its first core."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if line is None:
        return None
    features = set(line[1].split())
    if features & NATIVE_BF16:
        return "native"
    return "widened" if features >= WIDENS_BF16 else "scalar"


def get_network_interfaces() -> list[NetworkInterface]:
    """Return the interfaces that are up and have an address that other hosts can use."""
    states, nics = psutil.net_if_stats(), []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        families = (socket.AF_INET, socket.AF_INET6)
        addresses = [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        state = states.get(name)
        if state is None or not state.isup or not addresses or name == "lo":
            continue
        nic = NetworkInterface(name=name[:200], addresses=addresses[:MAX_ADDRESSES])
        if state.speed > 0:
            nic["megabits_per_s"] = state.speed
        nics.append(nic)
    return nics[:MAX_NICS]


def get_package_versions(gpus: Gpus) -> SoftwareVersions:
    """Return the versions of installed packages, without importing the packages."""
    versions = {"python": platform.python_version()}
    for name, packages in PACKAGES.items():
        for package in packages:
            try:
                versions[name] = version(package)[:200]
                break
            except PackageNotFoundError:
                continue
    return cast(SoftwareVersions, versions | gpus.get_versions())


def measure_usage(gpus: Gpus, settings: HostSettings) -> HostUsage:
    """Return the usage of this machine, without the clock offset. CPU usage is measured since the previous call."""
    memory = psutil.virtual_memory()
    usage = HostUsage(
        load=os.getloadavg()[0],
        memory_bytes=memory.total - memory.available,
        gpus=gpus.get_usage()[:MAX_GPUS],
        disks=[*get_disk_usage("runs", settings.run_dir), *get_disk_usage("checkpoints", settings.checkpoint_root)],
    )
    if (busy := psutil.cpu_percent(None)) > 0:
        usage["busy_percent"] = busy
    return usage


def get_disk_usage(kind: Literal["runs", "checkpoints"], folder: Path) -> list[DiskUsage]:
    """Return the disk of a folder, or of its nearest existing parent. Empty if the disk cannot be read."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return []
    return [DiskUsage(use=kind, path=str(folder)[:200], free_bytes=usage.free, total_bytes=usage.total)]


def measure_clock_offset(get_time: Callable[[], float]) -> tuple[float, float]:
    """Return the offset of this host's clock, and the round trip in seconds. The error is at most half a round trip."""
    local, began = time.time(), time.monotonic()
    remote = get_time()
    round_trip_s = time.monotonic() - began
    return local + round_trip_s / 2 - remote, round_trip_s


class HostSampler:
    """Measure the machine in a separate thread, because a driver can hang and must not stop heartbeats.

    Args:
        get_time: returns the time of the clock that all hosts share. Raises RedisError.
        limits: the limits of each job, which are part of the facts.
    """

    def __init__(
        self, settings: HostSettings, get_time: Callable[[], float], gpus: Gpus | None = None, limits: str = ""
    ) -> None:
        self._settings, self._get_time, self._limits = settings, get_time, limits
        self._gpus = gpus
        self._links: list[GpuLink] | None = None
        self._new_facts: HostFacts | None = None
        self._facts_due = 0.0
        self._usage: tuple[float, HostUsage] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-gauge", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop, without waiting for it, because a measurement can hang."""
        self._stopped.set()

    def take_facts(self) -> HostFacts | None:
        """Return the facts measured since the previous call."""
        facts, self._new_facts = self._new_facts, None
        return facts

    def get_usage(self) -> HostUsage | None:
        """Return the last usage, or None if it is older than MAX_USAGE_AGE_S."""
        if self._usage is None or time.monotonic() - self._usage[0] > MAX_USAGE_AGE_S:
            return None
        return self._usage[1]

    def sample(self) -> None:
        gpus = self._gpus = self._gpus if self._gpus is not None else Gpus()
        usage = measure_usage(gpus, self._settings)
        try:
            usage["clock_offset_s"], usage["round_trip_s"] = measure_clock_offset(self._get_time)
        except RedisError:
            log.debug("cannot compare the clock of this host with Redis")
        self._usage = (time.monotonic(), usage)
        if time.monotonic() >= self._facts_due:
            if self._links is None:
                self._links = get_gpu_links() if len(gpus) > 1 else []
            facts = get_host_facts(gpus, self._links)
            if self._limits:
                facts["limits"] = self._limits
            self._new_facts = facts
            self._facts_due = time.monotonic() + FACTS_INTERVAL_S

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.sample()
            except Exception:
                log.exception("cannot measure the machine")
            self._stopped.wait(SAMPLE_INTERVAL_S)
