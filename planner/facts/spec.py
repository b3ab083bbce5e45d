"""Define the job spec that the form, REST, the command line, and the trainer use.

Pydantic checks types and ranges of single fields. `planner.facts.spec_rules.find_problems` checks rules across fields.
`planner.facts.parse_spec` does both and reports every problem at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from planner.facts.log_pattern import MAX_PATTERN_CHARS
from planner.facts.memory_options import MemoryOptions
from planner.facts.model_parts import Arch, BlockSpec, MlaSpec, MoeSpec, RopeScaling, resolve_block
from planner.facts.resources import Resources
from planner.facts.validation import NO_NUL, JobId, StrictModel, Word

SPEC_VERSION: Literal[1] = 1

Schedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
Recompute = Literal["none", "selective", "full"]
ContextMethod = Literal["ring", "all_gather"]
AttentionKernel = Literal["fused", "unfused"]
Balance = Literal["layers", "cost"]
Precision = Literal["fp32", "bf16", "bf16_gradients", "bf16_state", "fp8", "fp8_gradients"]
OnNotFinite = Literal["stop", "continue"]
Sampling = Literal["random", "epochs"]
Verify = Literal["auto", "on", "off"]
JobKind = Literal["train", "calibrate", "dry_run", "script", "lab"]
LabPrimitive = Literal[
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
LAB_PRIMITIVES: tuple[LabPrimitive, ...] = get_args(LabPrimitive)
LabDtype = Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"]

AfterFailed = Literal["cancel", "start"]
DryRank = Annotated[int, Field(ge=0, le=65535)]
Degree = Annotated[int, Field(ge=1, le=65536)]
DEFAULT_WARMUP_STEPS = 10
DEFAULT_ROPE_BASE = 10_000.0  # RoFormer (2104.09864).


class ModelSpec(StrictModel):
    """Shape of a decoder-only transformer.

    gpt has LayerNorm, GELU, learned positions, and biases. llama has RMSNorm, RoPE, SwiGLU, GQA, and no biases.
    """

    preset: str | None = Field(
        default=None, max_length=64, pattern=NO_NUL, description="model preset that sets the default sizes"
    )
    arch: Arch = Field(description="block type: gpt or llama")
    num_layers: int = Field(ge=1, le=1024, description="transformer layers")
    hidden_size: int = Field(ge=1, le=1_048_576, description="hidden size")
    num_heads: int = Field(ge=1, le=4096, description="attention heads per layer")
    num_kv_heads: int = Field(ge=1, le=4096, description="key/value heads per layer; equal to num_heads without GQA")
    ffn_hidden_size: int = Field(ge=1, le=4_194_304, description="hidden size of the MLP")
    vocab_size: int = Field(ge=256, le=4_194_304, description="vocabulary size; byte-level data needs 256")
    head_dim: int | None = Field(
        default=None, ge=1, le=65536, description="size of each attention head; default hidden_size / num_heads"
    )
    max_seq_len: int = Field(ge=1, le=16_777_216, description="longest sequence (tokens)")
    tied_embeddings: bool = Field(description="the output layer shares the weights of the embedding")
    rope_base: float = Field(default=DEFAULT_ROPE_BASE, gt=1, le=1e12, description="RoPE base (llama)")
    rope_scaling: RopeScaling | None = Field(default=None, description="RoPE scaling as in Llama 3.1")
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="attention window of every second layer (tokens); full attention by default",
    )
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    block: BlockSpec | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def parts(self) -> BlockSpec:
        """Return the block, with a value in every field that follows `arch`."""
        return resolve_block(self.arch, self.block)

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP multiplies two projections of its input."""
        return self.arch == "llama"

    @property
    def has_rope(self) -> bool:
        return self.parts.positions == "rope"

    @property
    def has_learned_positions(self) -> bool:
        return self.parts.positions == "learned"

    @property
    def num_windowed_layers(self) -> int:
        """Return the layers with sliding-window attention."""
        if not self.sliding_window:
            return 0
        return self.num_layers // 2 if self.parts.windowed_layers is None else self.parts.windowed_layers


class Layout(StrictModel):
    """Parallel layout. Rank order from the inside out is tp, cp, dp, pp.

    ep splits the experts over neighbors among the dp x cp ranks, so ep adds no ranks.
    """

    dp: Degree = Field(default=1, description="data parallel degree")
    pp: Degree = Field(default=1, description="pipeline parallel degree (stages)")
    tp: Degree = Field(default=1, description="tensor parallel degree")
    cp: Degree = Field(default=1, description="context parallel degree; each sequence is split over cp ranks")
    ep: Degree = Field(default=1, description="expert parallel degree; experts are split over dp x cp ranks")
    zero: int = Field(default=0, ge=0, le=3, description="ZeRO stage; 0 is DDP")
    dp_replicas: Degree = Field(
        default=1, description="number of HSDP replicas; ZeRO shards model state inside each replica"
    )
    keep_gathered: bool = Field(
        default=False,
        description="with ZeRO-3 and pp > 1, keep gathered parameters until the rank starts another chunk",
    )
    sequence_parallel: bool = Field(
        default=False, description="shard norms and residuals along the sequence over tp ranks"
    )
    regather: bool = Field(
        default=False, description="with sequence_parallel, store sharded inputs and all-gather them again in backward"
    )
    scatter_gather: bool = Field(default=False, description="each tp rank sends only its shard between pipeline stages")
    schedule: Schedule = Field(default="1f1b", description="pipeline schedule, used when pp > 1")
    balance: Balance = Field(
        default="layers",
        description="split layers over stages evenly (layers), or by cost including the output layer (cost)",
    )
    virtual_stages: int = Field(default=1, ge=1, le=64, description="number of layer chunks per pipeline stage")
    cp_method: ContextMethod = Field(default="ring", description="how cp ranks exchange keys and values")
    recompute: Recompute = Field(default="none", description="recompute activations during backward")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    @property
    def replica_ranks(self) -> int:
        """Return the ranks that sum a gradient, dp x cp. Without ZeRO they are replicas."""
        return self.dp * self.cp

    @property
    def shard_ranks(self) -> int:
        """Return the ranks that ZeRO shards model state over: those of one HSDP replica."""
        return self.replica_ranks // self.dp_replicas


def get_default_warmup(steps: int) -> int:
    """Return the default warm-up steps: at most all steps of the run."""
    return min(DEFAULT_WARMUP_STEPS, steps)


class TrainSpec(StrictModel):
    """Training data, batch sizes, optimizer, and run length."""

    global_batch: int = Field(default=8, ge=1, le=1_000_000, description="sequences per optimizer step")
    micro_batches: int = Field(
        default=1, ge=1, le=100_000, description="number of micro-batches per step in each dp replica"
    )
    seq_len: int = Field(default=128, ge=1, le=16_777_216, description="tokens per sequence")
    steps: int = Field(default=50, ge=1, le=100_000_000, description="optimizer steps")
    learning_rate: float = Field(default=1e-3, gt=0, le=10, description="peak learning rate, after warm-up")
    warmup_steps: int = Field(
        default=DEFAULT_WARMUP_STEPS,
        ge=0,
        le=100_000_000,
        description="learning rate warm-up (steps); default 10, at most steps",
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="AdamW weight decay")
    grad_clip: float = Field(default=1.0, ge=0, le=1e6, description="gradient norm limit; 0 disables clipping")
    precision: Precision = Field(
        default="fp32", description="number types of weights, gradients, optimizer state, and matmuls"
    )
    attention: AttentionKernel = Field(
        default="fused", description="attention kernel: fused, or unfused, which stores all attention scores"
    )
    overlap: bool = Field(default=True, description="reduce gradients during backward")
    compile: bool = Field(default=False, description="compile each block with torch.compile")
    dropout: bool = Field(default=False, description="use dropout and keep its masks for backward")
    seed: int = Field(default=1234, ge=0, le=2**63 - 1, description="random seed of weights, batches, and dropout")
    data: str = Field(
        default="stdlib",
        min_length=1,
        max_length=4096,
        pattern=NO_NUL,
        description="stdlib, or the path of text, JSONL, parquet, or .bin (uint16 tokens) data below the data root",
    )
    column: str = Field(
        default="text",
        min_length=1,
        max_length=200,
        pattern=NO_NUL,
        description="name of the text column in JSONL or parquet data",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        pattern=NO_NUL,
        description="path of a tokenizers JSON file below the data root; by default, each byte is a token",
    )
    sampling: Sampling = Field(
        default="random",
        description="order of the data: random positions, or epochs, which read all data once per epoch",
    )
    document_end: int | None = Field(
        default=None,
        ge=0,
        le=4_194_303,
        description="token id that ends a document and limits attention to that document; off by default",
    )
    checkpoint_every: int = Field(
        default=0, ge=0, le=100_000_000, description="steps between checkpoints; 0 disables checkpoints"
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, le=1000, description="number of newest checkpoints that each attempt keeps"
    )
    resume: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=NO_NUL,
        description="checkpoint to resume from: job, job/attempt, or job/attempt/step",
    )
    eval_every: int = Field(
        default=25, ge=0, le=100_000_000, description="steps between validations; 0 disables validation"
    )
    on_not_finite: OnNotFinite = Field(
        default="stop", description="whether to stop or continue when the loss or gradient norm is NaN or infinite"
    )
    verify: Verify = Field(
        default="auto",
        description="compare the first 3 steps and one final step with a single-process reference; "
        "auto skips the comparison if the reference needs too much memory or time",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_warmup(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "warmup_steps" in data:
            return data
        steps = data.get("steps")
        return {**data, "warmup_steps": get_default_warmup(steps)} if type(steps) is int and steps > 0 else data


Argument = Annotated[str, Field(max_length=4096, pattern=NO_NUL)]


class ScriptPlan(StrictModel):
    """Model and batch that a script trains, for the prediction on the job page."""

    model: ModelSpec
    layout: Layout | None = Field(
        default=None, description="parallel layout; by default, inferred from the process groups of the run"
    )
    train: TrainSpec = TrainSpec()


class ScriptSpec(StrictModel):
    """The user's own training script. Torchrun starts it on `layout.dp` ranks, or a command starts all ranks."""

    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        pattern=r"^[^\x00]+$",
        description="path of the script below the host's script root",
    )
    module: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00]+$",
        description="module below the script root that `python -m` runs, instead of path",
    )
    command: str | None = Field(
        default=None,
        min_length=1,
        max_length=8000,
        pattern=r"^[^\x00]+$",
        description="command line that starts all ranks on one host, instead of path (words as in a shell)",
    )
    upload: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of one of your uploads; path and cwd are then inside this upload",
    )
    args: list[Argument] = Field(
        default=[], max_length=200, description="arguments of the script, passed without shell expansion"
    )
    cwd: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        pattern=r"^[^\x00]+$",
        description="working directory: the script's folder (default) or a folder below it; for a module or a "
        "command, below the script root; for an upload, inside the upload",
    )
    plan: ScriptPlan | None = Field(
        default=None, description="model and batch of the script, to compare a prediction with the measurement"
    )
    log_pattern: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PATTERN_CHARS,
        pattern=NO_NUL,
        description="regular expression for metrics in log lines, with named groups such as step and loss; "
        "default: the formats of common frameworks",
    )


class RunSpec(StrictModel):
    """Limits after which the board ends a run."""

    time_limit_s: int | None = Field(
        default=None, ge=1, le=31_536_000, description="run time limit per attempt (seconds); the attempt then fails"
    )
    idle_limit_s: int | None = Field(
        default=None, ge=10, le=31_536_000, description="time limit without a step (seconds); the attempt then fails"
    )
    preemptible: bool = Field(
        default=False,
        description="pause the job if a job of higher priority waits, and resume it later from the newest checkpoint",
    )


class RetrySpec(StrictModel):
    """Retries after a failed or lost attempt, from the newest checkpoint."""

    max_attempts: int = Field(
        default=1, ge=1, le=100, description="maximum number of failed or lost attempts, including the first attempt"
    )


def _expand_all(value: object) -> object:
    return list(LAB_PRIMITIVES) if value == "all" else value


class LabSpec(StrictModel):
    """Benchmark of collectives. Times and checks each primitive at each size over a group of ranks.

    A size is the full (gathered) buffer in bytes, rounded down to whole elements per rank.
    """

    primitives: Annotated[
        list[LabPrimitive],
        Field(min_length=1, max_length=len(LAB_PRIMITIVES), description="list of collectives to benchmark, or all"),
        BeforeValidator(_expand_all, json_schema_input_type=list[LabPrimitive] | Literal["all"]),
    ] = list(LAB_PRIMITIVES)
    min_bytes: int = Field(default=2**10, ge=2, le=2**32, description="smallest buffer (bytes)")
    max_bytes: int = Field(default=2**20, ge=2, le=2**32, description="largest buffer (bytes)")
    factor: int = Field(default=4, ge=2, le=1024, description="ratio of each buffer size to the previous buffer size")
    iterations: int = Field(
        default=20, ge=1, le=10_000, description="number of timed and checked calls per buffer size"
    )
    warmup: int = Field(default=5, ge=0, le=1000, description="number of untimed warm-up calls per buffer size")
    dtype: LabDtype = Field(default="float32", description="element type")
    ranks: list[DryRank] | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="ranks of the benchmarked group, in order; all ranks by default",
    )
    root: DryRank | None = Field(
        default=None, description="root rank of rooted collectives; default the first rank of the group"
    )
    reduce_op: Literal["sum", "max"] = Field(default="sum", description="reduction operator")


class JobSpec(StrictModel):
    """Job specification. Frozen, and stored as JSON with the job."""

    version: Literal[1] = Field(default=SPEC_VERSION, description="version of the spec format")
    kind: JobKind = Field(
        default="train",
        description="kind of job: train, script (own script), calibrate (measure a host), "
        "dry_run (one step without peers), or lab (time collectives)",
    )
    name: str = Field(
        default="untitled",
        min_length=1,
        max_length=100,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="name of the job",
    )
    model: ModelSpec
    layout: Layout = Layout()
    train: TrainSpec = TrainSpec()
    memory: MemoryOptions | None = Field(
        default=None, description="LoRA, quantized weights, other optimizers, and offload, for estimates only"
    )
    resources: Resources = Resources()
    project: Word = Field(default="default", description="project whose quota and fair share the job uses")
    run: RunSpec = RunSpec()
    retry: RetrySpec = RetrySpec()
    after: list[JobId] = Field(
        default=[], max_length=32, description="ids of the jobs that need to end before this job starts"
    )
    after_failed: AfterFailed = Field(
        default="cancel", description="whether to cancel or start this job if a job listed in after does not succeed"
    )
    script: ScriptSpec | None = None
    dry_ranks: list[DryRank] = Field(
        default=[0], min_length=1, max_length=64, description="ranks whose step the dry run computes"
    )
    lab: LabSpec | None = Field(
        default=None, description="settings of a collective benchmark; each missing setting has its default"
    )

    @property
    def micro_batch_size(self) -> int:
        """Return the sequences in one micro-batch of one dp replica."""
        return self.train.global_batch // (self.layout.dp * self.train.micro_batches)
