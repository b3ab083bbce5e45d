"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.layouts import AutoSpec, Layout
from meshboard.answers.models import ModelSpec, SizedModel


class LabSpec(TypedDict):
    """Benchmark of collectives. Times and checks each primitive at each size over a group of ranks.

    A size is the full (gathered) buffer in bytes, rounded down to whole elements per rank.
    """

    dtype: NotRequired[Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"]]
    """element type"""
    factor: NotRequired[int]
    """ratio of each buffer size to the previous buffer size"""
    iterations: NotRequired[int]
    """number of timed and checked calls per buffer size"""
    max_bytes: NotRequired[int]
    """largest buffer (bytes)"""
    min_bytes: NotRequired[int]
    """smallest buffer (bytes)"""
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
    """list of collectives to benchmark, or all"""
    ranks: NotRequired[list[int] | None]
    """ranks of the benchmarked group, in order; all ranks by default"""
    reduce_op: NotRequired[Literal["sum", "max"]]
    """reduction operator"""
    root: NotRequired[int | None]
    """root rank of rooted collectives; default the first rank of the group"""
    warmup: NotRequired[int]
    """number of untimed warm-up calls per buffer size"""


class MemoryOptions(TypedDict):
    """Methods that lower the memory of training, for estimates only."""

    chunked_loss: NotRequired[bool]
    """compute logits and loss in eight chunks of the tokens"""
    frozen_weights: NotRequired[Literal["own", "int8", "nf4"]]
    """number type of frozen matrices: own (as in the precision), int8 (LLM.int8), or nf4 (QLoRA)"""
    lora_rank: NotRequired[int | None]
    """rank of LoRA adapters; all other weights are frozen"""
    lora_targets: NotRequired[Literal["attention", "all_linear"]]
    """matrices with LoRA adapters: of attention, or of all linear layers"""
    offload: NotRequired[Literal["none", "optimizer", "optimizer_and_parameters"]]
    """model state in CPU memory: none, optimizer, or optimizer_and_parameters"""
    offload_activations: NotRequired[bool]
    """move the activations that layers keep for backward to CPU memory"""
    optimizer: NotRequired[Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"]]
    """optimizer: adamw, adamw_8bit and paged_adamw_8bit (bitsandbytes), adafactor, or muon"""
    optimizer_in_backward: NotRequired[bool]
    """update each weight in backward and free its gradient; needs one micro-batch"""


class SlurmSpec(TypedDict):
    """Slurm options. The cluster decides the options that are missing."""

    account: NotRequired[str | None]
    """Slurm account"""
    constraint: NotRequired[str | None]
    """required Slurm node features"""
    cpus_per_rank: NotRequired[int]
    """CPU cores per rank"""
    exclude: NotRequired[str | None]
    """Slurm nodes to exclude"""
    nodes: NotRequired[int]
    """number of Slurm nodes; each node runs the same number of ranks"""
    partition: NotRequired[str | None]
    """Slurm partition, or a comma-separated list of partitions"""
    qos: NotRequired[str | None]
    """Slurm quality of service"""
    time_limit: NotRequired[str | None]
    """Slurm time limit as [days-]hours:minutes:seconds"""


class SoftwareSpec(TypedDict):
    """Options of another software stack, for estimates only. Missing options have their defaults.

    megatron accepts all options except fused_norms. scaling accepts attention_kernel and fused_norms. Other stacks
    accept no options.
    """

    attention_kernel: NotRequired[Literal["own", "flash_1", "flash_2", "eager"]]
    """attention kernel: own (the stack's default), flash_2 (megatron), flash_1 or eager (scaling)"""
    cuda_graphs: NotRequired[Literal["none", "router", "attention", "attention_and_router", "whole"]]
    """parts of a layer that run in CUDA graphs (Megatron's --cuda-graph-modules)"""
    deterministic: NotRequired[bool]
    """use deterministic kernels, which take longer to launch (Megatron's --deterministic-mode)"""
    dispatcher: NotRequired[Literal["flex", "alltoall"]]
    """token dispatcher: flex (DeepEP, HybridEP) or alltoall (--moe-token-dispatcher-type)"""
    fused_norms: NotRequired[bool]
    """compute each norm in one fused kernel (scaling)"""
    nvfp4: NotRequired[bool]
    """use NVFP4 matmuls instead of fp8 matmuls (--fp4-recipe nvfp4)"""
    overlap_experts: NotRequired[bool]
    """overlap expert communication with computation (--overlap-moe-expert-parallel-comm)"""


class Resources(TypedDict):
    """Hosts and slots of the job. Each rank needs one slot."""

    device: NotRequired[Literal["cpu", "cuda"]]
    """device of each slot"""
    disk_limit_bytes: NotRequired[int | None]
    """limit of the job's files on each host (bytes), above which the job fails; the host reserves this space, and can
    have a lower limit
    """
    engine: NotRequired[Literal["hosts", "slurm"]]
    """engine that runs the job: hosts (the board's hosts) or slurm"""
    host: NotRequired[str | None]
    """name of the host that runs the job; any host by default"""
    labels: NotRequired[list[str]]
    """labels that each host of the job needs"""
    max_hosts: NotRequired[int | None]
    """maximum number of hosts for the job; no limit by default"""
    pool: NotRequired[str | None]
    """pool whose hosts run the job"""
    slurm: NotRequired[SlurmSpec | None]
    """Slurm options; used only with engine slurm"""
    software: NotRequired[SoftwareSpec | None]
    """options of the software stack, for estimates only. Meshboard's trainer has no options."""
    stack: NotRequired[
        Literal["unknown", "ours", "megatron", "megatron_2021", "fsdp2", "fsdp2_eager", "fsdp1", "deepspeed", "scaling"]
    ]
    """software stack whose step time is estimated; jobs always run Meshboard's trainer"""


class RetrySpec(TypedDict):
    """Retries after a failed or lost attempt, from the newest checkpoint."""

    max_attempts: NotRequired[int]
    """maximum number of failed or lost attempts, including the first attempt"""


class RunSpec(TypedDict):
    """Limits after which the board ends a run."""

    idle_limit_s: NotRequired[int | None]
    """time limit without a step (seconds); the attempt then fails"""
    preemptible: NotRequired[bool]
    """pause the job if a job of higher priority waits, and resume it later from the newest checkpoint"""
    time_limit_s: NotRequired[int | None]
    """run time limit per attempt (seconds); the attempt then fails"""


class TrainSpec(TypedDict):
    """Training data, batch sizes, optimizer, and run length."""

    attention: NotRequired[Literal["fused", "unfused"]]
    """attention kernel: fused, or unfused, which stores all attention scores"""
    checkpoint_every: NotRequired[int]
    """steps between checkpoints; 0 disables checkpoints"""
    column: NotRequired[str]
    """name of the text column in JSONL or parquet data"""
    compile: NotRequired[bool]
    """compile each block with torch.compile"""
    data: NotRequired[str]
    """stdlib, or the path of text, JSONL, parquet, or .bin (uint16 tokens) data below the data root"""
    document_end: NotRequired[int | None]
    """token id that ends a document and limits attention to that document; off by default"""
    dropout: NotRequired[bool]
    """use dropout and keep its masks for backward"""
    eval_every: NotRequired[int]
    """steps between validations; 0 disables validation"""
    global_batch: NotRequired[int]
    """sequences per optimizer step"""
    grad_clip: NotRequired[float]
    """gradient norm limit; 0 disables clipping"""
    keep_checkpoints: NotRequired[int]
    """number of newest checkpoints that each attempt keeps"""
    learning_rate: NotRequired[float]
    """peak learning rate, after warm-up"""
    micro_batches: NotRequired[int]
    """number of micro-batches per step in each dp replica"""
    on_not_finite: NotRequired[Literal["stop", "continue"]]
    """whether to stop or continue when the loss or gradient norm is NaN or infinite"""
    overlap: NotRequired[bool]
    """reduce gradients during backward"""
    precision: NotRequired[Literal["fp32", "bf16", "bf16_gradients", "bf16_state", "fp8", "fp8_gradients"]]
    """number types of weights, gradients, optimizer state, and matmuls"""
    resume: NotRequired[str | None]
    """checkpoint to resume from: job, job/attempt, or job/attempt/step"""
    sampling: NotRequired[Literal["random", "epochs"]]
    """order of the data: random positions, or epochs, which read all data once per epoch"""
    seed: NotRequired[int]
    """random seed of weights, batches, and dropout"""
    seq_len: NotRequired[int]
    """tokens per sequence"""
    steps: NotRequired[int]
    """optimizer steps"""
    tokenizer: NotRequired[str | None]
    """path of a tokenizers JSON file below the data root; by default, each byte is a token"""
    verify: NotRequired[Literal["auto", "on", "off"]]
    """compare the first 3 steps and one final step with a single-process reference; auto skips the comparison if the
    reference needs too much memory or time
    """
    warmup_steps: NotRequired[int]
    """learning rate warm-up (steps); default 10, at most steps"""
    weight_decay: NotRequired[float]
    """AdamW weight decay"""


class ScriptPlan(TypedDict):
    """Model and batch that a script trains, for the prediction on the job page."""

    model: ModelSpec
    layout: NotRequired[Layout | None]
    """parallel layout; by default, inferred from the process groups of the run"""
    train: NotRequired[TrainSpec]


class ScriptSpec(TypedDict):
    """The user's own training script. Torchrun starts it on `layout.dp` ranks, or a command starts all ranks."""

    args: NotRequired[list[str]]
    """arguments of the script, passed without shell expansion"""
    command: NotRequired[str | None]
    """command line that starts all ranks on one host, instead of path (words as in a shell)"""
    cwd: NotRequired[str | None]
    """working directory: the script's folder (default) or a folder below it; for a module or a command, below the
    script root; for an upload, inside the upload
    """
    log_pattern: NotRequired[str | None]
    """regular expression for metrics in log lines, with named groups such as step and loss; default: the formats of
    common frameworks
    """
    module: NotRequired[str | None]
    """module below the script root that `python -m` runs, instead of path"""
    path: NotRequired[str | None]
    """path of the script below the host's script root"""
    plan: NotRequired[ScriptPlan | None]
    """model and batch of the script, to compare a prediction with the measurement"""
    upload: NotRequired[str | None]
    """SHA-256 of one of your uploads; path and cwd are then inside this upload"""


class JobSpecLayout(TypedDict):
    auto: AutoSpec


class JobSpec(TypedDict):
    """Job specification. Frozen, and stored as JSON with the job."""

    after: NotRequired[list[str]]
    """ids of the jobs that need to end before this job starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """whether to cancel or start this job if a job listed in after does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks whose step the dry run computes"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """kind of job: train, script (own script), calibrate (measure a host), dry_run (one step without peers), or lab
    (time collectives)
    """
    lab: NotRequired[LabSpec | None]
    """settings of a collective benchmark; each missing setting has its default"""
    layout: NotRequired[Layout | Literal["auto"] | JobSpecLayout]
    """Parallel layout. With "auto", Meshboard chooses a layout. {"auto": {...}} also sets constraints."""
    memory: NotRequired[MemoryOptions | None]
    """LoRA, quantized weights, other optimizers, and offload, for estimates only"""
    model: NotRequired[ModelSpec]
    name: NotRequired[str]
    """name of the job"""
    project: NotRequired[str]
    """project whose quota and fair share the job uses"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """version of the spec format"""


class StoredSpec(TypedDict):
    """The stored spec, with the chosen layout and the sizes of the model preset."""

    after: NotRequired[list[str]]
    """ids of the jobs that need to end before this job starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """whether to cancel or start this job if a job listed in after does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks whose step the dry run computes"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """kind of job: train, script (own script), calibrate (measure a host), dry_run (one step without peers), or lab
    (time collectives)
    """
    lab: NotRequired[LabSpec | None]
    """settings of a collective benchmark; each missing setting has its default"""
    layout: NotRequired[Layout]
    memory: NotRequired[MemoryOptions | None]
    """LoRA, quantized weights, other optimizers, and offload, for estimates only"""
    model: NotRequired[SizedModel]
    name: NotRequired[str]
    """name of the job"""
    project: NotRequired[str]
    """project whose quota and fair share the job uses"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """version of the spec format"""


class StepMeasurement(TypedDict):
    """Measured step of one layout. The model, precision, and software are those of the planned spec."""

    global_batch: NotRequired[int | None]
    """as in `train`; default that of the planned spec"""
    layout: NotRequired[Layout]
    """layout of the measured run"""
    micro_batches: NotRequired[int | None]
    """as in `train`; default 1"""
    seq_len: NotRequired[int | None]
    """as in `train`; default that of the planned spec"""
    step_s: NotRequired[float | None]
    """measured seconds per step"""
    tokens_per_s_per_gpu: NotRequired[float | None]
    """measured tokens per second and GPU, instead of `step_s`"""


class SearchSpec(TypedDict):
    """Job specification. Frozen, and stored as JSON with the job."""

    after: NotRequired[list[str]]
    """ids of the jobs that need to end before this job starts"""
    after_failed: NotRequired[Literal["cancel", "start"]]
    """whether to cancel or start this job if a job listed in after does not succeed"""
    dry_ranks: NotRequired[list[int]]
    """ranks whose step the dry run computes"""
    kind: NotRequired[Literal["train", "calibrate", "dry_run", "script", "lab"]]
    """kind of job: train, script (own script), calibrate (measure a host), dry_run (one step without peers), or lab
    (time collectives)
    """
    lab: NotRequired[LabSpec | None]
    """settings of a collective benchmark; each missing setting has its default"""
    layout: NotRequired[Any]
    """Ignored. To keep layout values, use `fixed`."""
    memory: NotRequired[MemoryOptions | None]
    """LoRA, quantized weights, other optimizers, and offload, for estimates only"""
    model: NotRequired[ModelSpec]
    name: NotRequired[str]
    """name of the job"""
    project: NotRequired[str]
    """project whose quota and fair share the job uses"""
    resources: NotRequired[Resources]
    retry: NotRequired[RetrySpec]
    run: NotRequired[RunSpec]
    script: NotRequired[ScriptSpec | None]
    train: NotRequired[TrainSpec]
    version: NotRequired[Literal[1]]
    """version of the spec format"""


class SearchRequest(TypedDict):
    """A search. The layout in `spec` is ignored, and `fixed` has the values that stay."""

    spec: SearchSpec
    ranks: int
    cluster: NotRequired[str | None]
    fixed: NotRequired[Layout]
    limit: NotRequired[int]
    max_memory_bytes: NotRequired[int | None]
    max_micro_batch: NotRequired[int]
    measured_steps: NotRequired[list[StepMeasurement]]
    """Steps that you measured with the planned model and software. They correct every step time."""
    runnable: NotRequired[bool]
    """Return only layouts that the trainer can run."""


class JobChange(TypedDict):
    """A change of one job. Omitted fields stay unchanged."""

    add_tags: NotRequired[list[str]]
    archived: NotRequired[bool | None]
    """With true, an ended job is archived. With false, an archived job is restored."""
    remove_tags: NotRequired[list[str]]
