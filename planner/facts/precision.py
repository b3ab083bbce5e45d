"""Define the number types of weights, gradients, optimizer state, and matmuls."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.spec import Precision

FP32_BYTES = 4
FP8_BYTES = 1
ADAM_MOMENT_BYTES = 2 * FP32_BYTES
GemmType = Literal["fp32", "bf16", "fp8"]


class MixedPrecision(NamedTuple):
    """Bytes per element of each kind of state.

    `compute_bytes`: weights and activations. `gradient_bytes`: gradients in memory and in collectives.
    `optimizer_bytes`: Adam moments, and fp32 master weights if weights have another type (1710.03740 section 3.1).
    `gemm`: type of matmul inputs.
    """

    description: str
    compute_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gemm: GemmType

    @property
    def has_master_weights(self) -> bool:
        """Return whether there are fp32 master weights in addition to the compute weights."""
        return self.optimizer_bytes > ADAM_MOMENT_BYTES

    @property
    def sharded_bytes(self) -> int:
        """Return the bytes of a sharded weight: fp32 if there are master weights."""
        return FP32_BYTES if self.has_master_weights else self.compute_bytes

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of both Adam moments."""
        return self.optimizer_bytes - (FP32_BYTES if self.has_master_weights else 0)

    @property
    def update_bytes(self) -> int:
        """Return the bytes that an optimizer step reads and writes per parameter.

        It reads and writes weight and moments, and reads the gradient.
        """
        return 2 * (self.sharded_bytes + self.moment_bytes) + self.sharded_bytes

    @property
    def state_bytes(self) -> int:
        """Return bytes per parameter without ZeRO (16 for `bf16_gradients`, 1910.02054 3.1)."""
        return self.compute_bytes + self.gradient_bytes + self.optimizer_bytes


_MASTER = FP32_BYTES + ADAM_MOMENT_BYTES
MIXED_PRECISIONS: dict[Precision, MixedPrecision] = {
    "fp32": MixedPrecision("everything in fp32", 4, 4, ADAM_MOMENT_BYTES, "fp32"),
    "bf16": MixedPrecision("bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, "bf16"),
    "bf16_gradients": MixedPrecision("bf16 weights and gradients, fp32 master weights", 2, 2, _MASTER, "bf16"),
    "bf16_state": MixedPrecision("everything in bf16, including Adam moments", 2, 2, ADAM_MOMENT_BYTES // 2, "bf16"),
    "fp8_gradients": MixedPrecision(
        "fp8 matmuls, bf16 weights and gradients, fp32 master weights", 2, 2, _MASTER, "fp8"
    ),
    "fp8": MixedPrecision("fp8 matmuls, bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, "fp8"),
}


def get_mixed_precision(precision: Precision) -> MixedPrecision:
    return MIXED_PRECISIONS[precision]
