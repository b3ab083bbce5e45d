"""Describe accelerators, links, and clusters.

Data sheet figures are facts. The efficiencies are constants of the model, equal for all accelerators of a kind
(docs/notebook/2026-11.md lists the sources). A measured host replaces them (`planner.hardware.calibration`).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from planner.facts.precision import GemmType
from planner.facts.resources import Device
from planner.facts.validation import StrictModel
from planner.hardware.profile import HostProfile, MeasuredRun, MeasuredStep

PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Basis = Literal["data sheet", "own figures", "calibrated"]
NO_DATA_SHEET = " (no data sheet)"  # end of the name of an unknown GPU, which gets the rates of another GPU


# Host time per kernel of `planner.hardware.kernels` in eager torch, from `make bench-eager` on one core.
DEFAULT_LAUNCH_S = 3.2e-5


class Accelerator(StrictModel):
    """Device of one slot. Rates are in FLOP/s and bytes/s, times in seconds."""

    name: str = Field(min_length=1, max_length=100)
    memory_bytes: int = Field(ge=1)
    fp32_flops: PositiveFloat = Field(description="peak FLOP/s of fp32 matmuls with the default settings of torch")
    bf16_flops: PositiveFloat = Field(description="peak dense FLOP/s of bf16 and fp16 matmuls")
    fp8_flops: PositiveFloat | None = Field(
        default=None, description="peak dense FLOP/s of fp8 matmuls; null if the device does not support fp8"
    )
    fp4_flops: PositiveFloat | None = Field(
        default=None, description="peak dense FLOP/s of fp4 matmuls; null if the device does not support fp4"
    )
    bytes_per_s: PositiveFloat = Field(description="peak memory bandwidth")
    host_bytes_per_s: PositiveFloat = Field(
        default=64e9, description="peak bandwidth between device and host memory in one direction"
    )
    num_sms: int = Field(ge=1, description="streaming multiprocessors")
    gemm_efficiency: Fraction = Field(default=0.78, description="fraction of peak FLOP/s that a large matmul reaches")
    fp8_efficiency: Fraction = Field(default=0.7, description="fraction of peak FLOP/s that a large fp8 matmul reaches")
    attention_efficiency: Fraction = Field(
        default=0.55, description="fraction of peak FLOP/s that fused attention reaches"
    )
    memory_efficiency: Fraction = Field(
        default=0.7, description="fraction of peak bandwidth that memory-bound kernels reach"
    )
    kernel_s: PositiveFloat = Field(default=3e-6, description="minimum kernel time on the device")
    launch_s: PositiveFloat = Field(
        default=DEFAULT_LAUNCH_S, description="time that the host needs to launch one kernel, including autograd"
    )
    reserved_bytes: int = Field(
        default=0, ge=0, description="device memory for the device context, libraries, and communication buffers"
    )
    fragmentation: PositiveFloat = Field(default=0.05, description="allocator overhead as a fraction of tensor memory")

    def compute_overhead_bytes(self, tensor_bytes: int) -> int:
        """Return the memory that is used in addition to tensors."""
        return self.reserved_bytes + round(self.fragmentation * tensor_bytes)

    def get_peak_flops(self, kind: GemmType) -> float:
        """Return the dense peak FLOP/s of a matmul. fp8 uses bf16 if the device has no fp8."""
        if kind == "fp32":
            return self.fp32_flops
        return self.fp8_flops or self.bf16_flops if kind == "fp8" else self.bf16_flops


class Link(StrictModel):
    """Link from a rank to its neighbors, in one direction."""

    bytes_per_s: PositiveFloat = Field(description="peak send rate per rank")
    efficiency: Fraction = Field(
        default=0.8, description="fraction of the peak send rate that a large collective reaches"
    )
    latency_s: PositiveFloat = Field(description="latency per ring hop")


class Cluster(StrictModel):
    """Nodes with equal accelerators. `node` links ranks of a node, `network` links nodes."""

    name: str = Field(min_length=1, max_length=100)
    device: Device = "cuda"
    accelerator: Accelerator
    per_node: int = Field(ge=1, le=4096, description="slots per node")
    cores: int | None = Field(
        default=None, ge=1, description="CPU cores per node, shared by its ranks; null if each rank has a device"
    )
    node: Link
    network: Link
    base_s: PositiveFloat = Field(
        default=8.4e-6, description="fixed startup time of each collective (from NCCL src/graph/tuning.cc)"
    )
    basis: Basis = "data sheet"
    profile: HostProfile | None = Field(default=None, description="results of the calibration")
    link_runs: int = Field(default=0, ge=0, description="number of runs that measured the link inside a node (`node`)")
    latency_alone: bool = Field(
        default=False, description="true if runs measured only the latency, not the bandwidth, of `node`"
    )
    runs: tuple[MeasuredRun, ...] = Field(
        default=(), description="finished runs on this cluster that are compared with predictions, newest first"
    )
    measured_steps: tuple[MeasuredStep, ...] = Field(
        default=(), description="steps that a user measured on such hardware, which correct step times"
    )

    @property
    def has_assumed_peak(self) -> bool:
        """Return whether the peak FLOP/s is neither from a data sheet nor from a user."""
        return self.device == "cpu" or self.accelerator.name.endswith(NO_DATA_SHEET)

    @property
    def num_rate_runs(self) -> int:
        """Return the number of runs that measured the bandwidth of `node`."""
        return 0 if self.latency_alone else self.link_runs


class NodeSpan(NamedTuple):
    """Ranks per node of a group, and the number of nodes that it spans."""

    per_node: int
    nodes: int


MAX_SERVER_RANKS = 8  # Above this number of ranks, a node is a rack.


def get_filled_per_node(world: int, per_node: int) -> int:
    """Return the ranks that each node has, except perhaps the last.

    Jobs on racks of 72 use 64 ranks per rack if 64 divides the world size. Groups with a power of two then span fewer
    racks.
    """
    even: int = 1 << (per_node.bit_length() - 1)
    return even if per_node > MAX_SERVER_RANKS and world > per_node and world % even == 0 else per_node


@cache
def get_node_span(degree: int, stride: int, per_node: int, world: int) -> NodeSpan:
    """Return how a group of `degree` ranks at distance `stride` spans the nodes.

    Ranks fill one node after another. If groups differ, the result is the group on the most nodes, which is the
    slowest.
    """
    per_node = get_filled_per_node(world, per_node)
    inside, whole = max(1, per_node // stride), degree * stride
    if per_node % whole == 0 or world <= per_node:
        return NodeSpan(degree, 1)
    if (stride % per_node == 0 or per_node % stride == 0) and degree % inside == 0:
        return NodeSpan(inside, degree // inside)
    firsts = (block + offset for block in range(0, world, whole) for offset in range(min(stride, per_node)))
    unlike = {first % per_node: first for first in firsts if first + whole - stride < world}
    nodes = max(len({r // per_node for r in range(first, first + whole, stride)}) for first in unlike.values())
    return NodeSpan(-(-degree // nodes), nodes)
