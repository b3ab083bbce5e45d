"""List accelerators and clusters with figures of vendor data sheets.

Peaks are dense, units are decimal, and links are in one direction.
"""

from __future__ import annotations

import re

from planner.hardware.cluster import Accelerator, Cluster, Link

GB = 10**9
GIB = 2**30
TERA = 1e12

_CONTEXT = 2 * GIB  # Estimate for CUDA context, cuBLAS workspace, and NCCL buffers.

# Total capacity in torch's out-of-memory errors. The driver and error correction reduce the data sheet's figure. It is
# higher if the data sheet counts 10^9 bytes.
_A100_40, _A100_80, _H100 = round(39.5 * GIB), round(79.15 * GIB), round(79.1 * GIB)
_H200, _B200 = round(139.8 * GIB), round(178.35 * GIB)

# Resident memory before a model is built: interpreter, torch, and its libraries (torch 2.13).
_CPU_PROCESS = 310 * 2**20
# Fraction of fp32's rate, from matmuls of 256 to 1,024 with casts of both operands (torch 2.13, AVX-512).
_CPU_FP8 = 0.25
_CPU_FRAGMENTATION = 0.13  # glibc's heap does not return small blocks at once.

_HOPPER = 0.72  # Power limits a large matmul to about 720 of 989 TFLOP/s.
_BLACKWELL = 0.54  # Power limits a large matmul to about 1,300 of 2,400 TFLOP/s.
# Attention on Blackwell. Blackwell Ultra computes exponentials at twice the rate, and cuDNN takes 0.90 of the time
# there (planner/hardware/kernel_time.py).
_FUSED = 0.375
_ULTRA_FUSED = _FUSED / 0.9

ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator(
            name="A100 40GB",
            memory_bytes=_A100_40,
            fp32_flops=19.5 * TERA,
            bf16_flops=312 * TERA,
            bytes_per_s=1.555 * TERA,
            num_sms=108,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="A100 80GB",
            memory_bytes=_A100_80,
            fp32_flops=19.5 * TERA,
            bf16_flops=312 * TERA,
            bytes_per_s=2.039 * TERA,
            num_sms=108,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="H100 SXM",
            memory_bytes=_H100,
            fp32_flops=67 * TERA,
            bf16_flops=989.4 * TERA,
            fp8_flops=1978.9 * TERA,
            bytes_per_s=3.35 * TERA,
            num_sms=132,
            gemm_efficiency=_HOPPER,
            fp8_efficiency=0.71,
            attention_efficiency=0.335,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="H200 SXM",
            memory_bytes=_H200,
            fp32_flops=67 * TERA,
            bf16_flops=989.4 * TERA,
            fp8_flops=1978.9 * TERA,
            bytes_per_s=4.8 * TERA,
            num_sms=132,
            gemm_efficiency=_HOPPER,
            fp8_efficiency=0.71,
            attention_efficiency=0.335,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="B200 SXM",
            memory_bytes=_B200,
            fp32_flops=75 * TERA,
            bf16_flops=2250 * TERA,
            fp8_flops=4500 * TERA,
            fp4_flops=9000 * TERA,
            bytes_per_s=7.7 * TERA,
            num_sms=148,
            gemm_efficiency=_BLACKWELL,
            fp8_efficiency=0.67,
            attention_efficiency=_FUSED,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="B300 SXM",
            memory_bytes=270 * GB,
            fp32_flops=75 * TERA,
            bf16_flops=2250 * TERA,
            fp8_flops=4500 * TERA,
            fp4_flops=13500 * TERA,
            bytes_per_s=7.7 * TERA,
            num_sms=148,
            gemm_efficiency=_BLACKWELL,
            fp8_efficiency=0.67,
            attention_efficiency=_ULTRA_FUSED,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="GB200",
            memory_bytes=186 * GB,
            fp32_flops=80 * TERA,
            bf16_flops=2500 * TERA,
            fp8_flops=5000 * TERA,
            fp4_flops=10000 * TERA,
            bytes_per_s=8 * TERA,
            host_bytes_per_s=450 * GB,
            num_sms=152,
            gemm_efficiency=_BLACKWELL,
            fp8_efficiency=0.67,
            attention_efficiency=_FUSED,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="GB300",
            memory_bytes=278 * GB,
            fp32_flops=80 * TERA,
            bf16_flops=2500 * TERA,
            fp8_flops=5000 * TERA,
            fp4_flops=15000 * TERA,
            bytes_per_s=8 * TERA,
            host_bytes_per_s=450 * GB,
            num_sms=152,
            gemm_efficiency=_BLACKWELL,
            fp8_efficiency=0.67,
            attention_efficiency=_ULTRA_FUSED,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="H100 96GB, 500 W",
            memory_bytes=95 * GIB,
            fp32_flops=67 * TERA,
            bf16_flops=989.4 * TERA,
            fp8_flops=1978.9 * TERA,
            bytes_per_s=2.4 * TERA,
            num_sms=132,
            gemm_efficiency=0.49,
            fp8_efficiency=0.48,
            attention_efficiency=0.23,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="GH200",
            memory_bytes=96 * GB,
            fp32_flops=67 * TERA,
            bf16_flops=989.4 * TERA,
            fp8_flops=1978.9 * TERA,
            bytes_per_s=4 * TERA,
            num_sms=132,
            gemm_efficiency=_HOPPER,
            fp8_efficiency=0.71,
            attention_efficiency=0.335,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="V100 16GB",
            memory_bytes=16 * GIB,
            fp32_flops=15.7 * TERA,
            bf16_flops=125 * TERA,
            bytes_per_s=0.9 * TERA,
            num_sms=80,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="V100 32GB",
            memory_bytes=32 * GIB,
            fp32_flops=15.7 * TERA,
            bf16_flops=125 * TERA,
            bytes_per_s=0.9 * TERA,
            num_sms=80,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="MI300X",
            memory_bytes=192 * GB,
            fp32_flops=163.4 * TERA,
            bf16_flops=1307.4 * TERA,
            fp8_flops=2614.9 * TERA,
            bytes_per_s=5.3 * TERA,
            num_sms=304,
            gemm_efficiency=0.47,
            attention_efficiency=0.3,
            reserved_bytes=_CONTEXT,
        ),
        Accelerator(
            name="CPU core",
            memory_bytes=8 * GIB,
            fp32_flops=0.05 * TERA,
            bf16_flops=0.05 * TERA,
            fp8_flops=_CPU_FP8 * 0.05 * TERA,
            bytes_per_s=10 * GB,
            num_sms=1,
            kernel_s=5e-6,
            reserved_bytes=_CPU_PROCESS,
            fragmentation=_CPU_FRAGMENTATION,
        ),
    )
}


# Latency per hop over NVLink and network: nccl src/graph/tuning.cc, protocol Simple.
_NODE_S, _NETWORK_S = 3.4e-6, 14e-6
# gpt-oss takes as long on 64 B300 as on 64 B200 with half the network bandwidth: 4 rows of NVIDIA in the fit half.
_B300_REACHES = 0.4


def _cluster(
    name: str, accelerator: str, node_gb_s: float, network_gb_s: float, *, per_node: int = 8, reaches: float = 0.8
) -> Cluster:
    """Return a cluster of GPUs.

    Args:
        reaches: Fraction of the network bandwidth that a large collective reaches.
    """
    return Cluster(
        name=name,
        accelerator=ACCELERATORS[accelerator],
        per_node=per_node,
        node=Link(bytes_per_s=node_gb_s * GB, latency_s=_NODE_S),
        network=Link(bytes_per_s=network_gb_s * GB, latency_s=_NETWORK_S, efficiency=reaches),
    )


CLUSTERS = {
    "a100-40gb": _cluster("A100 40GB x 8, NVLink 3, 4 x 100 Gb/s", "A100 40GB", 300, 6.25),
    "a100-80gb": _cluster("A100 80GB x 8, NVLink 3, 8 x 200 Gb/s", "A100 80GB", 300, 25),
    "h100": _cluster("H100 x 8, NVLink 4, 8 x 400 Gb/s", "H100 SXM", 450, 50),
    "h200": _cluster("H200 x 8, NVLink 4, 8 x 400 Gb/s", "H200 SXM", 450, 50),
    "b200": _cluster("B200 x 8, NVLink 5, 8 x 400 Gb/s", "B200 SXM", 900, 50),
    "b300": _cluster("B300 x 8, NVLink 5, 8 x 800 Gb/s", "B300 SXM", 900, 100, reaches=_B300_REACHES),
    "gb200": _cluster("GB200 NVL72: 72 per NVLink domain, 400 Gb/s each", "GB200", 900, 50, per_node=72),
    "gb300": _cluster("GB300 NVL72: 72 per NVLink domain, 800 Gb/s each", "GB300", 900, 100, per_node=72),
    "h100-500w": _cluster("H100 96GB at 500 W x 8, NVLink 4, 8 x 400 Gb/s", "H100 96GB, 500 W", 450, 50),
    "gh200": _cluster("GH200 x 4, NVLink 4, 4 x 200 Gb/s", "GH200", 150, 25, per_node=4),
    "v100-16gb": _cluster("V100 16GB x 8, NVLink 2, 4 x 100 Gb/s", "V100 16GB", 150, 6.25),
    "v100-32gb": _cluster("V100 32GB x 8, NVLink 2, 4 x 100 Gb/s", "V100 32GB", 150, 6.25),
    "mi300x": _cluster("MI300X x 8, Infinity Fabric, 8 x 400 Gb/s", "MI300X", 448, 50),
    "cpu": Cluster(
        name="CPU ranks of one machine",
        device="cpu",
        accelerator=ACCELERATORS["CPU core"],
        per_node=64,
        node=Link(bytes_per_s=1 * GB, latency_s=5e-5),
        network=Link(bytes_per_s=0.125 * GB, latency_s=1e-4),
        base_s=1e-4,
    ),
}
# Fraction of fp32's peak on a core without bf16 instructions. Matmuls of 64 to 1,024 reach 0.5 to 7 GFLOP/s depending
# on operand layout, and 30 to 80 in fp32 (torch 2.13, AVX2).
_SCALAR_BF16 = 0.15
DEFAULT_CLUSTER = {"cpu": "cpu", "cuda": "h100"}


CARDS = {"PCIE", "NVL"}  # Cards with lower clock and power, and other links.
# (GB/s of the bus in one direction, fraction of the board's peak) of cards in data sheets.
ON_PCIE = {"A100": (32, 1.0), "V100": (16, 112 / 125)}
_PCIE_S = 5.7e-6  # Latency per hop over PCIe: nccl src/graph/tuning.cc, protocol Simple.
SLICE = "MIG"  # A slice of a GPU.


def is_another(device_name: str) -> bool:
    """Return whether a device is a variant that no cluster describes, despite its name."""
    words = _words(device_name)
    return SLICE in words or bool(words & CARDS and not words & ON_PCIE.keys())


def described(device_name: str, memory_bytes: int) -> Cluster | None:
    """Return the cluster for a device name, or None without a data sheet.

    Of several clusters, the result is the closest in memory.
    """
    if is_another(device_name):
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    named = [c for c in CLUSTERS.values() if c.device == "cuda" and c.accelerator.name.split()[0] in words]
    found = min(named, key=lambda c: abs(c.accelerator.memory_bytes - memory_bytes), default=None)
    return found and as_card(found, device_name)


def as_card(board: Cluster, device_name: str) -> Cluster:
    """Return the cluster with PCIe links if the device is a PCIe card."""
    words = _words(device_name)
    kind = next((kind for kind in ON_PCIE if kind in words), None)
    if kind is None or not words & CARDS:
        return board
    gb_s, share = ON_PCIE[kind]
    chip = board.accelerator
    peaks = {"fp32_flops": share * chip.fp32_flops, "bf16_flops": share * chip.bf16_flops}
    update = {
        "name": f"{chip.name} cards on PCIe",
        "accelerator": chip.model_copy(update=peaks),
        "node": Link(bytes_per_s=gb_s * GB, latency_s=_PCIE_S),
    }
    return board.model_copy(update=update)


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", device_name.upper()))


def on_cores(sheet: Cluster, cores: int | None, bf16: str | None) -> Cluster:
    """Return a CPU cluster with the reported cores and bf16 support of a machine.

    Args:
        bf16: How the cores compute bf16 (`contracts.facts.HostFacts`), or None if unknown.
    """
    accelerator = sheet.accelerator
    if bf16 == "scalar":
        accelerator = accelerator.model_copy(update={"bf16_flops": _SCALAR_BF16 * accelerator.fp32_flops})
    return sheet.model_copy(update={"accelerator": accelerator, "cores": cores})
