"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.layouts import AutoSpec, Layout
from meshboard.answers.models import ModelSpec, SizedModel


class LabSpec(TypedDict):
    """The collective lab: each primitive at each size, timed and checked, over a group of the job's ranks.

    Sizes are bytes of the full (gathered) buffer, rounded down to whole elements for every rank.
    """

    dtype: NotRequired[Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"]]
    """type of the elements"""
    factor: NotRequired[int]
    """each size over the one before it"""
    iterations: NotRequired[int]
    """timed and checked calls of each size"""
    max_bytes: NotRequired[int]
    """the largest size"""
    min_bytes: NotRequired[int]
    """the smallest size"""
    primitives: NotRequired[
        list[
            Literal[
                "broadcast",
                "scatter",
                "gather",
                "all_gather",
                "reduce",
                "all_reduce",
                "reduce_scatter",
                "all_to_all",
                "send_recv",
                "isend_irecv",
                "barrier",
            ]
        ]
        | Literal["all"]
    ]
    """a list of them, or all"""
    ranks: NotRequired[list[int] | None]
    """ranks that form the group, in order; all by default"""
    reduce_op: NotRequired[Literal["sum", "max"]]
    """of what is reduced"""
    root: NotRequired[int | None]
    """a rank of the group; its first by default"""
    warmup: NotRequired[int]
    """calls before them"""


class SlurmSpec(TypedDict):
    """What a job asks of Slurm beside its ranks. What is left out, the cluster decides."""

    account: NotRequired[str | None]
    """whom Slurm charges"""
    constraint: NotRequired[str | None]
    """features that the nodes have"""
    cpus_per_rank: NotRequired[int]
    """cores that each rank has"""
    exclude: NotRequired[str | None]
    """nodes that it must not run on"""
    nodes: NotRequired[int]
    """ranks are divided evenly over them"""
    partition: NotRequired[str | None]
    """or several, with commas between"""
    qos: NotRequired[str | None]
    """quality of service"""
    time_limit: NotRequired[str | None]
    """[days-]hours:minutes:seconds"""


class SoftwareSpec(TypedDict):
    """What is known of the software planned for, where that is another than ours, of which all is known.

    What is left out is as said beside it. Of megatron all but fused_norms can be told, of scaling attention_kernel
    and fused_norms, of other stacks nothing. None of it runs here.
    """

    attention_kernel: NotRequired[Literal["own", "flash_1", "flash_2", "eager"]]
    """the stack's own; megatron: flash_2 (on Hopper); scaling: flash_1, or eager, which is unfused"""
    cuda_graphs: NotRequired[Literal["none", "router", "attention", "attention_and_router", "whole"]]
    """what of a layer is one CUDA graph (Megatron's --cuda-graph-modules)"""
    deterministic: NotRequired[bool]
    """Megatron's --deterministic-mode, whose kernels its host launches more slowly"""
    dispatcher: NotRequired[Literal["flex", "alltoall"]]
    """how tokens reach experts: flex (DeepEP, HybridEP) or alltoall (--moe-token-dispatcher-type)"""
    fused_norms: NotRequired[bool]
    """scaling: norms by one kernel each"""
    nvfp4: NotRequired[bool]
    """products in fp4 in place of train.precision's fp8 (--fp4-recipe nvfp4)"""
    overlap_experts: NotRequired[bool]
    """one micro-batch's tokens travel to experts beside another's products (--overlap-moe-expert-parallel-comm)"""


class Resources(TypedDict):
    """What kind of slot the ranks need, one slot each."""

    device: NotRequired[Literal["cpu", "cuda"]]
    """what a slot is"""
    engine: NotRequired[Literal["hosts", "slurm"]]
    """who runs it: the board's own hosts, or Slurm"""
    host: NotRequired[str | None]
    """only this host; any by default"""
    labels: NotRequired[list[str]]
    """only hosts that have all of these labels"""
    max_hosts: NotRequired[int | None]
    """hosts that the ranks may be spread over; any number by default"""
    pool: NotRequired[str | None]
    """only hosts of this pool"""
    slurm: NotRequired[SlurmSpec | None]
    """with engine slurm: what is asked of it"""
    software: NotRequired[SoftwareSpec | None]
    """what is known of that software beside its name; not for ours, which is known"""
    stack: NotRequired[
        Literal["ours", "megatron", "megatron_2021", "fsdp2", "fsdp2_eager", "fsdp1", "deepspeed", "scaling"]
    ]
    """software that time is planned for; what runs is ours"""


class RetrySpec(TypedDict):
    """Whether an attempt that failed or was lost is followed by another, from the newest checkpoint."""

    max_attempts: NotRequired[int]
    """attempts that may fail or be lost, the first too"""


class RunSpec(TypedDict):
    """When the board ends a run by itself."""

    idle_limit_s: NotRequired[int | None]
    """seconds without a step after which it ends and has failed"""
    preemptible: NotRequired[bool]
    """gives way to a waiting job of higher priority, and goes on later from its newest checkpoint"""
    time_limit_s: NotRequired[int | None]
    """seconds that an attempt may run; then it ends and has failed"""


class ScriptSpec(TypedDict):
    """A training script of the user's own, which torchrun starts on every rank of `layout.dp`."""

    args: NotRequired[list[str]]
    """what the script is given, each as it is"""
    cwd: NotRequired[str | None]
    """directory to run in: the script's own (the default) or below it; of a module, any below the root"""
    module: NotRequired[str | None]
    """instead of path: a module below the script root, as python -m takes it"""
    path: NotRequired[str | None]
    """below the host's script root"""


class TrainSpec(TypedDict):
    """What is trained on and for how long. Sizes in sequences and tokens."""

    attention: NotRequired[Literal["fused", "unfused"]]
    """unfused keeps every score (before FlashAttention)"""
    checkpoint_every: NotRequired[int]
    """steps between checkpoints; 0 is off"""
    column: NotRequired[str]
    """text column of JSONL and parquet"""
    compile: NotRequired[bool]
    """torch.compile each block"""
    data: NotRequired[str]
    """'stdlib', or a text file, directory, JSONL, parquet or .bin of uint16 tokens under the data root"""
    document_end: NotRequired[int | None]
    """token that ends a document, past which attention does not reach; none: it sees the whole sequence"""
    dropout: NotRequired[bool]
    """with dropout, whose masks are kept for backward"""
    eval_every: NotRequired[int]
    """steps between validations; 0 is off"""
    global_batch: NotRequired[int]
    """sequences per optimiser step"""
    grad_clip: NotRequired[float]
    """largest gradient norm; 0 is off"""
    keep_checkpoints: NotRequired[int]
    """newest checkpoints of an attempt that stay"""
    learning_rate: NotRequired[float]
    """the highest, after the warm-up"""
    micro_batches: NotRequired[int]
    """micro-batches per step on each dp replica"""
    on_not_finite: NotRequired[Literal["stop", "continue"]]
    """what a loss or gradient norm of nan or inf does"""
    overlap: NotRequired[bool]
    """gradients travel while backward still runs"""
    precision: NotRequired[Literal["fp32", "bf16", "bf16_gradients", "bf16_state", "fp8", "fp8_gradients"]]
    """planner.facts.precision says what is held in which"""
    resume: NotRequired[str | None]
    """checkpoint to go on from: job, job/attempt or job/attempt/step"""
    sampling: NotRequired[Literal["random", "epochs"]]
    """sequences from anywhere, or epochs: each part of the data once before any again"""
    seed: NotRequired[int]
    """of initial values, batches and dropout"""
    seq_len: NotRequired[int]
    """tokens per sequence"""
    steps: NotRequired[int]
    """optimiser steps"""
    tokenizer: NotRequired[str | None]
    """tokenizers JSON under the data root; bytes without"""
    verify: NotRequired[Literal["auto", "on", "off"]]
    """compute the first 3 steps, and one more at the end, also by one process and compare; auto does where that takes
    seconds
    """
    warmup_steps: NotRequired[int]
    """where not given, no more than steps"""
    weight_decay: NotRequired[float]
    """AdamW's"""


class JobSpecLayout(TypedDict):
    auto: AutoSpec


class JobSpec(TypedDict):
    """All that was asked for. Frozen; stored with the job as JSON."""

    after: NotRequired[list[str]]
    """jobs that must have ended before it starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """what becomes of it when one of those does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks that a dry run tries"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """calibrate measures a host for the planner; dry_run takes a step of ranks without their peers; script runs one of
    the user's own, metered; lab times and checks the primitives
    """
    lab: NotRequired[LabSpec | None]
    """what a lab runs; the defaults when left out"""
    layout: NotRequired[Layout | Literal["auto"] | JobSpecLayout]
    """degrees and options; "auto" has them chosen, {"auto": {...}} within constraints"""
    model: NotRequired[ModelSpec]
    name: NotRequired[str]
    """what lists and pages call it"""
    project: NotRequired[str]
    """whose quota and fair share it counts to"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """of the form of specs"""


class StoredSpec(TypedDict):
    """What was asked for, as it is stored: a layout also where one was chosen, and sizes in a preset's place."""

    after: NotRequired[list[str]]
    """jobs that must have ended before it starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """what becomes of it when one of those does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks that a dry run tries"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """calibrate measures a host for the planner; dry_run takes a step of ranks without their peers; script runs one of
    the user's own, metered; lab times and checks the primitives
    """
    lab: NotRequired[LabSpec | None]
    """what a lab runs; the defaults when left out"""
    layout: NotRequired[Layout]
    model: NotRequired[SizedModel]
    name: NotRequired[str]
    """what lists and pages call it"""
    project: NotRequired[str]
    """whose quota and fair share it counts to"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """of the form of specs"""


class SearchSpec(TypedDict):
    """All that was asked for. Frozen; stored with the job as JSON."""

    after: NotRequired[list[str]]
    """jobs that must have ended before it starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """what becomes of it when one of those does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks that a dry run tries"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """calibrate measures a host for the planner; dry_run takes a step of ranks without their peers; script runs one of
    the user's own, metered; lab times and checks the primitives
    """
    lab: NotRequired[LabSpec | None]
    """what a lab runs; the defaults when left out"""
    layout: NotRequired[Any]
    """ignored: `fixed` says what must stay"""
    model: NotRequired[ModelSpec]
    name: NotRequired[str]
    """what lists and pages call it"""
    project: NotRequired[str]
    """whose quota and fair share it counts to"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """of the form of specs"""


class SearchQuery(TypedDict):
    """What to search. The layout in `spec` is ignored: `fixed` holds what must stay."""

    spec: SearchSpec
    ranks: int
    cluster: NotRequired[str | None]
    fixed: NotRequired[Layout]
    limit: NotRequired[int]
    max_memory_bytes: NotRequired[int | None]
    max_micro_batch: NotRequired[int]
    runnable: NotRequired[bool]
    """only layouts that can be submitted today"""


class JobChange(TypedDict):
    """What is to be changed about one job; what is left out stays."""

    add_tags: NotRequired[list[str]]
    archived: NotRequired[bool | None]
    """whether lists leave it out; it must have ended"""
    remove_tags: NotRequired[list[str]]
