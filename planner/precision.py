"""Which number type holds what: bytes an element of each kind of model state, and the type products run in."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.spec import Precision

FP32_BYTES = 4
ADAM_MOMENT_BYTES = 2 * FP32_BYTES
GemmType = Literal["fp32", "bf16", "fp8"]


class Mix(NamedTuple):
    """Bytes an element. `reduced`: gradients as they travel. `optimizer`: Adam's moments, and fp32 weights if apart."""

    description: str
    weights: int
    gradients: int
    optimizer: int
    compute: int
    reduced: int
    gemm: GemmType

    @property
    def state(self) -> int:
        """Bytes a parameter without ZeRO (1910.02054 section 3.1 counts 16 for `bf16_gradients`)."""
        return self.weights + self.gradients + self.optimizer


_MASTER = FP32_BYTES + ADAM_MOMENT_BYTES
MIXES: dict[Precision, Mix] = {
    "fp32": Mix("everything in fp32", 4, 4, ADAM_MOMENT_BYTES, 4, 4, "fp32"),
    "bf16": Mix("fp32 weights, cast to bf16 to compute", 4, 4, ADAM_MOMENT_BYTES, 2, 4, "bf16"),
    "bf16_weights": Mix("bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, 2, 4, "bf16"),
    "bf16_gradients": Mix("16-bit weights and gradients, fp32 master weights", 2, 2, _MASTER, 2, 2, "bf16"),
    "fp8": Mix("fp8 products; bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, 2, 4, "fp8"),
}


def mix_of(precision: Precision) -> Mix:
    return MIXES[precision]
