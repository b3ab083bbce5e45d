"""What a calibration measured on one host: raw points, to which `planner.hardware.cluster` fits its constants.

Every point says how many ranks ran it at once, for ranks on one machine share its cores, memory and links.

What a run that ended leaves with its host: what it trained, and what it measured. No name, owner, data or seed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.telemetry.vocabulary import Op
from planner.facts.precision import GemmType
from planner.facts.resources import Device, Resources
from planner.facts.spec import Arch, JobSpec, TrainSpec
from planner.facts.validation import StrictModel

PROFILE_VERSION: Literal[2] = 2

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
MeasuredPrecision = Literal["fp32", "bf16"]


class GemmPoint(StrictModel):
    """(m, k) x (k, n) matrix product: 2 m n k FLOP in the median `seconds`, in fp8 with the casts of both operands."""

    ranks: Count
    precision: GemmType
    m: Count
    n: Count
    k: Count
    seconds: Seconds


class StreamPoint(StrictModel):
    """An elementwise kernel that reads and writes `num_bytes` in all; the smallest ones show an operator's overhead."""

    ranks: Count
    num_bytes: Count
    seconds: Seconds


class LayerPoint(StrictModel):
    """One transformer layer of the trainer on a tp rank, its collectives too: (micro_batch, seq_len, hidden)."""

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
    """Embedding, final norm, head and loss of the trainer on a tp rank, their collectives too."""

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
    """Gradient norm, clipping, AdamW step and clearing over `num_parameters` fp32 elements in `num_tensors` tensors."""

    ranks: Count
    num_parameters: Count
    num_tensors: Count
    seconds: Seconds


class CollectivePoint(StrictModel):
    """What one call adds to compute, `ranks` ranks at work in groups of `group_size`.

    `payload_bytes` as in `planner.facts.collectives`.
    """

    ranks: Count

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class HostProfile(StrictModel):
    """Everything one calibration of a host measured."""

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

    def timed_layers_in(self, kind: GemmType) -> bool:
        """Whether any layer was, whose products run in this type."""
        return any(layer.precision == kind for layer in self.layers)


# All else says nothing of time or memory: who trained, on what, for how long.
TRAIN_FIELDS = (
    *("global_batch", "micro_batches", "seq_len", "precision", "attention"),
    *("overlap", "compile", "dropout", "document_end", "checkpoint_every"),
)


class LinkPoint(StrictModel):
    """One call of a collective as it ran, waiting for its peers left out as far as can be told.

    `payload_bytes` as in `planner.facts.collectives`.
    """

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class Run(StrictModel):
    """`steps` were timed, the first ones left out; `step_s` is their median.

    `peak_bytes`: the most that a rank's memory rose above what it held before its model was built, of a GPU its tensors
    alone; None where unknown. `tells_copies`: `spec` says whether checkpoints were made, whose copies a CPU's peak
    holds; runs that were kept before do not.
    """

    spec: JobSpec
    steps: Count
    step_s: Seconds
    peak_bytes: Count | None = None
    tells_copies: bool = False
    links: tuple[LinkPoint, ...] = Field(default=(), max_length=64)


def stripped(spec: JobSpec) -> JobSpec:
    """The part of a spec that decides what a step costs."""
    train = spec.train.model_dump(include=set(TRAIN_FIELDS))
    return JobSpec(
        model=spec.model.model_copy(update={"preset": None}),
        layout=spec.layout,
        train=TrainSpec(**train),
        resources=Resources(device=spec.resources.device),
    )
