"""List accelerators and clusters with figures of vendor data sheets.

Peaks are dense, units are decimal, and links are in one direction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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

# Fractions of the peak. Power limits a large matmul to about 720 of 989 TFLOP/s on Hopper, and to about 1,300 of 2,400
# TFLOP/s on Blackwell. Blackwell Ultra computes exponentials at twice the rate, and cuDNN takes 0.90 of the time there
# (planner/hardware/kernel_time.py).
_HOPPER = {"gemm_efficiency": 0.72, "fp8_efficiency": 0.71, "attention_efficiency": 0.335}
_BLACKWELL = {"gemm_efficiency": 0.54, "fp8_efficiency": 0.67, "attention_efficiency": 0.375}
_BLACKWELL_ULTRA = {**_BLACKWELL, "attention_efficiency": 0.375 / 0.9}
_LIMITED_HOPPER = {"gemm_efficiency": 0.49, "fp8_efficiency": 0.48, "attention_efficiency": 0.23}
_CDNA3 = {"gemm_efficiency": 0.47, "attention_efficiency": 0.3}
_GRACE = {"host_bytes_per_s": 450 * GB}  # NVLink-C2C


def build_gpu(
    name: str,
    memory_bytes: int,
    tflops: tuple[float, ...],
    terabytes_per_s: float,
    num_sms: int,
    efficiencies: Mapping[str, float] = {},
) -> Accelerator:
    """Return a GPU. `tflops`: dense peaks in fp32, bf16, fp8, and fp4, as far as the GPU has them."""
    fields = ("fp32_flops", "bf16_flops", "fp8_flops", "fp4_flops")
    peaks: dict[str, Any] = {field: rate * TERA for field, rate in zip(fields, tflops, strict=False)}
    return Accelerator(
        name=name,
        memory_bytes=memory_bytes,
        bytes_per_s=terabytes_per_s * TERA,
        num_sms=num_sms,
        reserved_bytes=_CONTEXT,
        **peaks,
        **efficiencies,
    )


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        build_gpu("A100 40GB", _A100_40, (19.5, 312), 1.555, 108),
        build_gpu("A100 80GB", _A100_80, (19.5, 312), 2.039, 108),
        build_gpu("H100 SXM", _H100, (67, 989.4, 1978.9), 3.35, 132, _HOPPER),
        build_gpu("H200 SXM", _H200, (67, 989.4, 1978.9), 4.8, 132, _HOPPER),
        build_gpu("B200 SXM", _B200, (75, 2250, 4500, 9000), 7.7, 148, _BLACKWELL),
        build_gpu("B300 SXM", 270 * GB, (75, 2250, 4500, 13500), 7.7, 148, _BLACKWELL_ULTRA),
        build_gpu("GB200", 186 * GB, (80, 2500, 5000, 10000), 8, 152, _BLACKWELL | _GRACE),
        build_gpu("GB300", 278 * GB, (80, 2500, 5000, 15000), 8, 152, _BLACKWELL_ULTRA | _GRACE),
        build_gpu("H100 96GB, 500 W", 95 * GIB, (67, 989.4, 1978.9), 2.4, 132, _LIMITED_HOPPER),
        build_gpu("GH200", 96 * GB, (67, 989.4, 1978.9), 4, 132, _HOPPER),
        build_gpu("V100 16GB", 16 * GIB, (15.7, 125), 0.9, 80),
        build_gpu("V100 32GB", 32 * GIB, (15.7, 125), 0.9, 80),
        build_gpu("MI300X", 192 * GB, (163.4, 1307.4, 2614.9), 5.3, 304, _CDNA3),
        # No published step confirms the accelerators below, so their steps have the widest margin of error.
        # AMD Instinct MI325X data sheet: the compute of an MI300X with HBM3E.
        build_gpu("MI325X", 256 * GB, (163.4, 1307.4, 2614.9), 6.0, 304, _CDNA3),
        # NVIDIA A800 80GB data sheet: an A100 with 400 GB/s NVLink.
        build_gpu("A800 80GB", _A100_80, (19.5, 312), 2.039, 108),
        # 2412.19437 section 3.1 and NVIDIA H800 data sheet: an H100 with 400 GB/s NVLink.
        build_gpu("H800 SXM", _H100, (67, 989.4, 1978.9), 3.35, 132, _HOPPER),
        # NVIDIA H20 data sheet. Its dense peak is far below the power limit.
        build_gpu("H20", 96 * GB, (44, 148, 296), 4.0, 78),
        # NVIDIA L40S data sheet, dense.
        build_gpu("L40S", 48 * GB, (91.6, 362, 733), 0.864, 142),
        # NVIDIA Ampere GA102 whitepaper, appendices A and C: bf16 with fp32 accumulation, dense.
        build_gpu("RTX A6000", 48 * GB, (38.7, 154.8), 0.768, 84),
        build_gpu("RTX 3090", 24 * GB, (35.6, 71), 0.936, 82),
        # NVIDIA Ada GPU architecture whitepaper, appendix A: bf16 and fp8 with fp32 accumulation, dense.
        build_gpu("RTX 4090", 24 * GB, (82.6, 165.2, 330.3), 1.008, 128),
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
# gpt-oss takes as long on 64 B300 as on 64 B200 with half the network bandwidth: 4 rows of NVIDIA.
_B300_REACHES = 0.4


_PCIE_S = 5.7e-6  # Latency per hop over PCIe: nccl src/graph/tuning.cc, protocol Simple.
_PCIE_4_GB_S = 32  # 16 lanes in one direction


def build_gpu_cluster(
    name: str,
    accelerator: Accelerator,
    node_gb_s: float,
    network_gb_s: float,
    *,
    per_node: int = 8,
    reaches: float = 0.8,
    node_s: float = _NODE_S,
) -> Cluster:
    """Return a cluster of GPUs.

    Args:
        reaches: Fraction of the network bandwidth that a large collective reaches.
        node_s: Latency per hop inside a node.
    """
    return Cluster(
        name=name,
        accelerator=accelerator,
        per_node=per_node,
        node=Link(bytes_per_s=node_gb_s * GB, latency_s=node_s),
        network=Link(bytes_per_s=network_gb_s * GB, latency_s=_NETWORK_S, efficiency=reaches),
    )


def _cluster(name: str, accelerator: str, node_gb_s: float, network_gb_s: float, **options: Any) -> Cluster:
    return build_gpu_cluster(name, ACCELERATORS[accelerator], node_gb_s, network_gb_s, **options)


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
    "mi325x": _cluster("MI325X x 8, Infinity Fabric, 8 x 400 Gb/s", "MI325X", 448, 50),
    "a800": _cluster("A800 80GB x 8, NVLink 3 at 400 GB/s, 8 x 200 Gb/s", "A800 80GB", 200, 25),
    "h800": _cluster("H800 x 8, NVLink 4 at 400 GB/s, 8 x 400 Gb/s", "H800 SXM", 200, 50),
    "h20": _cluster("H20 x 8, NVLink 4, 8 x 400 Gb/s", "H20", 450, 50),
    # Nodes of cards without NVSwitch. GeForce drivers send through host memory, which halves the rate.
    "l40s": _cluster("L40S x 8, PCIe 4, 4 x 200 Gb/s", "L40S", _PCIE_4_GB_S, 12.5, node_s=_PCIE_S),
    "rtx-a6000": _cluster("RTX A6000 x 8, PCIe 4, 100 Gb/s", "RTX A6000", _PCIE_4_GB_S, 1.5625, node_s=_PCIE_S),
    "rtx-3090": _cluster("RTX 3090 x 8, PCIe 4, 100 Gb/s", "RTX 3090", _PCIE_4_GB_S / 2, 1.5625, node_s=_PCIE_S),
    "rtx-4090": _cluster("RTX 4090 x 8, PCIe 4, 100 Gb/s", "RTX 4090", _PCIE_4_GB_S / 2, 1.5625, node_s=_PCIE_S),
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


CARD_WORDS = {"PCIE", "NVL"}  # Cards with lower clock and power, and other links.
# (GB/s of the bus in one direction, fraction of the board's peak) of cards in data sheets.
PCIE_CARDS = {"A100": (_PCIE_4_GB_S, 1.0), "A800": (_PCIE_4_GB_S, 1.0), "V100": (16, 112 / 125)}
OTHER_WORDS = {"MIG", "TI", "D", "LAPTOP"}  # A slice of a GPU, and GeForce cards with other peaks.


def is_other_variant(device_name: str) -> bool:
    """Return whether a device is a variant that no cluster describes, despite its name."""
    words = _words(device_name)
    return bool(words & OTHER_WORDS) or bool(words & CARD_WORDS and not words & PCIE_CARDS.keys())


def find_cluster(device_name: str, memory_bytes: int) -> Cluster | None:
    """Return the cluster for a device name, or None without a data sheet.

    Of several clusters, the result is the closest in memory.
    """
    if is_other_variant(device_name):
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    named = [c for c in CLUSTERS.values() if c.device == "cuda" and _get_model_words(c.accelerator.name) <= words]
    found = min(named, key=lambda c: abs(c.accelerator.memory_bytes - memory_bytes), default=None)
    return found and use_card_links(found, device_name)


def use_card_links(board: Cluster, device_name: str) -> Cluster:
    """Return the cluster with PCIe links if the device is a PCIe card."""
    words = _words(device_name)
    kind = next((kind for kind in PCIE_CARDS if kind in words), None)
    if kind is None or not words & CARD_WORDS:
        return board
    gb_s, share = PCIE_CARDS[kind]
    chip = board.accelerator
    peaks = {"fp32_flops": share * chip.fp32_flops, "bf16_flops": share * chip.bf16_flops}
    update = {
        "name": f"{chip.name} cards on PCIe",
        "accelerator": chip.model_copy(update=peaks),
        "node": Link(bytes_per_s=gb_s * GB, latency_s=_PCIE_S),
    }
    return board.model_copy(update=update)


def _get_model_words(name: str) -> set[str]:
    """Return the words of an accelerator's name that a device of this model has in its name."""
    return set(name.split()[: 2 if name.startswith("RTX ") else 1])


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", device_name.upper()))


def use_cores(sheet: Cluster, cores: int | None, bf16: str | None) -> Cluster:
    """Return a CPU cluster with the reported cores and bf16 support of a machine.

    Args:
        bf16: How the cores compute bf16 (`contracts.facts.HostFacts`), or None if unknown.
    """
    accelerator = sheet.accelerator
    if bf16 == "scalar":
        accelerator = accelerator.model_copy(update={"bf16_flops": _SCALAR_BF16 * accelerator.fp32_flops})
    return sheet.model_copy(update={"accelerator": accelerator, "cores": cores})
