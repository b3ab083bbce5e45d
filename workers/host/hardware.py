"""GPUs and network addresses of this machine.

GPUs are read from NVML and `nvidia-smi topo -m`. Host names are never resolved, because they can resolve to anything.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import pynvml

from contracts.hosts import GpuFacts, GpuLink, GpuUsage

log = logging.getLogger(__name__)

T = TypeVar("T")
PCI_DEVICES = Path("/sys/bus/pci/devices")
CUDA_VERSION_UNIT = 1000  # NVML reports CUDA 12.4 as 12040
TOPOLOGY_TIMEOUT_S = 30.0
COLORS = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU(\d+)")
LINK_KIND = re.compile(r"[A-Z0-9]{1,8}")
LOOPBACK = "127.0.0.1"
REDIS_PORT = 6379


class Gpus:
    """GPUs in NVML's order, which is the order of the PCI bus. Empty if the machine has no driver.

    Args:
        nvml: the pynvml module, or a replacement for tests.
    """

    def __init__(self, nvml: Any = pynvml, pci_devices: Path = PCI_DEVICES) -> None:
        self._nvml, self._pci_devices = nvml, pci_devices
        self._handles: list[Any] = []
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            log.debug("no GPU: %s", error)

    def __len__(self) -> int:
        return len(self._handles)

    def get_facts(self) -> list[GpuFacts]:
        return [self._get_facts(handle) for handle in self._handles]

    def get_usage(self) -> list[GpuUsage]:
        return [self._get_usage(handle) for handle in self._handles]

    def get_clocks_mhz(self) -> list[float | None]:
        """Return the SM clock of each GPU, or None if NVML does not report it."""
        nvml = self._nvml

        def get_clock(handle: Any) -> float | None:
            return self._query(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))

        return [get_clock(handle) for handle in self._handles]

    def find_slot_problem(self, gpu: int, shared_bytes: int) -> str:
        """Return why a rank cannot use an idle GPU at full speed, or an empty text. Unknown values are no problem.

        Args:
            shared_bytes: Memory that another program may use.
        """
        nvml, handle = self._nvml, self._handles[gpu]
        for process in self._query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ():
            if (used_bytes := process.usedGpuMemory or 0) >= shared_bytes:
                return f"Process {process.pid} of another program uses {used_bytes:,} bytes of GPU {gpu}."
        reasons = self._query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        if reasons & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
            return f"GPU {gpu} lowers its clock, because it is too hot."
        if reasons & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown:
            return f"GPU {gpu} lowers its clock, because its power supply requests it."
        return ""

    def get_versions(self) -> dict[str, str]:
        """Return the version of the driver and the newest CUDA version that it supports."""
        if not self._handles:
            return {}
        versions: dict[str, str] = {}
        if (driver := self._query(self._nvml.nvmlSystemGetDriverVersion)) is not None:
            versions["driver"] = _to_text(driver)
        if (cuda := self._query(self._nvml.nvmlSystemGetCudaDriverVersion)) is not None:
            versions["cuda"] = f"{cuda // CUDA_VERSION_UNIT}.{cuda % CUDA_VERSION_UNIT // 10}"
        return versions

    def _get_facts(self, handle: Any) -> GpuFacts:
        nvml = self._nvml
        facts = GpuFacts(
            model=_to_text(self._query(lambda: nvml.nvmlDeviceGetName(handle)) or "unknown"),
            memory_bytes=int(self._query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) or 0),
            uuid=_to_text(self._query(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
        )
        bus = self._query(lambda: _to_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        node = None if bus is None else self._get_numa_node(bus)
        if node is not None:
            facts["numa"] = node
        return facts

    def _get_usage(self, handle: Any) -> GpuUsage:
        """Return the usage values that this GPU reports. Some GPUs report no power or utilization."""
        nvml, usage = self._nvml, GpuUsage()
        if (busy := self._query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)) is not None:
            usage["busy_percent"] = float(busy)
        if (memory := self._query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)) is not None:
            usage["memory_bytes"] = int(memory)
        celsius = self._query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        if celsius is not None:
            usage["celsius"] = float(celsius)
        if (milliwatts := self._query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))) is not None:
            usage["watts"] = milliwatts / 1000
        return usage

    def _get_numa_node(self, bus: str) -> int | None:
        domain, _, rest = bus.lower().partition(":")
        with contextlib.suppress(OSError, ValueError):
            # NVML writes the PCI domain with 8 digits, and /sys with 4.
            node = int((self._pci_devices / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
            return node if node >= 0 else None  # -1 on a machine with one node
        return None

    def _query(self, query: Callable[[], T]) -> T | None:
        with contextlib.suppress(self._nvml.NVMLError):
            return query()
        return None


def get_gpu_links() -> list[GpuLink]:
    """Return the link of each pair of GPUs, or nothing if `nvidia-smi` is missing or fails."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TOPOLOGY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no topology: %s", error)
        return []
    return parse_topology(result.stdout)


def parse_topology(table: str) -> list[GpuLink]:
    """Return each pair of GPUs once. The first line names the columns, and each row begins with its name."""
    lines = [words for line in table.splitlines() if (words := COLORS.sub("", line).split())]
    header = lines[0] if lines else []
    columns = [(index, int(name[3:])) for index, name in enumerate(header) if GPU.fullmatch(name)]
    links = []
    for words in lines:
        row = GPU.fullmatch(words[0])
        if words is header or row is None:
            continue
        for index, b in columns:
            a, kind = int(row[1]), words[index + 1] if index + 1 < len(words) else ""
            if a < b and LINK_KIND.fullmatch(kind):
                links.append(GpuLink(a=a, b=b, kind=kind))
    return links


def _to_text(value: str | bytes) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text.replace("\0", "")[:200]


def get_address_towards(url: str) -> str:
    """Return the address that this host uses to reach a server, or loopback if the server has no route."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:  # a unix socket
            return LOOPBACK
        port = parts.port or REDIS_PORT
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # selects a route and sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK


def open_listener(address: str) -> socket.socket:
    """Listen on a port that the kernel chooses. Raises OSError if no interface has the address."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(address in (entry.address, entry.address.partition("%")[0]) for entry in entries):
            return name
    return None
