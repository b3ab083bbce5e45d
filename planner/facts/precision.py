"""Which number type holds what: bytes an element of each kind of model state, and the type products run in."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.spec import Precision

FP32_BYTES = 4
FP8_BYTES = 1
ADAM_MOMENT_BYTES = 2 * FP32_BYTES
GemmType = Literal["fp32", "bf16", "fp8"]


class Mix(NamedTuple):
    """Bytes an element. `compute`: weights and activations. `gradients`: as they are summed and as they travel.

    `optimizer`: Adam's moments, and fp32 master weights where weights are computed with in another type (1710.03740
    section 3.1).
    """

    description: str
    compute: int
    gradients: int
    optimizer: int
    gemm: GemmType

    @property
    def has_master(self) -> bool:
        """Whether fp32 weights are held besides those computed with."""
        return self.optimizer > ADAM_MOMENT_BYTES

    @property
    def sharded(self) -> int:
        """Of a weight that is held in shards and gathered to be computed with: fp32 where there is a master."""
        return FP32_BYTES if self.has_master else self.compute

    @property
    def moments(self) -> int:
        """Adam's two."""
        return self.optimizer - (FP32_BYTES if self.has_master else 0)

    @property
    def updated(self) -> int:
        """What an update reads and writes a parameter: weight and moments both ways, and the gradient."""
        return 2 * (self.sharded + self.moments) + self.sharded

    @property
    def state(self) -> int:
        """Bytes a parameter without ZeRO (1910.02054 section 3.1 counts 16 for `bf16_gradients`)."""
        return self.compute + self.gradients + self.optimizer


_MASTER = FP32_BYTES + ADAM_MOMENT_BYTES
MIXES: dict[Precision, Mix] = {
    "fp32": Mix("everything in fp32", 4, 4, ADAM_MOMENT_BYTES, "fp32"),
    "bf16": Mix("bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, "bf16"),
    "bf16_gradients": Mix("bf16 weights and gradients, fp32 master weights", 2, 2, _MASTER, "bf16"),
    "bf16_state": Mix("everything in bf16, including Adam moments", 2, 2, ADAM_MOMENT_BYTES // 2, "bf16"),
    "fp8_gradients": Mix("fp8 matmuls, bf16 weights and gradients, fp32 master weights", 2, 2, _MASTER, "fp8"),
    "fp8": Mix("fp8 matmuls, bf16 weights, fp32 gradients and master weights", 2, 4, _MASTER, "fp8"),
}


def mix_of(precision: Precision) -> Mix:
    return MIXES[precision]
