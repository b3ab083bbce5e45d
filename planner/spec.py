"""The one job specification: the form, REST, the command line and the trainer all read this.

Types and ranges of single fields are stated here for pydantic; what needs two fields is checked by
`planner.layout.problems`. `planner.parse` does both and reports every problem at once.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

SPEC_VERSION: Literal[1] = 1

Arch = Literal["gpt", "llama"]
Schedule = Literal["gpipe", "1f1b"]
Precision = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]

Degree = Annotated[int, Field(ge=1, le=65536)]


class Problem(NamedTuple):
    """One thing wrong with a spec: the dotted field it belongs to, and the arithmetic in words."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot run. Carries every problem, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Strict):
    """Shape of a decoder-only transformer.

    gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, RoPE, SwiGLU, GQA, no biases.
    """

    preset: str | None = Field(default=None, max_length=64, description="preset these sizes come from")
    arch: Arch
    num_layers: int = Field(ge=1, le=1024)
    hidden_size: int = Field(ge=1, le=1_048_576)
    num_heads: int = Field(ge=1, le=4096)
    num_kv_heads: int = Field(ge=1, le=4096, description="equal to num_heads without GQA")
    ffn_hidden_size: int = Field(ge=1, le=4_194_304)
    vocab_size: int = Field(ge=256, le=4_194_304, description="byte-level data needs 256")
    max_seq_len: int = Field(ge=1, le=16_777_216)
    tied_embeddings: bool


class Layout(_Strict):
    """How the ranks divide the work. Rank order: tp innermost, then dp, pp outermost."""

    dp: Degree = Field(default=1, description="data parallel degree")
    pp: Degree = Field(default=1, description="pipeline parallel degree (stages)")
    tp: Degree = Field(default=1, description="tensor parallel degree")
    zero: int = Field(default=0, ge=0, le=3, description="ZeRO stage; 0 is plain DDP")
    sequence_parallel: bool = Field(default=False, description="shard norms and residual along sequence over tp")
    schedule: Schedule = Field(default="1f1b", description="pipeline schedule, used when pp > 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp


class TrainSpec(_Strict):
    """What is trained on and for how long. Sizes in sequences and tokens."""

    global_batch: int = Field(default=8, ge=1, le=1_000_000, description="sequences per optimiser step")
    micro_batches: int = Field(default=1, ge=1, le=100_000, description="micro-batches per step on each dp replica")
    seq_len: int = Field(default=128, ge=1, le=16_777_216, description="tokens per sequence")
    steps: int = Field(default=50, ge=1, le=100_000_000)
    learning_rate: float = Field(default=1e-3, gt=0, le=10)
    warmup_steps: int = Field(default=10, ge=0, le=100_000_000)
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    grad_clip: float = Field(default=1.0, ge=0, le=1e6, description="largest gradient norm; 0 is off")
    precision: Precision = "fp32"
    seed: int = Field(default=1234, ge=0, le=2**63 - 1)
    data: str = Field(
        default="stdlib",
        min_length=1,
        max_length=4096,
        description="'stdlib', or a text file, directory or .bin of uint16 tokens under the data root",
    )
    eval_every: int = Field(default=25, ge=0, le=100_000_000, description="steps between validations; 0 is off")


class Resources(_Strict):
    """What kind of slot the ranks need, one slot each."""

    device: Device = "cpu"


class JobSpec(_Strict):
    """All that was asked for. Frozen; stored with the job as JSON."""

    version: Literal[1] = SPEC_VERSION
    name: str = Field(default="untitled", min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    model: ModelSpec
    layout: Layout = Layout()
    train: TrainSpec = TrainSpec()
    resources: Resources = Resources()

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one micro-batch of one dp replica."""
        return self.train.global_batch // (self.layout.dp * self.train.micro_batches)
