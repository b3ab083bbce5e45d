"""Facts and usage of a machine, from NVML and Linux."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from redis.exceptions import RedisError

from contracts.hosts import HostFacts, HostUsage
from tests.support.processes import scale_timeout, wait_until
from workers.host import hardware as gpu_module
from workers.host import machine
from workers.host.hardware import Gpus
from workers.host.machine import HostSampler
from workers.host.settings import HostSettings

# As `nvidia-smi topo -m` prints it on a machine of four H100s and two NICs, colours included.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tSYS\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tNODE\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tPHB\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tSYS\tNODE\tPHB\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
ONE = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n"


class NVMLError(Exception):
    """The error class of pynvml."""


class FakeNvml:
    """A replacement of pynvml with two GPUs. The second reports neither power nor utilization."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    class _Memory:
        total, used = 80 * 2**30, 3 * 2**30

    class _Rates:
        gpu, memory = 97, 41

    class _Pci:
        def __init__(self, index: int) -> None:
            self.busId = f"00000000:{0x1A + index:02X}:00.0".encode()

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "595.71"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return self._Memory

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return self._Pci(handle)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise NVMLError("Not Supported")
        return self._Rates

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 63

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise NVMLError("Not Supported")
        return 512_345


class NoDriver(FakeNvml):
    def nvmlInit(self) -> None:
        raise NVMLError("NVML Shared Library Not Found")


def settings(folder: Path) -> HostSettings:
    return HostSettings("redis://127.0.0.1:1/0", "testhost", 4, "cpu", folder, folder, folder, folder, "x")


def test_reports_gpus_as_nvml_does(tmp_path: Path) -> None:
    for bus, node in (("0000:1a:00.0", "1"), ("0000:1b:00.0", "-1")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(f"{node}\n")
    gpus = Gpus(FakeNvml(), tmp_path)
    first = {"model": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "uuid": "GPU-0", "numa": 1}
    assert gpus.get_facts() == [first, {**{k: v for k, v in first.items() if k != "numa"}, "uuid": "GPU-1"}]
    assert gpus.get_usage() == [
        {"busy_percent": 97.0, "memory_bytes": 3 * 2**30, "celsius": 63.0, "watts": 512.345},
        {"memory_bytes": 3 * 2**30, "celsius": 63.0},
    ]
    assert gpus.get_versions() == {"driver": "595.71", "cuda": "13.1"}


def test_reports_no_gpus_without_a_driver() -> None:
    gpus = Gpus(NoDriver())
    assert (len(gpus), gpus.get_facts(), gpus.get_usage(), gpus.get_versions()) == (0, [], [], {})


def test_fake_nvml_has_only_names_of_the_real_module() -> None:
    """Check each name of the fake module in pynvml."""
    import pynvml

    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert len(Gpus()) >= 0


def test_parses_each_pair_of_gpus_once() -> None:
    assert [(link["a"], link["b"], link["kind"]) for link in gpu_module.parse_topology(TOPOLOGY)] == [
        (0, 1, "NV18"),
        (0, 2, "NV18"),
        (0, 3, "SYS"),
        (1, 2, "NV18"),
        (1, 3, "NODE"),
        (2, 3, "PHB"),
    ]


@pytest.mark.parametrize("text", ["", ONE, "NVIDIA-SMI has failed because ...", "GPU0\tGPU1\nGPU0\t X \n", "\0\n\t\n"])
def test_topology_without_pairs_is_empty(text: str) -> None:
    assert gpu_module.parse_topology(text) == []


def test_facts_and_usage_of_this_machine_are_valid(tmp_path: Path) -> None:
    result = machine.get_host_facts(Gpus(FakeNvml(), tmp_path), gpu_module.parse_topology(TOPOLOGY))
    assert TypeAdapter(HostFacts).validate_python(result, strict=True) == result
    assert result["cores"] >= 1
    assert result["versions"]["torch"].startswith("2.")
    assert all(nic["name"] != "lo" for nic in result["nics"])
    fares = machine.measure_usage(Gpus(FakeNvml(), tmp_path), settings(tmp_path))
    assert TypeAdapter(HostUsage).validate_python(fares, strict=True) == fares
    assert {disk["use"] for disk in fares["disks"]} == {"runs", "checkpoints"}
    assert 0 < fares["memory_bytes"] < result["memory_bytes"]


def test_missing_folder_has_the_disk_of_its_parent(tmp_path: Path) -> None:
    [disk] = machine.get_disk_usage("runs", tmp_path / "a" / "b")
    assert disk["total_bytes"] == machine.get_disk_usage("runs", tmp_path)[0]["total_bytes"]


def test_clock_offset_uses_the_middle_of_the_round_trip() -> None:
    def late() -> float:
        """Return a time 300 s behind, after a delay."""
        time.sleep(0.1)
        result = time.time() - 300
        time.sleep(0.1)
        return result

    offset_s, took_s = machine.measure_clock_offset(late)
    assert took_s >= 0.2
    assert abs(offset_s - 300) <= took_s / 2


def test_returns_facts_once_until_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> float:
        raise RedisError("away")

    looked = HostSampler(settings(tmp_path), away, Gpus(NoDriver()))
    assert (looked.take_facts(), looked.get_usage()) == (None, None)
    looked.sample()
    result = looked.get_usage()
    assert result is not None
    assert "clock_offset_s" not in result, "there was no clock to compare with"
    assert looked.take_facts() is not None
    looked.sample()
    assert looked.take_facts() is None
    monkeypatch.setattr(machine, "FACTS_INTERVAL_S", -1.0)
    looked._facts_due = 0.0
    looked.sample()
    assert looked.take_facts() is not None
    monkeypatch.setattr(machine, "MAX_USAGE_AGE_S", -1.0)
    assert looked.get_usage() is None


def test_hanging_driver_does_not_block_heartbeats(tmp_path: Path) -> None:
    request, go_on = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
            request.set()
            go_on.wait(scale_timeout(30))
            return super().nvmlDeviceGetUtilizationRates(handle)

    looked = HostSampler(settings(tmp_path), time.time, Gpus(Hanging(), tmp_path))
    looked.start()
    try:
        assert request.wait(scale_timeout(10))
        assert (looked.take_facts(), looked.get_usage()) == (None, None), "and neither of these waits for it"
    finally:
        go_on.set()
        looked.stop()
    wait_until(lambda: looked.get_usage() is not None, "it is looked at after all", 10)


@pytest.mark.parametrize(
    ("cpuinfo", "how"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n", "scalar"),
        ("flags\t\t: avx2 avx512f avx512dq avx512bw avx512vl\n", "widened"),
        ("flags\t\t: avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 amx_bf16\n", "native"),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", "native"),
        ("Features\t: fp asimd asimdhp\n", "scalar"),
        ("processor\t: 0\n", None),
    ],
)
def test_detects_bf16_support_from_cpu_features(cpuinfo: str, how: str | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.detect_bf16_support(tmp_path / "cpuinfo") == how
    assert machine.detect_bf16_support(tmp_path / "none") is None
