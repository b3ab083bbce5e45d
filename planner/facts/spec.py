"""The one job specification: the form, REST, the command line and the trainer all read this.

Types and ranges of single fields are stated here for pydantic; what needs two fields is checked by
`planner.facts.layout.problems`. `planner.facts.reading.parse` does both and reports every problem at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, model_validator

from planner.facts.fields import NO_NUL, JobId, Strict, Word
from planner.facts.resources import Resources

SPEC_VERSION: Literal[1] = 1

Arch = Literal["gpt", "llama"]
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
WARMUP_STEPS = 10
ROPE_BASE = 10_000.0  # RoFormer's (2104.09864)


class Problem(NamedTuple):
    """One thing wrong with a spec: the dotted field it belongs to, and the arithmetic in words."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot run. Carries every problem, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems


class MoeSpec(Strict):
    """Mixture of experts: the MLP of every layer but the first `dense_layers`, several times over with a router."""

    num_experts: int = Field(ge=2, le=4096, description="routed experts a layer")
    experts_per_token: int = Field(ge=1, le=256, description="experts a token is sent to (top-k)")
    expert_ffn_hidden_size: int = Field(ge=1, le=4_194_304, description="size inside an expert's MLP")
    shared_experts: int = Field(default=0, ge=0, le=64, description="experts that every token visits")
    dense_layers: int = Field(default=0, ge=0, le=1024, description="first layers with a dense MLP")
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="tokens an expert takes of a sequence, over an even share",
    )
    balance_loss: float = Field(default=0.01, ge=0, le=10, description="weight of the load-balancing loss")
    router_bias: bool = Field(default=False, description="a bias an expert in the router (DeepSeek-V3)")
    expert_bias: bool = Field(default=False, description="each expert's products add a bias (gpt-oss)")
    swiglu_limit: float | None = Field(
        default=None, gt=0, le=1e6, description="what an expert's gate and up are clamped to (gpt-oss: 7)"
    )


class MlaSpec(Strict):
    """Multi-head latent attention (DeepSeek-V2 2405.04434 section 2.1): low-rank queries, keys and values."""

    q_rank: int = Field(ge=1, le=65536, description="size that queries are compressed to")
    kv_rank: int = Field(
        ge=1, le=65536, description="size that keys and values are compressed to, what a cache would hold"
    )
    nope_head_dim: int = Field(ge=1, le=4096, description="query/key size a head without position")
    rope_head_dim: int = Field(ge=2, le=4096, description="query/key size with position; the key's is shared by heads")
    value_head_dim: int = Field(ge=1, le=4096, description="size of a value a head")


class RopeScaling(Strict):
    """Llama 3.1's stretch of rotary positions: slow turns are slowed by `factor`, fast ones kept, between them mixed.

    A turn is slow when it is longer than `original_max_seq_len / low_freq_factor` tokens, fast when shorter than
    `original_max_seq_len / high_freq_factor`.
    """

    factor: float = Field(gt=0, le=1e6, description="by which slow turns are slowed")
    low_freq_factor: float = Field(
        default=1.0, gt=0, le=1e6, description="turns longer than the original over this are slow"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, le=1e6, description="turns shorter than the original over this are fast"
    )
    original_max_seq_len: int = Field(ge=1, le=16_777_216, description="tokens of a sequence before the stretch")


class ModelSpec(Strict):
    """Shape of a decoder-only transformer.

    gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, RoPE, SwiGLU, GQA, no biases.
    """

    preset: str | None = Field(default=None, max_length=64, pattern=NO_NUL, description="preset these sizes come from")
    arch: Arch = Field(description="the block: gpt or llama, as said above")
    num_layers: int = Field(ge=1, le=1024, description="transformer layers")
    hidden_size: int = Field(ge=1, le=1_048_576, description="numbers that stand for a token between layers")
    num_heads: int = Field(ge=1, le=4096, description="attention heads a layer")
    num_kv_heads: int = Field(ge=1, le=4096, description="equal to num_heads without GQA")
    ffn_hidden_size: int = Field(ge=1, le=4_194_304, description="size inside the MLP")
    vocab_size: int = Field(ge=256, le=4_194_304, description="byte-level data needs 256")
    head_dim: int | None = Field(
        default=None, ge=1, le=65536, description="size of a head where it is not hidden_size / num_heads"
    )
    max_seq_len: int = Field(ge=1, le=16_777_216, description="tokens of the longest sequence")
    tied_embeddings: bool = Field(description="the head is the embedding table")
    rope_base: float = Field(default=ROPE_BASE, gt=1, le=1e12, description="base of rotary positions (llama)")
    rope_scaling: RopeScaling | None = Field(default=None, description="rotary positions stretched as Llama 3.1's")
    sliding_window: int | None = Field(
        default=None, ge=1, le=16_777_216, description="tokens that queries of every second layer see; all by default"
    )
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads


class Layout(Strict):
    """How the ranks divide the work. Rank order: tp innermost, then cp, dp, and pp outermost.

    Experts are divided over `ep` neighbours among the dp x cp ranks, so ep adds no ranks.
    """

    dp: Degree = Field(default=1, description="data parallel degree")
    pp: Degree = Field(default=1, description="pipeline parallel degree (stages)")
    tp: Degree = Field(default=1, description="tensor parallel degree")
    cp: Degree = Field(default=1, description="context parallel degree: parts of each sequence")
    ep: Degree = Field(default=1, description="expert parallel degree: experts over dp x cp ranks")
    zero: int = Field(default=0, ge=0, le=3, description="ZeRO stage; 0 is plain DDP")
    dp_replicas: Degree = Field(default=1, description="HSDP: ZeRO shards inside each of so many replicas")
    keep_gathered: bool = Field(
        default=False, description="ZeRO-3 under a pipe: what is gathered stays while a rank works on one chunk"
    )
    sequence_parallel: bool = Field(default=False, description="shard norms and residual along sequence over tp")
    regather: bool = Field(default=False, description="SP keeps inputs divided and gathers them again in backward")
    scatter_gather: bool = Field(default=False, description="each tp rank sends its part over a stage boundary")
    schedule: Schedule = Field(default="1f1b", description="pipeline schedule, used when pp > 1")
    balance: Balance = Field(default="layers", description="stages hold as many layers, or cost: the head counts too")
    virtual_stages: int = Field(default=1, ge=1, le=64, description="chunks of layers a stage holds")
    cp_method: ContextMethod = Field(default="ring", description="how cp ranks see each other's keys and values")
    recompute: Recompute = Field(default="none", description="activations computed again in backward")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold the same parameters, but for ZeRO: gradients are summed over dp x cp."""
        return self.dp * self.cp

    @property
    def shard_ranks(self) -> int:
        """Ranks that ZeRO divides model state over: those of one HSDP replica, all dp x cp without HSDP."""
        return self.replica_ranks // self.dp_replicas


def usual_warmup(steps: int) -> int:
    """Of a run whose spec gives none: one shorter than the usual warm-up warms up in all its steps."""
    return min(WARMUP_STEPS, steps)


class TrainSpec(Strict):
    """What is trained on and for how long. Sizes in sequences and tokens."""

    global_batch: int = Field(default=8, ge=1, le=1_000_000, description="sequences per optimiser step")
    micro_batches: int = Field(default=1, ge=1, le=100_000, description="micro-batches per step on each dp replica")
    seq_len: int = Field(default=128, ge=1, le=16_777_216, description="tokens per sequence")
    steps: int = Field(default=50, ge=1, le=100_000_000, description="optimiser steps")
    learning_rate: float = Field(default=1e-3, gt=0, le=10, description="the highest, after the warm-up")
    warmup_steps: int = Field(
        default=WARMUP_STEPS, ge=0, le=100_000_000, description="where not given, no more than steps"
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="AdamW's")
    grad_clip: float = Field(default=1.0, ge=0, le=1e6, description="largest gradient norm; 0 is off")
    precision: Precision = Field(default="fp32", description="planner.facts.precision says what is held in which")
    attention: AttentionKernel = Field(default="fused", description="unfused keeps every score (before FlashAttention)")
    overlap: bool = Field(default=True, description="gradients travel while backward still runs")
    compile: bool = Field(default=False, description="torch.compile each block")
    dropout: bool = Field(default=False, description="with dropout, whose masks are kept for backward")
    seed: int = Field(default=1234, ge=0, le=2**63 - 1, description="of initial values, batches and dropout")
    data: str = Field(
        default="stdlib",
        min_length=1,
        max_length=4096,
        pattern=NO_NUL,
        description="'stdlib', or a text file, directory, JSONL, parquet or .bin of uint16 tokens under the data root",
    )
    column: str = Field(
        default="text", min_length=1, max_length=200, pattern=NO_NUL, description="text column of JSONL and parquet"
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        pattern=NO_NUL,
        description="tokenizers JSON under the data root; bytes without",
    )
    sampling: Sampling = Field(
        default="random", description="sequences from anywhere, or epochs: each part of the data once before any again"
    )
    document_end: int | None = Field(
        default=None,
        ge=0,
        le=4_194_303,
        description="token that ends a document, past which attention does not reach; none: it sees the whole sequence",
    )
    checkpoint_every: int = Field(default=0, ge=0, le=100_000_000, description="steps between checkpoints; 0 is off")
    keep_checkpoints: int = Field(default=2, ge=1, le=1000, description="newest checkpoints of an attempt that stay")
    resume: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=NO_NUL,
        description="checkpoint to go on from: job, job/attempt or job/attempt/step",
    )
    eval_every: int = Field(default=25, ge=0, le=100_000_000, description="steps between validations; 0 is off")
    on_not_finite: OnNotFinite = Field(default="stop", description="what a loss or gradient norm of nan or inf does")
    verify: Verify = Field(
        default="auto",
        description="compute the first 3 steps, and one more at the end, also by one process and compare; auto does "
        "where that takes seconds",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_warmup(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "warmup_steps" in data:
            return data
        steps = data.get("steps")
        return {**data, "warmup_steps": usual_warmup(steps)} if type(steps) is int and steps > 0 else data


Argument = Annotated[str, Field(max_length=4096, pattern=NO_NUL)]


class ScriptSpec(Strict):
    """A training script of the user's own, which torchrun starts on every rank of `layout.dp`."""

    path: str | None = Field(
        default=None, min_length=1, max_length=1000, pattern=r"^[^\x00]+$", description="below the host's script root"
    )
    module: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00]+$",
        description="instead of path: a module below the script root, as python -m takes it",
    )
    args: list[Argument] = Field(default=[], max_length=200, description="what the script is given, each as it is")
    cwd: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        pattern=r"^[^\x00]+$",
        description="directory to run in: the script's own (the default) or below it; of a module, any below the root",
    )


class RunSpec(Strict):
    """When the board ends a run by itself."""

    time_limit_s: int | None = Field(
        default=None, ge=1, le=31_536_000, description="seconds that an attempt may run; then it ends and has failed"
    )
    idle_limit_s: int | None = Field(
        default=None, ge=10, le=31_536_000, description="seconds without a step after which it ends and has failed"
    )
    preemptible: bool = Field(
        default=False,
        description="gives way to a waiting job of higher priority, and goes on later from its newest checkpoint",
    )


class RetrySpec(Strict):
    """Whether an attempt that failed or was lost is followed by another, from the newest checkpoint."""

    max_attempts: int = Field(default=1, ge=1, le=100, description="attempts that may fail or be lost, the first too")


def _every_primitive(value: object) -> object:
    return list(LAB_PRIMITIVES) if value == "all" else value


class LabSpec(Strict):
    """The collective lab: each primitive at each size, timed and checked, over a group of the job's ranks.

    Sizes are bytes of the full (gathered) buffer, rounded down to whole elements for every rank.
    """

    primitives: Annotated[
        list[LabPrimitive],
        Field(min_length=1, max_length=len(LAB_PRIMITIVES), description="a list of them, or all"),
        BeforeValidator(_every_primitive, json_schema_input_type=list[LabPrimitive] | Literal["all"]),
    ] = list(LAB_PRIMITIVES)
    min_bytes: int = Field(default=2**10, ge=2, le=2**32, description="the smallest size")
    max_bytes: int = Field(default=2**20, ge=2, le=2**32, description="the largest size")
    factor: int = Field(default=4, ge=2, le=1024, description="each size over the one before it")
    iterations: int = Field(default=20, ge=1, le=10_000, description="timed and checked calls of each size")
    warmup: int = Field(default=5, ge=0, le=1000, description="calls before them")
    dtype: LabDtype = Field(default="float32", description="type of the elements")
    ranks: list[DryRank] | None = Field(
        default=None, min_length=1, max_length=1024, description="ranks that form the group, in order; all by default"
    )
    root: DryRank | None = Field(default=None, description="a rank of the group; its first by default")
    reduce_op: Literal["sum", "max"] = Field(default="sum", description="of what is reduced")


class JobSpec(Strict):
    """All that was asked for. Frozen; stored with the job as JSON."""

    version: Literal[1] = Field(default=SPEC_VERSION, description="of the form of specs")
    kind: JobKind = Field(
        default="train",
        description="calibrate measures a host for the planner; dry_run takes a step of ranks without their peers; "
        "script runs one of the user's own, metered; lab times and checks the primitives",
    )
    name: str = Field(
        default="untitled",
        min_length=1,
        max_length=100,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="what lists and pages call it",
    )
    model: ModelSpec
    layout: Layout = Layout()
    train: TrainSpec = TrainSpec()
    resources: Resources = Resources()
    project: Word = Field(default="default", description="whose quota and fair share it counts to")
    run: RunSpec = RunSpec()
    retry: RetrySpec = RetrySpec()
    after: list[JobId] = Field(default=[], max_length=32, description="jobs that must have ended before it starts")
    after_failed: AfterFailed = Field(
        default="cancel", description="what becomes of it when one of those does not succeed"
    )
    script: ScriptSpec | None = None
    dry_ranks: list[DryRank] = Field(default=[0], min_length=1, max_length=64, description="ranks that a dry run tries")
    lab: LabSpec | None = Field(default=None, description="what a lab runs; the defaults when left out")

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one micro-batch of one dp replica."""
        return self.train.global_batch // (self.layout.dp * self.train.micro_batches)
