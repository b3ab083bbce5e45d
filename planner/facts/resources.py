"""Where a job runs, and the software that its time is planned for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.facts.fields import NO_NUL, Strict, Word

Device = Literal["cpu", "cuda"]
StackName = Literal["ours", "megatron", "megatron_2021", "fsdp2", "fsdp2_eager", "fsdp1", "deepspeed", "scaling"]
EngineName = Literal["hosts", "slurm"]
CudaGraphs = Literal["none", "router", "attention", "attention_and_router", "whole"]
Dispatcher = Literal["flex", "alltoall"]
SoftwareKernel = Literal["own", "flash_1", "flash_2", "eager"]
# What of a spec becomes part of a Slurm command: no such text can be an option, a file's name or a shell's word.
SLURM_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
SLURM_NAMES = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(,[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,15}$"
SLURM_TIME = r"^([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]$"
SLURM_FEATURES = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}([&|,][A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,15}$"
SLURM_NODES = r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,999}$"


class SlurmSpec(Strict):
    """What a job asks of Slurm beside its ranks. What is left out, the cluster decides."""

    partition: str | None = Field(default=None, pattern=SLURM_NAMES, description="or several, with commas between")
    account: str | None = Field(default=None, pattern=SLURM_NAME, description="whom Slurm charges")
    qos: str | None = Field(default=None, pattern=SLURM_NAME, description="quality of service")
    time_limit: str | None = Field(default=None, pattern=SLURM_TIME, description="[days-]hours:minutes:seconds")
    nodes: int = Field(default=1, ge=1, le=65536, description="ranks are divided evenly over them")
    cpus_per_rank: int = Field(default=1, ge=1, le=1024, description="cores that each rank has")
    constraint: str | None = Field(default=None, pattern=SLURM_FEATURES, description="features that the nodes have")
    exclude: str | None = Field(default=None, pattern=SLURM_NODES, description="nodes that it must not run on")


class SoftwareSpec(Strict):
    """What is known of the software planned for, where that is another than ours, of which all is known.

    What is left out is as said beside it. Of megatron all but fused_norms can be told, of scaling attention_kernel and
    fused_norms, of other stacks nothing. None of it runs here.
    """

    cuda_graphs: CudaGraphs = Field(
        default="none", description="what of a layer is one CUDA graph (Megatron's --cuda-graph-modules)"
    )
    deterministic: bool = Field(
        default=False, description="Megatron's --deterministic-mode, whose kernels its host launches more slowly"
    )
    dispatcher: Dispatcher = Field(
        default="flex",
        description="how tokens reach experts: flex (DeepEP, HybridEP) or alltoall (--moe-token-dispatcher-type)",
    )
    overlap_experts: bool = Field(
        default=False,
        description="one micro-batch's tokens travel to experts beside another's products "
        "(--overlap-moe-expert-parallel-comm)",
    )
    attention_kernel: SoftwareKernel = Field(
        default="own",
        description="the stack's own; megatron: flash_2 (on Hopper); scaling: flash_1, or eager, which is unfused",
    )
    fused_norms: bool = Field(default=False, description="scaling: norms by one kernel each")
    nvfp4: bool = Field(
        default=False, description="products in fp4 in place of train.precision's fp8 (--fp4-recipe nvfp4)"
    )


class Resources(Strict):
    """What kind of slot the ranks need, one slot each."""

    engine: EngineName = Field(default="hosts", description="who runs it: the board's own hosts, or Slurm")

    device: Device = Field(default="cpu", description="what a slot is")
    stack: StackName = Field(default="ours", description="software that time is planned for; what runs is ours")
    software: SoftwareSpec | None = Field(
        default=None, description="what is known of that software beside its name; not for ours, which is known"
    )
    host: str | None = Field(
        default=None, min_length=1, max_length=100, pattern=NO_NUL, description="only this host; any by default"
    )
    slurm: SlurmSpec | None = Field(default=None, description="with engine slurm: what is asked of it")
    max_hosts: int | None = Field(
        default=None, ge=1, le=65536, description="hosts that the ranks may be spread over; any number by default"
    )
    pool: Word | None = Field(default=None, description="only hosts of this pool")
    labels: list[Word] = Field(default=[], max_length=16, description="only hosts that have all of these labels")
