"""Define hosts, engines, and software stacks of a spec."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from planner.facts.validation import NO_NUL, StrictModel, Word

Device = Literal["cpu", "cuda"]
StackName = Literal[
    "unknown", "ours", "megatron", "megatron_2021", "fsdp2", "fsdp2_eager", "fsdp1", "deepspeed", "scaling"
]
EngineName = Literal["hosts", "slurm"]
CudaGraphs = Literal["none", "router", "attention", "attention_and_router", "whole"]
Dispatcher = Literal["flex", "alltoall"]
SoftwareKernel = Literal["own", "flash_1", "flash_2", "eager"]
# Slurm texts become part of a command. These patterns exclude options, paths, and shell syntax.
SLURM_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
SLURM_NAMES = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(,[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,15}$"
SLURM_TIME = r"^([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]$"
SLURM_FEATURES = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}([&|,][A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,15}$"
SLURM_NODES = r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,999}$"


class SlurmSpec(StrictModel):
    """Slurm options. The cluster decides the options that are missing."""

    partition: str | None = Field(
        default=None, pattern=SLURM_NAMES, description="Slurm partition, or a comma-separated list of partitions"
    )
    account: str | None = Field(default=None, pattern=SLURM_NAME, description="Slurm account")
    qos: str | None = Field(default=None, pattern=SLURM_NAME, description="Slurm quality of service")
    time_limit: str | None = Field(
        default=None, pattern=SLURM_TIME, description="Slurm time limit as [days-]hours:minutes:seconds"
    )
    nodes: int = Field(
        default=1, ge=1, le=65536, description="number of Slurm nodes; each node runs the same number of ranks"
    )
    cpus_per_rank: int = Field(default=1, ge=1, le=1024, description="CPU cores per rank")
    constraint: str | None = Field(default=None, pattern=SLURM_FEATURES, description="required Slurm node features")
    exclude: str | None = Field(default=None, pattern=SLURM_NODES, description="Slurm nodes to exclude")


class SoftwareSpec(StrictModel):
    """Options of another software stack, for estimates only. Missing options have their defaults.

    megatron accepts all options except fused_norms. scaling accepts attention_kernel and fused_norms.
    Other stacks accept no options.
    """

    cuda_graphs: CudaGraphs = Field(
        default="none", description="parts of a layer that run in CUDA graphs (Megatron's --cuda-graph-modules)"
    )
    deterministic: bool = Field(
        default=False,
        description="use deterministic kernels, which take longer to launch (Megatron's --deterministic-mode)",
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
        description="attention kernel: own (the stack's default), flash_2 (megatron), flash_1 or eager (scaling)",
    )
    fused_norms: bool = Field(default=False, description="compute each norm in one fused kernel (scaling)")
    nvfp4: bool = Field(default=False, description="use NVFP4 matmuls instead of fp8 matmuls (--fp4-recipe nvfp4)")


class Resources(StrictModel):
    """Hosts and slots of the job. Each rank needs one slot."""

    engine: EngineName = Field(
        default="hosts", description="engine that runs the job: hosts (the board's hosts) or slurm"
    )

    device: Device = Field(default="cpu", description="device of each slot")
    stack: StackName = Field(
        default="ours", description="software stack whose step time is estimated; jobs always run Meshboard's trainer"
    )
    software: SoftwareSpec | None = Field(
        default=None,
        description="options of the software stack, for estimates only. Meshboard's trainer has no options.",
    )
    host: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        pattern=NO_NUL,
        description="name of the host that runs the job; any host by default",
    )
    slurm: SlurmSpec | None = Field(default=None, description="Slurm options; used only with engine slurm")
    max_hosts: int | None = Field(
        default=None, ge=1, le=65536, description="maximum number of hosts for the job; no limit by default"
    )
    pool: Word | None = Field(default=None, description="pool whose hosts run the job")
    disk_limit_bytes: int | None = Field(
        default=None,
        ge=2**20,
        le=2**50,
        description="limit of the job's files on each host (bytes), above which the job fails; "
        "the host reserves this space, and can have a lower limit",
    )
    labels: list[Word] = Field(default=[], max_length=16, description="labels that each host of the job needs")


# Values other than the default that published rows of the stack cover.
ANY_VALUE: tuple[Any, ...] = ()


STACK_OPTIONS: dict[StackName, dict[str, tuple[Any, ...]]] = {
    "megatron": {
        "cuda_graphs": ANY_VALUE,
        "deterministic": ANY_VALUE,
        "dispatcher": ANY_VALUE,
        "overlap_experts": ANY_VALUE,
        "attention_kernel": ("flash_2",),
        "nvfp4": ANY_VALUE,
    },
    "scaling": {"attention_kernel": ("flash_1", "eager"), "fused_norms": ANY_VALUE},
}


def get_changed_options(software: SoftwareSpec | None) -> dict[str, Any]:
    """Return the software options that differ from their defaults."""
    return {} if software is None else software.model_dump(exclude_defaults=True)


def get_option_names(stack: StackName) -> tuple[str, ...]:
    """Return the software options that a stack supports."""
    return tuple(STACK_OPTIONS.get(stack, {}))


OPTION_LABELS: dict[str, dict[Any, str]] = {
    "cuda_graphs": {
        "router": "CUDA graphs of the router",
        "attention": "CUDA graphs of attention",
        "attention_and_router": "CUDA graphs of attention and router",
        "whole": "CUDA graphs of whole layers or steps",
    },
    "deterministic": {True: "deterministic kernels"},
    "dispatcher": {"alltoall": "all-to-all token dispatch"},
    "overlap_experts": {True: "overlapped expert communication"},
    "attention_kernel": {
        "flash_1": "FlashAttention 1",
        "flash_2": "FlashAttention 2",
        "eager": "unfused attention",
    },
    "fused_norms": {True: "fused norms"},
    "nvfp4": {True: "NVFP4 matmuls"},
}


def format_software(software: SoftwareSpec | None) -> str:
    """Format options such as ', CUDA graphs of attention, all-to-all token dispatch'."""
    return "".join(f", {OPTION_LABELS[name][value]}" for name, value in get_changed_options(software).items())
