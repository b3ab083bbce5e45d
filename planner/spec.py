"""The one job specification: the form, REST, the command line and the trainer all read this.

Types and ranges of single fields are checked here by pydantic; what needs two fields is checked by
`planner.layout.problems`. `parse_spec` does both and reports every problem at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


def parse_spec(data: object, *, slots: int | None = None) -> JobSpec:
    """Turn untrusted JSON into a spec that can run.

    A model may be given as `{"preset": "gpt-tiny"}`; single sizes beside the preset override it.
    `slots`: how many slots the largest host has, when known.

    Raises:
        SpecError: with every problem found, each naming its field and showing the arithmetic.
    """
    from planner.layout import problems

    spec = parse_fields(data)
    found = problems(spec, slots=slots)
    if found:
        raise SpecError(found)
    return spec


def parse_fields(data: object) -> JobSpec:
    """Like `parse_spec`, but only what each field says by itself; rules across fields are not checked.

    Raises:
        SpecError: with every field that is wrong.
    """
    from planner.models import PRESETS, expand_preset

    if not isinstance(data, Mapping):
        raise SpecError([Problem("spec", f"must be an object, got {_shown(data)}")])
    expanded: dict[str, Any] = {str(key): value for key, value in data.items()}
    model = expanded.get("model")
    if isinstance(model, Mapping):
        name = model.get("preset")
        if isinstance(name, str) and name not in PRESETS:
            known = ", ".join(PRESETS)
            raise SpecError([Problem("model.preset", f"there is no preset {_shown(name)}; there are {known}")])
        expanded["model"] = expand_preset(model)
    try:
        return JobSpec.model_validate(expanded)
    except ValidationError as error:
        raise SpecError([_problem(e) for e in error.errors(include_url=False)]) from None


_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode text",
    "string_pattern_mismatch": "must not hold control characters",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
}


def _problem(error: Any) -> Problem:
    """pydantic's error in our words, with the value that was given."""
    field = ".".join(str(part) for part in error["loc"]) or "spec"
    text = _MESSAGES.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    if error["type"] == "missing":
        return Problem(field, text)
    return Problem(_shown(field, quote=False), f"{text}, got {_shown(error['input'])}")


def _shown(value: object, *, quote: bool = True) -> str:
    """A value as JSON would write it, short and safe to print whatever it holds."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value) if isinstance(value, str) else str(value)
    if isinstance(value, str) and not quote:
        text = text[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."
