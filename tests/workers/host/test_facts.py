"""What a host tells of its machine: as the driver and Linux say it, nothing made up, and one that hangs is no death."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from redis.exceptions import RedisError

from contracts.hosts import HostFacts, HostUsage
from tests.support.patience import patient
from tests.support.processes import wait_until
from workers.host.facts import gauge as gauges
from workers.host.facts import machine, topology, use
from workers.host.facts.gauge import Gauge
from workers.host.facts.gpus import Gpus
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
    """As the real one."""


class FakeNvml:
    """Answers as NVML's Python module does, of two GPUs; the second tells neither power nor use."""

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


def test_gpus_are_told_as_their_driver_tells_them(tmp_path: Path) -> None:
    for bus, node in (("0000:1a:00.0", "1"), ("0000:1b:00.0", "-1")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(f"{node}\n")
    gpus = Gpus(FakeNvml(), tmp_path)
    first = {"model": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "uuid": "GPU-0", "numa": 1}
    assert gpus.facts() == [first, {**{k: v for k, v in first.items() if k != "numa"}, "uuid": "GPU-1"}]
    assert gpus.use() == [
        {"busy_percent": 97.0, "memory_bytes": 3 * 2**30, "celsius": 63.0, "watts": 512.345},
        {"memory_bytes": 3 * 2**30, "celsius": 63.0},
    ]
    assert gpus.versions() == {"driver": "595.71", "cuda": "13.1"}


def test_without_a_driver_nothing_is_told_of_gpus() -> None:
    gpus = Gpus(NoDriver())
    assert (len(gpus), gpus.facts(), gpus.use(), gpus.versions()) == (0, [], [], {})


def test_the_real_module_is_asked_as_the_fake_one_is() -> None:
    """Each name that the fake one has, so that a test on it says something of the real one."""
    import pynvml

    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert len(Gpus()) >= 0


def test_every_pair_of_gpus_is_told_once() -> None:
    assert [(link["a"], link["b"], link["kind"]) for link in topology.read(TOPOLOGY)] == [
        (0, 1, "NV18"),
        (0, 2, "NV18"),
        (0, 3, "SYS"),
        (1, 2, "NV18"),
        (1, 3, "NODE"),
        (2, 3, "PHB"),
    ]


@pytest.mark.parametrize("text", ["", ONE, "NVIDIA-SMI has failed because ...", "GPU0\tGPU1\nGPU0\t X \n", "\0\n\t\n"])
def test_a_table_without_pairs_has_none(text: str) -> None:
    assert topology.read(text) == []


def test_this_machine_fits_the_contract(tmp_path: Path) -> None:
    told = machine.facts(Gpus(FakeNvml(), tmp_path), topology.read(TOPOLOGY))
    assert TypeAdapter(HostFacts).validate_python(told, strict=True) == told
    assert told["cores"] >= 1
    assert told["versions"]["torch"].startswith("2.")
    assert all(nic["name"] != "lo" for nic in told["nics"])
    fares = use.use(Gpus(FakeNvml(), tmp_path), settings(tmp_path))
    assert TypeAdapter(HostUsage).validate_python(fares, strict=True) == fares
    assert {disk["use"] for disk in fares["disks"]} == {"runs", "checkpoints"}
    assert 0 < fares["memory_bytes"] < told["memory_bytes"]


def test_a_folder_that_is_not_there_yet_has_the_disk_of_the_one_above(tmp_path: Path) -> None:
    [disk] = use.disk("runs", tmp_path / "a" / "b")
    assert disk["total_bytes"] == use.disk("runs", tmp_path)[0]["total_bytes"]


def test_a_clock_is_compared_with_the_middle_of_the_question() -> None:
    def late() -> float:
        """300 s behind ours, and slow to say so."""
        time.sleep(0.1)
        told = time.time() - 300
        time.sleep(0.1)
        return told

    offset_s, took_s = use.clock_offset(late)
    assert took_s >= 0.2
    assert abs(offset_s - 300) <= took_s / 2


def test_facts_are_told_once_and_again_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> float:
        raise RedisError("away")

    looked = Gauge(settings(tmp_path), away, Gpus(NoDriver()))
    assert (looked.facts(), looked.use()) == (None, None)
    looked.look()
    told = looked.use()
    assert told is not None
    assert "clock_offset_s" not in told, "there was no clock to compare with"
    assert looked.facts() is not None
    looked.look()
    assert looked.facts() is None
    monkeypatch.setattr(gauges, "FACTS_S", -1.0)
    looked._facts_due = 0.0
    looked.look()
    assert looked.facts() is not None
    monkeypatch.setattr(gauges, "STALE_S", -1.0)
    assert looked.use() is None


def test_a_driver_that_hangs_leaves_the_host_s_heart_alone(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
            asked.set()
            go_on.wait(patient(30))
            return super().nvmlDeviceGetUtilizationRates(handle)

    looked = Gauge(settings(tmp_path), time.time, Gpus(Hanging(), tmp_path))
    looked.start()
    try:
        assert asked.wait(patient(10))
        assert (looked.facts(), looked.use()) == (None, None), "and neither of these waits for it"
    finally:
        go_on.set()
        looked.stop()
    wait_until(lambda: looked.use() is not None, "it is looked at after all", 10)


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
def test_how_a_core_computes_bf16_is_what_its_features_say(cpuinfo: str, how: str | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.core_bf16(tmp_path / "cpuinfo") == how
    assert machine.core_bf16(tmp_path / "none") is None
