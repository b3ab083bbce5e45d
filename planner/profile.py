"""What a calibration measured on one host: raw points, to which `planner.cluster` fits its constants.

Every point says how many ranks ran it at once, for ranks on one machine share its cores, memory and links.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from contracts.telemetry import Op
from planner.spec import Device

PROFILE_VERSION: Literal[1] = 1

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
MeasuredPrecision = Literal["fp32", "bf16"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class GemmPoint(_Strict):
    """(m, k) x (k, n) matrix product: 2 m n k FLOP in the median `seconds`."""

    ranks: Count
    precision: MeasuredPrecision
    m: Count
    n: Count
    k: Count
    seconds: Seconds


class StreamPoint(_Strict):
    """An elementwise kernel that reads and writes `num_bytes` in all; the smallest ones show an operator's overhead."""

    ranks: Count
    num_bytes: Count
    seconds: Seconds


class AttentionPoint(_Strict):
    """Causal scaled dot-product attention, (batch, heads, seq, head_dim): forward, and forward with backward."""

    ranks: Count
    precision: MeasuredPrecision
    batch: Count
    heads: Count
    seq: Count
    head_dim: Count
    forward_seconds: Seconds
    step_seconds: Seconds


class OptimizerPoint(_Strict):
    """One AdamW step over `num_parameters` fp32 elements in `num_tensors` tensors."""

    ranks: Count
    num_parameters: Count
    num_tensors: Count
    seconds: Seconds


class CollectivePoint(_Strict):
    """One collective; `payload_bytes` in the convention of `planner.collectives` (the full buffer)."""

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class HostProfile(_Strict):
    """Everything one calibration of a host measured."""

    version: Literal[1] = PROFILE_VERSION
    device: Device
    device_name: str
    torch_version: str
    cores: Count
    memory_bytes: Count
    measured_at: str = Field(description="ISO 8601 with its zone")
    gemm: tuple[GemmPoint, ...] = Field(min_length=1)
    stream: tuple[StreamPoint, ...] = Field(min_length=1)
    attention: tuple[AttentionPoint, ...] = ()
    optimizer: tuple[OptimizerPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
