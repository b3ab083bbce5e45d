"""Define measurements of a host: calibration points and finished runs.

Each point has the number of ranks that ran at the same time, because ranks of a host share cores, memory, and links.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.telemetry.items import Op
from planner.facts.model_parts import Arch
from planner.facts.precision import GemmType
from planner.facts.resources import Device, Resources
from planner.facts.spec import JobSpec, TrainSpec
from planner.facts.validation import StrictModel

PROFILE_VERSION: Literal[2] = 2

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
MeasuredPrecision = Literal["fp32", "bf16"]


class GemmPoint(StrictModel):
    """Median time of a matmul (m, k) x (k, n). fp8 includes the casts of both operands."""

    ranks: Count
    precision: GemmType
    m: Count
    n: Count
    k: Count
    seconds: Seconds


class StreamPoint(StrictModel):
    """Elementwise kernel that reads and writes `num_bytes`. The smallest show overhead."""

    ranks: Count
    num_bytes: Count
    seconds: Seconds


class LayerPoint(StrictModel):
    """Transformer layer of the trainer on a tp rank, including collectives.

    The input is (micro_batch, seq_len, hidden).
    """

    ranks: Count
    precision: MeasuredPrecision
    arch: Arch
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    ffn_hidden_size: Count
    tp: Count
    sequence_parallel: bool
    micro_batch: Count
    seq_len: Count
    forward_s: Seconds
    backward_s: Seconds


class EndsPoint(StrictModel):
    """Embedding, final norm, head, and loss of the trainer on a tp rank, with collectives."""

    ranks: Count
    precision: MeasuredPrecision
    arch: Arch
    hidden_size: Count
    vocab_size: Count
    tp: Count
    sequence_parallel: bool
    micro_batch: Count
    seq_len: Count
    forward_s: Seconds
    backward_s: Seconds


class OptimizerPoint(StrictModel):
    """Gradient norm, clipping, AdamW step, and clearing of gradients.

    The step updates `num_parameters` fp32 elements in `num_tensors` tensors.
    """

    ranks: Count
    num_parameters: Count
    num_tensors: Count
    seconds: Seconds


class CollectivePoint(StrictModel):
    """Time that one call adds to compute, with `ranks` ranks in groups of `group_size`.

    `payload_bytes` is defined in `planner.facts.collectives`.
    """

    ranks: Count

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class HostProfile(StrictModel):
    """All measurements of one calibration of a host."""

    version: Literal[2] = PROFILE_VERSION
    device: Device
    device_name: str
    torch_version: str
    cores: Count
    slots: Count
    memory_bytes: Count
    measured_at: str = Field(description="ISO 8601 with its zone")
    gemm: tuple[GemmPoint, ...] = Field(min_length=1)
    stream: tuple[StreamPoint, ...] = Field(min_length=1)
    layers: tuple[LayerPoint, ...] = ()
    ends: tuple[EndsPoint, ...] = ()
    optimizer: tuple[OptimizerPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()

    def has_layers_in(self, kind: GemmType) -> bool:
        """Return whether the profile has layers whose matmuls have this type."""
        return any(layer.precision == kind for layer in self.layers)


# Fields of `TrainSpec` that affect time or memory.
TRAIN_FIELDS = (
    *("global_batch", "micro_batches", "seq_len", "precision", "attention"),
    *("overlap", "compile", "dropout", "document_end", "checkpoint_every"),
)


class LinkPoint(StrictModel):
    """One measured call of a collective, without the wait for other ranks if known.

    `payload_bytes` is defined in `planner.facts.collectives`.
    """

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class MeasuredRun(StrictModel):
    """Measurements of a finished run, without its name, owner, data, and seed.

    `steps`: timed steps, without the first ones. `step_s`: their median.
    `peak_bytes`: increase of a rank's memory since before its model was built; on a GPU, tensors only. None if unknown.
    `tells_copies`: `spec` states whether checkpoints were saved, whose copies are part of a CPU's peak. Old runs do
    not.
    """

    spec: JobSpec
    steps: Count
    step_s: Seconds
    peak_bytes: Count | None = None
    tells_copies: bool = False
    links: tuple[LinkPoint, ...] = Field(default=(), max_length=64)


class MeasuredStep(StrictModel):
    """Seconds per step that a user measured, with the measured spec."""

    spec: JobSpec
    step_s: Seconds


def strip_spec(spec: JobSpec) -> JobSpec:
    """Return only the parts of a spec that affect the cost of a step."""
    train = spec.train.model_dump(include=set(TRAIN_FIELDS))
    return JobSpec(
        model=spec.model.model_copy(update={"preset": None}),
        layout=spec.layout,
        train=TrainSpec(**train),
        resources=Resources(device=spec.resources.device),
    )
