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
    """Slurm options. The cluster decides the options that are missing."""

    partition: str | None = Field(
        default=None, pattern=SLURM_NAMES, description="Slurm partition, or several with commas between"
    )
    account: str | None = Field(default=None, pattern=SLURM_NAME, description="Slurm account")
    qos: str | None = Field(default=None, pattern=SLURM_NAME, description="Slurm quality of service")
    time_limit: str | None = Field(
        default=None, pattern=SLURM_TIME, description="time limit as [days-]hours:minutes:seconds"
    )
    nodes: int = Field(default=1, ge=1, le=65536, description="nodes; each runs the same number of ranks")
    cpus_per_rank: int = Field(default=1, ge=1, le=1024, description="CPU cores per rank")
    constraint: str | None = Field(default=None, pattern=SLURM_FEATURES, description="required node features")
    exclude: str | None = Field(default=None, pattern=SLURM_NODES, description="excluded nodes")


class SoftwareSpec(Strict):
    """Options of another software stack, for estimates only. Missing options have their defaults.

    megatron accepts all options except fused_norms. scaling accepts attention_kernel and fused_norms.
    Other stacks accept no options.
    """

    cuda_graphs: CudaGraphs = Field(
        default="none", description="parts of a layer in CUDA graphs (Megatron's --cuda-graph-modules)"
    )
    deterministic: bool = Field(
        default=False, description="deterministic kernels, which launch more slowly (Megatron's --deterministic-mode)"
    )
    dispatcher: Dispatcher = Field(
        default="flex",
        description="token dispatcher: flex (DeepEP, HybridEP) or alltoall (--moe-token-dispatcher-type)",
    )
    overlap_experts: bool = Field(
        default=False,
        description="overlap expert communication with computation (--overlap-moe-expert-parallel-comm)",
    )
    attention_kernel: SoftwareKernel = Field(
        default="own",
        description="own (the stack's default), flash_2 (megatron), flash_1 or eager (scaling)",
    )
    fused_norms: bool = Field(default=False, description="fused norms, one kernel each (scaling)")
    nvfp4: bool = Field(default=False, description="NVFP4 matmuls instead of fp8 (--fp4-recipe nvfp4)")


class Resources(Strict):
    """Hosts and slots of the job. Each rank needs one slot."""

    engine: EngineName = Field(default="hosts", description="hosts (the board's hosts) or slurm")

    device: Device = Field(default="cpu", description="device of each slot")
    stack: StackName = Field(
        default="ours", description="software stack of the time estimate; jobs always run Meshboard's trainer"
    )
    software: SoftwareSpec | None = Field(
        default=None, description="options of the software stack, for estimates only. Meshboard's trainer has no options."
    )
    host: str | None = Field(
        default=None, min_length=1, max_length=100, pattern=NO_NUL, description="required host; any host by default"
    )
    slurm: SlurmSpec | None = Field(default=None, description="Slurm options, for engine slurm")
    max_hosts: int | None = Field(
        default=None, ge=1, le=65536, description="most hosts for the ranks; no limit by default"
    )
    pool: Word | None = Field(default=None, description="required pool")
    labels: list[Word] = Field(default=[], max_length=16, description="required host labels")
