"""What a step came to, and whether a run goes on after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.facts.spec import TrainSpec
from workers.trainer.errors import DivergedError
from workers.trainer.optimizer import learning_rate


@dataclass(frozen=True)
class StepResult:
    """Global mean loss and gradient norm before clipping."""

    loss: float
    grad_norm: float

    @property
    def not_finite(self) -> str:
        """What of it is no number, in words; empty where all is."""
        named = (("loss", self.loss), ("gradient norm", self.grad_norm))
        return " and ".join(f"{name} is {value}" for name, value in named if not math.isfinite(value))


def stop_if(not_finite: str, index: int, train: TrainSpec) -> None:
    """End the run unless it is to go on with what is no number. All ranks know the same sums: all end, or none."""
    if not not_finite or train.on_not_finite == "continue":
        return
    rate = f"learning rate {train.learning_rate:g} ({learning_rate(index, train):.3g} at this step)"
    clip = f"gradient clip {train.grad_clip:g}" if train.grad_clip else "gradient clip off"
    raise DivergedError(f"{not_finite} at step {index + 1}; {rate}, {clip}, precision {train.precision}")
