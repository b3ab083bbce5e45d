"""Hardware: what an accelerator and the links between ranks can do, and how long a kernel or a collective takes.

Data sheet figures are facts; the efficiencies beside them are constants of the model, the same for every accelerator
of a kind (docs/notebook/2026-11.md lists the sources). A measured host replaces them
(`planner.hardware.calibration`).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from planner.facts.precision import GemmType
from planner.facts.resources import Device
from planner.facts.validation import StrictModel
from planner.hardware.profile import HostProfile, Run

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Basis = Literal["data sheet", "calibrated"]


# What a kernel of `planner.hardware.kernels` costs the host in eager torch: `make bench-eager`, one core.
LAUNCH_S = 3.2e-5


class Accelerator(StrictModel):
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


class Link(StrictModel):
    """A rank's way to its neighbours, one direction."""

    bytes_per_s: Positive = Field(description="peak send rate per rank")
    efficiency: Share = Field(default=0.8, description="fraction of the peak send rate that a large collective reaches")
    latency_s: Positive = Field(description="latency per ring hop")


class Cluster(StrictModel):
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
