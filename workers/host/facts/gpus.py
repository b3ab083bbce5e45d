"""NVIDIA GPUs as their driver tells of them, by NVML; none where there is no driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from contracts.hosts import GpuFacts, GpuUsage

log = logging.getLogger(__name__)

T = TypeVar("T")
PCI_DEVICES = Path("/sys/bus/pci/devices")
CUDA_VERSION_UNIT = 1000  # 12040 is 12.4


class Gpus:
    """The GPUs of this machine in NVML's order, that of the bus. `nvml`: the module, or one that is like it."""

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

    def facts(self) -> list[GpuFacts]:
        return [self._facts_of(handle) for handle in self._handles]

    def use(self) -> list[GpuUsage]:
        return [self._use_of(handle) for handle in self._handles]

    def clocks(self) -> list[float | None]:
        """MHz of the processors, None of one that does not tell."""
        nvml = self._nvml

        def asked(handle: Any) -> float | None:
            return self._asked(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))

        return [asked(handle) for handle in self._handles]

    def versions(self) -> dict[str, str]:
        """Of the driver, and the newest CUDA that it takes."""
        if not self._handles:
            return {}
        told: dict[str, str] = {}
        if (driver := self._asked(self._nvml.nvmlSystemGetDriverVersion)) is not None:
            told["driver"] = _text(driver)
        if (cuda := self._asked(self._nvml.nvmlSystemGetCudaDriverVersion)) is not None:
            told["cuda"] = f"{cuda // CUDA_VERSION_UNIT}.{cuda % CUDA_VERSION_UNIT // 10}"
        return told

    def _facts_of(self, handle: Any) -> GpuFacts:
        memory = self._asked(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        facts = GpuFacts(
            model=_text(self._asked(lambda: self._nvml.nvmlDeviceGetName(handle)) or "unknown"),
            memory_bytes=int(memory or 0),
            uuid=_text(self._asked(lambda: self._nvml.nvmlDeviceGetUUID(handle)) or ""),
        )
        bus = self._asked(lambda: _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
        node = None if bus is None else self._numa_node(bus)
        if node is not None:
            facts["numa"] = node
        return facts

    def _use_of(self, handle: Any) -> GpuUsage:
        """What this GPU tells; some tell no power, and some no use."""
        nvml, use = self._nvml, GpuUsage()
        if (busy := self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)) is not None:
            use["busy_percent"] = float(busy)
        if (memory := self._asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)) is not None:
            use["memory_bytes"] = int(memory)
        if (
            celsius := self._asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ) is not None:
            use["celsius"] = float(celsius)
        if (milliwatts := self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))) is not None:
            use["watts"] = milliwatts / 1000
        return use

    def _numa_node(self, bus: str) -> int | None:
        """Linux says -1 where there is one node only."""
        with contextlib.suppress(OSError, ValueError):
            node = int((self._pci_devices / _as_linux_writes(bus) / "numa_node").read_text())
            return node if node >= 0 else None
        return None

    def _asked(self, ask: Callable[[], T]) -> T | None:
        with contextlib.suppress(self._nvml.NVMLError):
            return ask()
        return None


def _as_linux_writes(bus: str) -> str:
    """NVML's domain has 8 digits, that of a folder in /sys 4."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(told: str | bytes) -> str:
    text = told.decode(errors="replace") if isinstance(told, bytes) else told
    return text.replace("\0", "")[:200]
