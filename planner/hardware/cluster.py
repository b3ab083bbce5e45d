"""Hardware: what an accelerator and the links between ranks can do, and how long a kernel or a collective takes.

Data sheet figures are facts; the efficiencies beside them are constants of the model, the same for every accelerator
of a kind (docs/notebook/2026-11.md lists the sources). A measured host replaces them
(`planner.hardware.calibration`).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from contracts.telemetry.words import Op
from planner.facts.collectives import bus_factor
from planner.facts.fields import Strict
from planner.facts.precision import GemmType
from planner.facts.resources import Device
from planner.hardware.kernels import Flash, Gemm, Kernel, Pass
from planner.hardware.profile import HostProfile
from planner.hardware.runs import Run

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Basis = Literal["data sheet", "calibrated"]


# What a kernel of `planner.hardware.kernels` costs the host in eager torch: `make bench-eager`, one core.
LAUNCH_S = 3.2e-5


class Accelerator(Strict):
    """One slot's device. Rates in FLOP/s and bytes/s, times in seconds."""

    name: str = Field(min_length=1, max_length=100)
    memory_bytes: int = Field(ge=1)
    fp32_flops: Positive = Field(description="peak FLOP/s of fp32 matmuls with the default settings of torch")
    bf16_flops: Positive = Field(description="peak dense FLOP/s of bf16 and fp16 matmuls")
    fp8_flops: Positive | None = Field(
        default=None, description="peak dense FLOP/s of fp8 matmuls; null if the device does not support fp8"
    )
    fp4_flops: Positive | None = Field(
        default=None, description="peak dense FLOP/s of fp4 matmuls; null if the device does not support fp4"
    )
    bytes_per_s: Positive = Field(description="peak memory bandwidth")
    host_bytes_per_s: Positive = Field(
        default=64e9, description="peak bandwidth between device and host memory in one direction"
    )
    num_sms: int = Field(ge=1, description="streaming multiprocessors")
    gemm_efficiency: Share = Field(default=0.78, description="fraction of peak FLOP/s that a large matmul reaches")
    fp8_efficiency: Share = Field(default=0.7, description="fraction of peak FLOP/s that a large fp8 matmul reaches")
    attention_efficiency: Share = Field(
        default=0.55, description="fraction of peak FLOP/s that fused attention reaches"
    )
    memory_efficiency: Share = Field(
        default=0.7, description="fraction of peak bandwidth that memory-bound kernels reach"
    )
    kernel_s: Positive = Field(default=3e-6, description="minimum kernel time on the device")
    launch_s: Positive = Field(
        default=LAUNCH_S, description="time that the host needs to launch one kernel, including autograd"
    )
    reserved_bytes: int = Field(
        default=0, ge=0, description="device memory for the device context, libraries, and communication buffers"
    )
    fragmentation: Positive = Field(default=0.05, description="allocator overhead as a fraction of tensor memory")

    def allowance(self, tensor_bytes: int) -> int:
        """Bytes of memory gone beside those of the tensors."""
        return self.reserved_bytes + round(self.fragmentation * tensor_bytes)

    def peak(self, kind: GemmType) -> float:
        """Dense peak FLOP/s of a product in `kind`; fp8 falls back to bf16 where the device has none."""
        if kind == "fp32":
            return self.fp32_flops
        return self.fp8_flops or self.bf16_flops if kind == "fp8" else self.bf16_flops


class Link(Strict):
    """A rank's way to its neighbours, one direction."""

    bytes_per_s: Positive = Field(description="peak send rate per rank")
    efficiency: Share = Field(default=0.8, description="fraction of the peak send rate that a large collective reaches")
    latency_s: Positive = Field(description="latency per ring hop")


class Cluster(Strict):
    """Nodes of equal accelerators, joined by `network`; inside a node ranks meet over `node`."""

    name: str = Field(min_length=1, max_length=100)
    device: Device = "cuda"
    accelerator: Accelerator
    per_node: int = Field(ge=1, le=4096, description="slots per node")
    cores: int | None = Field(
        default=None, ge=1, description="CPU cores per node, shared by its ranks; null if each rank has a device"
    )
    node: Link
    network: Link
    base_s: Positive = Field(
        default=8.4e-6, description="fixed startup time of each collective (from NCCL src/graph/tuning.cc)"
    )
    basis: Basis = "data sheet"
    profile: HostProfile | None = Field(default=None, description="results of the calibration")
    link_runs: int = Field(default=0, ge=0, description="number of runs that measured the link inside a node (`node`)")
    latency_alone: bool = Field(
        default=False, description="true if runs measured only the latency, not the bandwidth, of `node`"
    )
    runs: tuple[Run, ...] = Field(
        default=(), description="finished runs on this cluster that are compared with predictions, newest first"
    )

    @property
    def rate_runs(self) -> int:
        """Runs that told the rate of `node`; 0 where it is of `basis`."""
        return 0 if self.latency_alone else self.link_runs


class Span(NamedTuple):
    """How a group lies on the nodes: its ranks a node, and how many nodes it touches."""

    per_node: int
    nodes: int


SERVER = 8  # ranks at most of what is a server rather than a rack


def filled(world: int, per_node: int) -> int:
    """Ranks that each node has of `world`, the last one perhaps fewer. Racks of 72 are given out by 64, where these
    divide the world: then no group of a power of two lies on two without need."""
    even: int = 1 << (per_node.bit_length() - 1)
    return even if per_node > SERVER and world > per_node and world % even == 0 else per_node


@cache
def span(degree: int, stride: int, per_node: int, world: int) -> Span:
    """Placement of a group of `degree` ranks that are `stride` apart, `world` ranks filling node after node. Where such
    groups lie unlike each other, of the one on the most nodes, which all others wait for."""
    per_node = filled(world, per_node)
    inside, whole = max(1, per_node // stride), degree * stride
    if per_node % whole == 0 or world <= per_node:
        return Span(degree, 1)
    if (stride % per_node == 0 or per_node % stride == 0) and degree % inside == 0:
        return Span(inside, degree // inside)
    firsts = (block + offset for block in range(0, world, whole) for offset in range(min(stride, per_node)))
    unlike = {first % per_node: first for first in firsts if first + whole - stride < world}
    nodes = max(len({r // per_node for r in range(first, first + whole, stride)}) for first in unlike.values())
    return Span(-(-degree // nodes), nodes)


# Tiles of a product and what each reaches of the best: a smaller tile reuses less of what it loads.
UNALIGNED = 0.1  # of the rate, where rows of a half-precision operand do not begin at multiples of 16 bytes
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.62))


def gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    """The best tile's waves over the multiprocessors, or the memory's time where that is longer."""
    return _gemm_seconds(gemm, accelerator, kind, element_bytes)


@cache
def _gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    m, n, k, batch, wide, _, over_rows = gemm
    kind = "bf16" if kind == "fp8" and (wide or not accelerator.fp8_flops) else kind
    share = accelerator.fp8_efficiency if kind == "fp8" else accelerator.gemm_efficiency
    aligned = kind == "fp32" or not (n % 8 or (k % 8 and not over_rows))
    per_sm = accelerator.peak(kind) * share * (1 if aligned else UNALIGNED) / accelerator.num_sms

    def tiled(rows: int, columns: int, reach: float) -> float:
        waves = -(-(-(-m // rows) * -(-n // columns) * batch) // accelerator.num_sms)
        return waves * 2 * rows * columns * k / (per_sm * reach)

    products = min(tiled(*tile) for tile in TILES)
    moved = batch * (m * k + k * n + m * n) * element_bytes
    return max(products, moved / (accelerator.bytes_per_s * accelerator.memory_efficiency)) + accelerator.kernel_s


def kernel_seconds(
    kernel: Kernel, accelerator: Accelerator, kind: GemmType, element_bytes: int, *, attention: float = 1.0
) -> float:
    """Time of one kernel on the device. `attention`: how many times as long its products take as at their best rate."""
    if isinstance(kernel, Gemm):
        return _gemm_seconds(kernel, accelerator, kind, element_bytes)
    moved = kernel.num_bytes / (accelerator.bytes_per_s * accelerator.memory_efficiency)
    if isinstance(kernel, Pass):
        return moved + accelerator.kernel_s
    assert isinstance(kernel, Flash)
    peak = accelerator.peak("fp32" if kind == "fp32" else "bf16")
    products = attention * kernel.flops / (peak * accelerator.attention_efficiency)
    return max(products, moved) + accelerator.kernel_s


def collective_seconds(op: Op, payload_bytes: float, group: Span, cluster: Cluster) -> float:
    """Alpha-beta time of one collective: the latency of a tree of nodes, the bytes of rings over the slowest link
    (nccl src/graph/tuning.cc, shape of its model).

    Every rank has its own way out of its node: as many rings leave it as a group has ranks there, while in an
    all-to-all each rank sends its own share to the other nodes.
    """
    n = group.per_node * group.nodes
    if n <= 1:
        return 0.0
    if op == "barrier":
        return cluster.base_s
    inside = cluster.node.bytes_per_s * cluster.node.efficiency
    out = cluster.network.bytes_per_s * cluster.network.efficiency
    if op in ("send", "recv"):
        link, bandwidth = (cluster.node, inside) if group.nodes == 1 else (cluster.network, out)
        return cluster.base_s + link.latency_s + payload_bytes / bandwidth
    hops = (group.per_node - 1) * cluster.node.latency_s
    if group.nodes > 1:
        hops += (group.nodes - 1).bit_length() * cluster.network.latency_s
    latency = cluster.base_s + (2 if op == "all_reduce" else 1) * hops
    if group.nodes == 1:
        return latency + bus_factor(op, n) * payload_bytes / inside
    if op == "all_to_all":
        near, far = (group.per_node - 1) / n, (group.nodes - 1) / group.nodes
        return latency + payload_bytes * max(near / inside, far / out)
    return latency + bus_factor(op, n) * payload_bytes / min(inside, group.per_node * out)
